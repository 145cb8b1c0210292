"""The dropout hash: its exact bits, and that they behave like independent coin tosses."""

import numpy as np
import pytest

from lorawgpu.families.modules import LINEAR_MODULES
from lorawgpu.ops.hash import random_key
from lorawgpu.reference.dropout import MODULES, dropout_mask, dropout_step_key
from lorawgpu.reference.sample import key_of

KEY = dropout_step_key(42, 1, 0)


def test_dropout_bits_are_pinned():
    """Values computed with Python integers. Kernels must match them, and old runs must stay reproducible."""

    def mix(h):
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        return h ^ h >> 16

    seed, step, micro_batch, layer, module, p = 2**40 + 42, 7, 3, 5, 6, 0.25
    keys = []
    for key in (0x243F6A88, 0x85A308D3):
        for word in (seed % 2**32, seed >> 32, step, micro_batch, layer * 7 + module):
            key = (mix(key ^ word) + 0x9E3779B9) % 2**32
        keys.append(key)
    kept = [mix((mix(i ^ keys[0]) + keys[1]) % 2**32) >= int(p * 2**32) for i in range(5 * 9)]
    mask = dropout_mask(dropout_step_key(seed, step, micro_batch), layer, module, 5, 9, p)
    assert mask.tolist() == np.reshape(kept, (5, 9)).tolist()
    assert KEY.tolist() == [2103649788, 2761610925]


@pytest.mark.parametrize("seed", [0, 1, 42, 2**32 - 1, 2**32, 2**40 + 42, 2**64 - 1])
def test_host_keys_are_those_of_the_reference(seed):
    for step, micro_batch in ((1, 0), (7, 3), (2**32 - 1, 2**16)):
        assert random_key(seed, step, micro_batch) == tuple(dropout_step_key(seed, step, micro_batch).tolist())
    assert random_key(seed) == tuple(key_of(seed).tolist())
    assert LINEAR_MODULES == MODULES


def test_dropout_prefix_does_not_depend_on_capacity():
    assert np.array_equal(dropout_mask(KEY, 0, 0, 4, 9, 0.5), dropout_mask(KEY, 0, 0, 16, 9, 0.5)[:4])


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_dropout_statistics(p):
    """The mean of all bits is within 5 sigma, the means of the thousand rows and columns within 6."""
    mask = dropout_mask(KEY, 3, 2, 512, 488, p)
    sigma = np.sqrt(p * (1 - p))
    assert abs(mask.mean() - (1 - p)) < 5 * sigma / np.sqrt(mask.size)
    for axis, n in ((0, 512), (1, 488)):
        assert np.abs(mask.mean(axis) - (1 - p)).max() < 6 * sigma / np.sqrt(n)


def other_streams():
    """(label, mask) whose stream differs from the base one in a single word of the key, by a single bit."""
    shape = (128, 256, 0.5)
    for bit in (0, 1, 7, 31):
        yield f"seed bit {bit}", dropout_mask(dropout_step_key(42 ^ 1 << bit, 1, 0), 0, 0, *shape)
        yield f"step bit {bit}", dropout_mask(dropout_step_key(42, 1 ^ 1 << bit, 0), 0, 0, *shape)
        yield f"micro-batch bit {bit}", dropout_mask(dropout_step_key(42, 1, 1 << bit), 0, 0, *shape)
    yield "seed high word", dropout_mask(dropout_step_key(42 + 2**32, 1, 0), 0, 0, *shape)
    yield "step and micro-batch swapped", dropout_mask(dropout_step_key(42, 0, 1), 0, 0, *shape)
    for layer in (0, 1, 29):
        for module in range(len(MODULES)):
            if layer or module:
                yield f"layer {layer} {MODULES[module]}", dropout_mask(KEY, layer, module, *shape)


def test_dropout_has_no_correlation():
    """Along a row, down a column, at power-of-two distances, and between streams; 5 sigma of n coins is 5/sqrt(n)."""
    base = dropout_mask(KEY, 0, 0, 128, 256, 0.5) * 2.0 - 1.0
    bound = 5 / np.sqrt(base.size)
    stream = base.ravel()
    for lag in (1, 2, 3, 255, 256, 257, *(1 << b for b in range(2, 14))):
        assert abs((stream[lag:] * stream[:-lag]).mean()) < bound * np.sqrt(base.size / (base.size - lag)), lag
    for bit in range(15):  # partners of a flipped index bit: what one key word alone would leave related
        assert abs((stream * stream[np.arange(base.size) ^ 1 << bit]).mean()) < bound * np.sqrt(2), bit
    spectrum = np.abs(np.fft.fft2(base)) / np.sqrt(base.size)
    assert spectrum.max() < np.sqrt(np.log(base.size) + 10)  # exponential tail: exceeded once in e^10 masks
    for label, mask in other_streams():
        other = mask * 2.0 - 1.0
        assert abs((base * other).mean()) < bound, label
        cross = np.abs(np.fft.ifft2(np.fft.fft2(base) * np.fft.fft2(other).conj()).real) / base.size
        assert cross.max() < 6.5 / np.sqrt(base.size), label  # any shift: 32768 of them
