"""Quantized folders of other tools: exactly the values of their libraries, trained as the dequantized model."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from packed_models import CASE, DECLARED, GROUP, write_packed
from tiny_model import Tiny, random_samples
from tiny_run import write_config

from lorawgpu.config.load import load_config
from lorawgpu.files.safetensors import SafetensorsFile
from lorawgpu.gpu import open_dry_device
from lorawgpu.train.setup import prepare
from lorawgpu.weights.affine import Affine
from lorawgpu.weights.compressed_tensors import CompressedTensors
from lorawgpu.weights.hf_folder import HfFolder
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.mlx import MlxTensors
from lorawgpu.weights.packed import Settings
from lorawgpu.weights.synthetic import meta_model
from lorawgpu.weights.tensors import Checkpoint, Dense

# Matrices that mlx 0.32.4 (mlx.core.quantize) and compressed-tensors 0.20.1 (PackedQuantizationCompressor) have
# quantized, with the SHA-256 of the float32 values that they dequantize to when the scales are float32.
DATA = Path(__file__).parent / "data"
SHAPES = {"mlx_affine": (8, 256), "compressed_tensors": (12, 256)}


def library_tensors(name):
    file = SafetensorsFile(DATA / f"{name}.safetensors")
    files = {entry: (file, entry) for entry in file.entries}
    if name == "mlx_affine":
        return file, MlxTensors(files, Settings({}, ""))
    return file, CompressedTensors(files, Settings({"config_groups": {}}, ""))


@pytest.mark.parametrize("name", SHAPES)
def test_values_are_those_of_the_library(name):
    file, tensors = library_tensors(name)
    assert len(tensors.names) == {"mlx_affine": 18, "compressed_tensors": 26}[name]
    for weight in tensors.names:
        tensors.check(weight, SHAPES[name])
        matrix, wanted = tensors.matrix(weight), file.read(weight.replace("weight", "sha256")).tobytes()
        values = matrix.float32()
        assert hashlib.sha256((values + np.float32(0)).tobytes()).digest() == wanted, weight
        rows = tensors.float32(weight, np.array([3, 0])), tensors.float32(weight, slice(4, 7))
        assert np.array_equal(rows[0], values[[3, 0]]) and np.array_equal(rows[1], values[4:7])
        bits, group, *_ = weight.split("_")
        exact = name == "mlx_affine" or not weight.endswith("float32.weight")  # else products with zero points round
        assert tensors.store(weight) == (f"affine{bits}_{group.replace('channel', '128')}" if exact else "f32")
        assert isinstance(matrix, Affine if exact else Dense)


class Dequantized(Checkpoint):
    """A checkpoint with its quantized matrices as dense float32."""

    def __init__(self, base, values):
        self.base, self.config, self.values, self.path, self.name = base, base.config, values, base.path, base.name

    def settings(self):
        return b""

    def dense(self, name):
        return Dense(self.values[name], "f32") if name in self.values else self.base.dense(name)

    def ternary(self, name):
        raise NotImplementedError

    def tokenizer(self):
        raise NotImplementedError


def test_qlora_on_a_folder_that_is_in_4_bits(tmp_path):
    """Configs for such folders say load_in_4bit too: there is nothing left to quantize."""
    write_packed(tmp_path / "m", "mlx")
    run = prepare(
        load_config(write_config(tmp_path, base_model=str(tmp_path / "m"), adapter="qlora", load_in_4bit=True))
    )
    assert run.checkpoint.in_4bit and type(run.checkpoint) is HfFolder
    assert not open_checkpoint(CASE).in_4bit


@pytest.mark.parametrize("form", DECLARED)
def test_a_step_is_that_of_the_dequantized_model(tmp_path, device, kernels, form):
    values = write_packed(tmp_path / "m", form)
    checkpoint = open_checkpoint(tmp_path / "m")
    for name, wanted in values.items():
        assert checkpoint.store(name) == f"affine4_{GROUP}" and np.array_equal(checkpoint.dense(name).data, wanted)
    samples = random_samples((9, 13), checkpoint.config.vocab_size)
    tiny = Tiny(device, kernels, checkpoint=checkpoint)
    assert meta_model(open_dry_device(None), checkpoint).nbytes == tiny.model.nbytes
    loss, grads = tiny.gradients(samples)
    wanted_loss, wanted = Tiny(device, kernels, checkpoint=Dequantized(checkpoint, values)).gradients(samples)
    assert loss == pytest.approx(wanted_loss, rel=1e-6) and loss > 0
    for name, grad in wanted.items():
        assert np.abs(grads[name] - grad).max() <= 1e-5 * np.abs(grad).max() > 0, name
