"""Choose the next token on the GPU, so that the host can submit the next step before it knows the token.

Equations: shaders/sample.wgsl, shaders/sample_floor.wgsl.
"""

import math
import struct
from dataclasses import dataclass

import numpy as np

from lorawgpu.gpu import Device, Tensor
from lorawgpu.ops.decode_state import STRIDE
from lorawgpu.ops.hash import random_key

RING = 64  # tokens per row that `history` keeps; the host must read it at least that often
STRIPE = 1024  # logits that a workgroup searches, more if that would take over MAX_STRIPES workgroups
MAX_STRIPES = 128
TOP_BIT = 28  # lowest bit of the first digit of a floor
NO_MIN_P = -3.0e38  # log of a min_p that excludes nothing
OFF = 0xFFFFFFFF, 2.0  # top_k and top_p that no row reaches: nothing is excluded
_LAYOUT = "<4f4I"


@dataclass(frozen=True)
class SampleBuffers:
    """Device buffers for sampling up to `sequences` sequences."""

    settings: Tensor  # u32 [sequences, 8], from `pack_settings`
    seen: Tensor  # u32 [sequences, ceil(V/32)]: bit set of the tokens in a sequence
    peaks: Tensor  # the best token of each stripe, without noise
    drawn: Tensor  # the same with noise
    floors: Tensor
    partial: Tensor
    search: Tensor
    history: Tensor  # u32 [sequences, RING]: sampled tokens, token n at n % RING
    vocab: int

    @staticmethod
    def create(device: Device, sequences: int, vocab: int) -> "SampleBuffers":
        def words(name, *shape):
            return device.tensor((sequences, *shape), "u32", name, "step")

        settings = words("sampling", struct.calcsize(_LAYOUT) // 4)
        seen, history = words("seen tokens", -(-vocab // 32)), words("history", RING)
        stripes = [words(name, MAX_STRIPES, 2) for name in ("peaks", "drawn")]
        search = words("floors"), words("partial sums", 2, MAX_STRIPES, 16), words("search", 2, 4)
        return SampleBuffers(settings, seen, *stripes, *search, history, vocab)


def pack_settings(samplings) -> np.ndarray:
    """The first rows of `settings`, for a generate.sampling.Sampling each, uint32 [rows, 8]."""
    return np.frombuffer(b"".join(map(_pack, samplings)), np.uint32).reshape(len(samplings), -1)


def _pack(sampling) -> bytes:
    inverse = 1.0 if sampling.greedy else 1.0 / sampling.temperature
    log_min_p = math.log(sampling.min_p) if sampling.min_p > 0 else NO_MIN_P
    top_k, top_p = sampling.top_k or OFF[0], sampling.top_p if sampling.top_p < 1 else OFF[1]
    floats = inverse, sampling.repetition_penalty, top_p, log_min_p
    return struct.pack(_LAYOUT, *floats, top_k, *random_key(sampling.seed), sampling.greedy)


def seen_bits(ids, vocab: int) -> np.ndarray:
    """The row of `seen` for tokens `ids`, uint32 [ceil(V/32)]."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[np.asarray(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def sections_of(samplings) -> tuple:
    """The sections of `record_sample` to run for rows with these generate.sampling.Samplings, in order.

    A row's token does not depend on the sections that only other rows need.
    """
    drawn = [s for s in samplings if not s.greedy]
    if not drawn:
        return ("peak", "greedy")
    floors = ("top_k",) * any(s.top_k > 0 for s in drawn) + ("top_p",) * any(s.top_p < 1 for s in drawn)
    return ("peak", *floors, "draw")


def record_sample(plan, buffers, logits, rows, state, *, count):
    """Record sections that choose a token for each of `count` rows of logits [count, ld].

    `sections_of` selects those to run. The token goes to `history` and becomes the next input in `rows`
    (ops.decode_state).
    """
    common = {"settings": buffers.settings, "logits": logits, "seen": buffers.seen}
    peaks, floors, drawn = ({name: getattr(buffers, name)} for name in ("peaks", "floors", "drawn"))
    ld = logits.shape[1]

    def record(stem, entry, **kwargs):
        _record(plan, stem, entry, buffers, count, ld, **kwargs)

    def finish(stripes):
        following = {"next_rows": rows, "next_seen": buffers.seen, "history": buffers.history}
        record("sample", "finish", one=True, peaks=stripes, state=state, **following)

    with plan.section("peak"), plan.scope("sample"):
        record("sample", "peak", stripes=buffers.peaks, **floors, **common)
    with plan.section("greedy"), plan.scope("sample"):
        finish(buffers.peaks)
    for by_mass, name in enumerate(("top_k", "top_p")):
        with plan.section(name), plan.scope("sample"):
            search = {"partial": buffers.partial, "search": buffers.search, **floors, "by_mass": by_mass}
            for bit in range(TOP_BIT, -1, -4):
                record("sample_floor", "digit", bit=bit, **peaks, **common, **search)
            record("sample_floor", "settle", one=True, settings=buffers.settings, **search)
    with plan.section("draw"), plan.scope("sample"):
        record("sample", "draw", stripes=buffers.drawn, rows=rows, **peaks, **floors, **common)
        finish(buffers.drawn)


def _record(plan, stem, entry, buffers, count, ld, one=False, bit=0, by_mass=0, **tensors):
    groups = min(MAX_STRIPES, -(-buffers.vocab // STRIPE))
    params = {"vocab": buffers.vocab, "ld": ld, "groups": groups, "seen_ld": buffers.seen.shape[1]}
    params |= {"bit": bit, "by_mass": by_mass}
    overrides = {"FIELD": STRIDE, "RING": RING} if stem == "sample" else {}
    plan.record(stem, entry, (1 if one else groups, count), params=params, overrides=overrides, **tensors)
