"""Quantizing as a matrix is uploaded: ggml's and bitsandbytes' values."""

import gguf
import numpy as np
import pytest
from oplab import normal

from lorawgpu.ops.stores import STORES
from lorawgpu.weights.blocks import records
from lorawgpu.weights.device import lines_of
from lorawgpu.weights.nf4 import NF4_LEVELS
from lorawgpu.weights.quantizers import TYPICAL_ERROR, quantized
from lorawgpu.weights.tensors import Dense, Quantizable

Q = gguf.GGMLQuantizationType


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_blocks_are_those_of_ggml(name):
    values = normal(40, 320) * np.logspace(-6, 2, 40, dtype=np.float32)[:, None]
    values[3, 32:64] = 0
    raw = gguf.quants.quantize(values, Q[name.upper()])
    assert np.array_equal(quantized(values, STORES[name]), records(raw, STORES[name]))
    values = normal(64, 4096)
    decoded = gguf.quants.dequantize(gguf.quants.quantize(values, Q[name.upper()]), Q[name.upper()])
    assert (decoded - values).std() == pytest.approx(TYPICAL_ERROR[name], rel=0.02)


def nf4_values(record: np.ndarray) -> np.ndarray:
    """Records of four rows, one block each, as values."""
    words, scales = record[:, :32].reshape(-1, 16, 2), record[:, 32:].view(np.float32)
    rows = [
        words[:, :, row // 2].copy().view(np.uint8).reshape(len(record), 64) >> 4 * (row % 2) & 15 for row in range(4)
    ]
    return np.concatenate([NF4_LEVELS[q] * scales[:, r : r + 1] for r, q in enumerate(rows)])


def test_nf4_is_that_of_bitsandbytes():
    """`quantize_4bit(w, 64, quant_type="nf4", compress_statistics=False)` of bitsandbytes 0.50.2; high nibble first."""
    values = np.sin(np.arange(64, dtype=np.float32) ** 2).reshape(1, 64) * np.float32(0.37)
    packed = "7e1c4600f12f22f0073a0f9f092901f45f65f10c140fef030e14ecdbddd84f00"
    codes = np.frombuffer(bytes.fromhex(packed), np.uint8)
    wanted = NF4_LEVELS[np.stack([codes >> 4, codes & 15], 1).ravel()] * np.abs(values).max()
    got = nf4_values(quantized(np.repeat(values, 4, axis=0), STORES["nf4"]))
    assert np.array_equal(got, np.repeat(wanted[None], 4, axis=0))


def test_the_typical_error_of_nf4():
    values = normal(400, 64)
    got = nf4_values(quantized(values, STORES["nf4"]))
    order = np.concatenate([values[row::4] for row in range(4)])
    assert (got - order).std() == pytest.approx(TYPICAL_ERROR["nf4"], rel=0.03)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "nf4"])
def test_rows_past_the_end_are_zero_and_nan_is_refused(name):
    values = normal(5, 64)
    lines = lines_of(Quantizable(Dense(values, "f32"), name, "w"))
    assert (lines.rows, lines.columns) == (16, 64)
    assert np.array_equal(lines.read(0, 1), quantized(values[:4], STORES[name]))
    values[2, 7] = np.nan
    with pytest.raises(ValueError, match="w: has values that are not finite"):
        lines.read(0, 1)
