"""The dense golden model with random weights in the formats of other quantizers, packed here by their documentation."""

import json
import shutil

import numpy as np
from golden_case import GOLDEN
from safetensors.numpy import save_file

from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.tensors import is_linear

CASE = GOLDEN / "llama_dense"
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
DECLARED = {
    "mlx": {"quantization": {"group_size": GROUP, "bits": 4}, "quantization_config": {"group_size": GROUP, "bits": 4}},
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}},
    "gptq_v2": {"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}},
    "awq": {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}},
    "compressed-tensors": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
            "ignore": ["lm_head"],
        }
    },
}


def words(codes, bits=4, order=range(8)):
    """Codes packed along the last axis: slot i of a word, from its lowest bits, holds code order[i] of its run."""
    per = 32 // bits
    found = np.zeros((*codes.shape[:-1], codes.shape[-1] // per), np.uint32)
    for slot, column in zip(range(per), order, strict=True):
        found |= codes[..., column::per].astype(np.uint32) << np.uint32(bits * slot)
    return found


def packed(form, name, codes, scales, zeros):
    """The tensors of a matrix of (code - zero) * scale: codes and zeros [out, ..], zeros from 1 to 15."""
    module = name.removesuffix(".weight")
    if form == "mlx":
        biases = -zeros.astype(np.float32) * scales.astype(np.float32)
        parts = {"weight": words(codes), "scales": scales.astype(np.float32), "biases": biases}
    elif form == "awq":
        parts = {"qweight": words(codes.T, 4, AWQ_ORDER), "qzeros": words(zeros.T, 4, AWQ_ORDER), "scales": scales.T}
    elif form == "compressed-tensors":
        parts = {"weight_packed": words(codes), "weight_scale": scales, "weight_zero_point": words(zeros.T).T}
        parts["weight_shape"] = np.array(codes.shape, np.int64)
    else:
        stored = zeros - 1 if form == "gptq" else zeros
        parts = {"qweight": words(codes).T, "qzeros": words(stored.T), "scales": scales.T}
        parts |= {"g_idx": np.arange(codes.shape[1]) // GROUP, "bias": np.zeros(len(codes), np.float16)}
    integer = np.uint32 if form == "mlx" else np.int32
    integers = {np.dtype(np.uint32): integer, np.dtype(np.int64): np.int64 if form == "compressed-tensors" else integer}
    return {
        f"{module}.{part}": np.ascontiguousarray(value).astype(integers.get(value.dtype, value.dtype))
        for part, value in parts.items()
    }


def write_packed(folder, form, edit=lambda tensors: None, config=None):
    """Write a model of this format. Returns the values of its quantized matrices, float32 by name."""
    base, tensors, values, rng = open_checkpoint(CASE), {}, {}, np.random.default_rng(0)
    for name in base.keys():
        stored = base.dense(name).float32()
        if not is_linear(name) and not (form == "mlx" and name == base.embedding_name):
            tensors[name] = stored
            continue
        rows, columns = stored.shape
        shape = (rows, columns // GROUP)
        codes, zeros = rng.integers(0, 16, stored.shape, np.uint8), rng.integers(1, 16, shape, np.uint8)
        scales = rng.normal(0, 1 / 64, shape).astype(np.float16)
        scales[::3] *= np.float16(2**-11)  # subnormal
        differences = codes.reshape(*shape, GROUP).astype(np.float32) - zeros[..., None]
        values[name] = (differences * scales[..., None].astype(np.float32)).reshape(stored.shape)
        tensors |= packed(form, name, codes, scales, zeros)
    edit(tensors)
    shutil.copytree(CASE, folder)
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | (config or DECLARED[form])))
    return values
