"""Choosing the next token on the GPU, so that the next step can be recorded before it is known: shaders/sample.wgsl."""

import math
import struct
from dataclasses import dataclass

import numpy as np
import wgpu

from ..gpu import Device, Tensor
from ..reference.sample import key_of
from .rows import STRIDE

RING = 64  # tokens of a row that `history` keeps: the host has to read it that often
STRIPE = 2048  # logits that a workgroup looks through, as long as there are no more than MAX_STRIPES
MAX_STRIPES = 64
LOWEST = -3.0e38  # log of a probability that is no limit
_LAYOUT = "<4f3I"


@dataclass(frozen=True)
class SampleBuffers:
    """What sampling keeps on the device for up to `sequences` sequences."""

    settings: Tensor  # a uniform: `pack_settings`
    seen: Tensor  # u32 [sequences, ceil(V/32)]: bits of the tokens a sequence holds
    stripes: Tensor
    floors: Tensor
    history: Tensor  # u32 [sequences, RING]: sampled tokens, number n at n % RING
    vocab: int

    @staticmethod
    def create(device: Device, sequences: int, vocab: int) -> "SampleBuffers":
        size = struct.calcsize(_LAYOUT)
        usage = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST
        settings = Tensor(device.buffer(size, "sampling", "step", usage), (size // 4,), "u32", 0, "sampling")

        def words(name, *shape):
            return device.tensor((sequences, *shape), "u32", name, "step")

        seen, history = words("seen tokens", -(-vocab // 32)), words("history", RING)
        return SampleBuffers(settings, seen, words("stripes", MAX_STRIPES, 2), words("floors"), history, vocab)


def pack_settings(sampling) -> np.ndarray:
    """The contents of `settings` for a generation.sampling.Sampling, uint32 [7]."""
    inverse = 1.0 if sampling.greedy else 1.0 / sampling.temperature
    log_min_p = math.log(sampling.min_p) if sampling.min_p > 0 else LOWEST
    words = struct.pack(
        _LAYOUT,
        inverse,
        sampling.repetition_penalty,
        sampling.top_p,
        log_min_p,
        sampling.top_k,
        *map(int, key_of(sampling.seed)),
    )
    return np.frombuffer(words, np.uint32)


def seen_bits(ids, vocab: int) -> np.ndarray:
    """A row of `seen` for these tokens, uint32 [ceil(V/32)]."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[np.asarray(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def sample_greedy(plan, buffers, logits, rows, state, *, count):
    """The best token of each of `count` rows of logits [count, ld] goes to `history` and becomes its next input."""
    _record(plan, "peak", buffers, count, logits.shape[1], logits=logits, seen=buffers.seen, stripes=buffers.stripes)
    _finish(plan, buffers, logits, rows, state, count)


def sample_draw(plan, buffers, logits, rows, state, *, count):
    """As sample_greedy, with a token drawn as the settings say."""
    scores = {"logits": logits, "seen": buffers.seen, "stripes": buffers.stripes}
    _record(plan, "peak", buffers, count, logits.shape[1], **scores)
    _record(plan, "select_floor", buffers, count, logits.shape[1], one=True, floors=buffers.floors, **scores)
    _record(plan, "draw", buffers, count, logits.shape[1], floors=buffers.floors, rows=rows, **scores)
    _finish(plan, buffers, logits, rows, state, count)


def _finish(plan, buffers, logits, rows, state, count):
    tensors = {"stripes": buffers.stripes, "next_seen": buffers.seen, "history": buffers.history}
    _record(plan, "finish", buffers, count, logits.shape[1], one=True, next_rows=rows, state=state, **tensors)


def _record(plan, entry, buffers, count, ld, one=False, **tensors):
    groups = min(MAX_STRIPES, -(-buffers.vocab // STRIPE))
    params = {"vocab": buffers.vocab, "ld": ld, "groups": groups, "seen_ld": buffers.seen.shape[1]}
    if entry != "finish":
        tensors["settings"] = buffers.settings
    overrides = {"FIELD": STRIDE, "RING": RING}
    plan.record("sample", entry, (1 if one else groups, count), params=params, overrides=overrides, **tensors)
