"""NF4 checkpoints as bitsandbytes and transformers save them."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from golden_case import GOLDEN
from safetensors.numpy import load_file, save_file

from lorawgpu.errors import UserError
from lorawgpu.files.safetensors import SafetensorsFile
from lorawgpu.weights.bitsandbytes import STATE, Nf4Tensors
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.nf4 import NF4_LEVELS
from lorawgpu.weights.tensors import is_linear

# A Linear4bit of 144 x 128 with compress_statistics (bitsandbytes 0.50.2, state_dict), and the hash of the float32
# weights that its dequantize_4bit returns.
STORED = Path(__file__).parent / "data" / "bitsandbytes_nf4.safetensors"
DEQUANTIZED = "1c9a460caba9aa7b6052e0021e3aafad05a7fb2ab1bb341fb4ca08ec956968f3"
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def test_values_are_those_of_bitsandbytes():
    file = SafetensorsFile(STORED)
    tensors = Nf4Tensors({name: (file, name) for name in file.entries})
    tensors.check("weight", (144, 128))
    matrix = tensors.matrix("weight")
    assert hashlib.sha256(matrix.float32().tobytes()).hexdigest() == DEQUANTIZED


def nf4_tensors(name, values, **state):
    """A weight as bitsandbytes stores it with statistics that are not nested."""
    blocks = values.reshape(-1, 64)
    absmax = np.abs(blocks).max(1)
    codes = np.abs(blocks[..., None] / absmax[:, None, None] - NF4_LEVELS).argmin(-1).reshape(-1, 2).astype(np.uint8)
    settings = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(values.shape)} | state
    return {
        name: (codes[:, :1] << 4 | codes[:, 1:]),
        f"{name}.absmax": absmax,
        f"{name}.quant_map": NF4_LEVELS,
        f"{name}.{STATE}": np.frombuffer(json.dumps(settings).encode(), np.uint8),
    }


def nf4_folder(folder, edit=lambda tensors: None, config=CONFIG, **state):
    """The dense golden model with its linear layers in NF4, but for those whose rows are not whole blocks."""
    base, tensors = open_checkpoint(GOLDEN / "llama_dense"), {}
    for name in base.keys():
        values = base.dense(name).float32()
        whole = is_linear(name) and values.shape[1] % 64 == 0
        tensors |= nf4_tensors(name, values, **state) if whole else {name: values}
    edit(tensors)
    shutil.copytree(GOLDEN / "llama_dense", folder)
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return folder


def test_a_folder_with_dense_layers_next_to_nf4(tmp_path, device):
    checkpoint = open_checkpoint(nf4_folder(tmp_path / "m"))
    stored = load_file(tmp_path / "m" / "model.safetensors")
    gate, down = (f"model.layers.0.mlp.{path}_proj.weight" for path in ("gate", "down"))
    assert (checkpoint.store(gate), checkpoint.store(down), checkpoint.quantized) == ("nf4", "f32", True)
    packed, absmax = stored[gate].ravel(), stored[f"{gate}.absmax"]
    wanted = NF4_LEVELS[np.stack([packed >> 4, packed & 15], 1).reshape(-1, 64)] * absmax[:, None]
    assert np.array_equal(checkpoint.dense(gate).data.reshape(-1, 64), wanted)
    parts = load_model(device, checkpoint).layers[0].weights["gate_up"].parts
    assert [part.store.name for part in parts] == ["nf4"]


GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blocksize": 128}, "blocksize is 128 in its quant_state; wanted 64"),
        ({"edit": lambda t: t.pop(f"{GATE}.absmax")}, "its absmax are missing; wanted 160 values of F32"),
        ({"edit": lambda t: t.update({GATE: t[GATE][1:]})}, "its codes are U8 [5119, 1]; wanted 5120 values of U8"),
        ({"edit": lambda t: t.update({f"{GATE}.{STATE}": np.frombuffer(b"[]", np.uint8)})}, "wanted a JSON object"),
        ({"edit": lambda t: t.update({f"{GATE}.nested_absmax": np.ones(1, np.float32)})}, "nested_blocksize or nested"),
        ({"config": CONFIG | {"bnb_4bit_quant_type": "fp4"}}, "bnb_4bit_quant_type 'fp4' is not supported"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, options, words):
    with pytest.raises(UserError) as error:
        open_checkpoint(nf4_folder(tmp_path / "m", **options))
    assert words in str(error.value)


def test_other_levels_are_refused(tmp_path):
    folder = nf4_folder(tmp_path / "m", edit=lambda t: t.update({f"{GATE}.quant_map": NF4_LEVELS / 2}))
    with pytest.raises(UserError, match="its quant_map is not that of NF4"):
        open_checkpoint(folder).matrix(GATE)
