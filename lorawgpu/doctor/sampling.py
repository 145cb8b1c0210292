"""Checks of sampling against its specification: (lab, sampling, vocab) -> results; see check.py."""

from dataclasses import replace

import numpy as np

from lorawgpu.doctor.lab import normal
from lorawgpu.generate.sampling import Sampling
from lorawgpu.ops.decode_state import FIELDS, STRIDE
from lorawgpu.ops.sample import RING, SampleBuffers, pack_settings, record_sample, sections_of, seen_bits
from lorawgpu.reference import sample as reference

DRAW = Sampling(temperature=0.9, top_k=40, top_p=0.8, min_p=0.05, repetition_penalty=1.3, seed=7)
NAMED = {"draw": DRAW, "greedy": replace(DRAW, temperature=0.0)}
COUNT, POSITION = 4, 5


def _expected(logits, seen, sampling: Sampling) -> np.ndarray:
    tokens = []
    for row, values in enumerate(logits):
        scores = reference.scores(values, seen, sampling.repetition_penalty, sampling.temperature)
        keep = reference.kept(scores, sampling.top_k, sampling.top_p, sampling.min_p)
        noise = reference.noise(sampling.seed, row, POSITION, len(values)) if sampling.temperature else 0
        tokens.append(reference.draw(scores, keep, noise))
    return np.array(tokens)


def sample(lab, sampling, vocab):
    """`sampling`: settings, or a name in NAMED. The hash is exact, and no two candidates are close here."""
    sampling, seen_ids = NAMED.get(sampling, sampling), (3, 7, vocab - 1)
    logits = 3 * normal(COUNT, vocab)
    state = np.zeros((len(FIELDS), STRIDE), np.int32)
    start = {"position": POSITION, "slot": POSITION, "end": 100, "stream": np.arange(STRIDE)}
    for name, value in start.items():
        state[FIELDS.index(name)] = value
    bits = np.stack([seen_bits(seen_ids, vocab)] * COUNT)
    seen, history = lab.output(*bits.shape, initial=bits, dtype="u32"), lab.output(COUNT, RING, dtype="u32")
    rows, bad = lab.output(*state.shape, initial=state, dtype="i32"), lab.state()
    buffers = replace(SampleBuffers.create(lab.device, COUNT, vocab), seen=seen.exact, history=history.exact)
    lab.device.write(buffers.settings, pack_settings([sampling] * COUNT))
    record_sample(lab.plan, buffers, lab.input(logits), rows.exact, bad.exact, count=COUNT)
    lab.sections = sections_of([sampling])

    def results():
        want = _expected(logits, seen_ids, sampling)
        row = dict(zip(FIELDS, rows.value[:, :COUNT], strict=True))
        stepped = {"ids": want, "position": POSITION + 1, "slot": POSITION + 1, "count": 1}
        found = {name: (row[name], np.broadcast_to(value, COUNT)) for name, value in stepped.items()}
        return found | {"history": (history.value[:, 0], want)}

    return results
