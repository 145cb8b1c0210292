"""Sampling against its specification: (lab, how, vocab) -> results; see check.py."""

from dataclasses import replace

import numpy as np

from lorawgpu.doctor.lab import normal
from lorawgpu.generate.sampling import Sampling
from lorawgpu.ops.decode_state import FIELDS, STRIDE
from lorawgpu.ops.sample import RING, SampleBuffers, pack_settings, record_sample, sections_of, seen_bits
from lorawgpu.reference import sample as reference

SETTINGS = Sampling(temperature=0.9, top_k=40, top_p=0.8, min_p=0.05, repetition_penalty=1.3, seed=7)
COUNT, POSITION, SEEN = 4, 5, (3, 7)


def _expected(logits, greedy: bool) -> np.ndarray:
    tokens = []
    for row, values in enumerate(logits):
        scores = reference.scores(values, SEEN, SETTINGS.repetition_penalty, 0 if greedy else SETTINGS.temperature)
        keep = reference.kept(scores, SETTINGS.top_k, SETTINGS.top_p, SETTINGS.min_p)
        gumbel = 0 if greedy else reference.noise(SETTINGS.seed, row, POSITION, len(values))
        tokens.append(reference.draw(scores, keep, gumbel))
    return np.array(tokens)


def sample(lab, how, vocab):
    """`how`: greedy or draw."""
    logits, greedy = 3 * normal(COUNT, vocab), how == "greedy"
    state = np.zeros((len(FIELDS), STRIDE), np.int32)
    start = {"position": POSITION, "slot": POSITION, "end": 100, "stream": np.arange(STRIDE)}
    for name, value in start.items():
        state[FIELDS.index(name)] = value
    bits = np.stack([seen_bits(SEEN, vocab)] * COUNT)
    seen, history = lab.output(*bits.shape, initial=bits, dtype="u32"), lab.output(COUNT, RING, dtype="u32")
    rows, bad = lab.output(*state.shape, initial=state, dtype="i32"), lab.state()
    buffers = replace(SampleBuffers.create(lab.device, COUNT, vocab), seen=seen.exact, history=history.exact)
    settings = replace(SETTINGS, temperature=0.0) if greedy else SETTINGS
    lab.device.write(buffers.settings, pack_settings(settings))
    record_sample(lab.plan, buffers, lab.input(logits), rows.exact, bad.exact, count=COUNT)
    lab.sections = sections_of(settings)

    def results():
        want = _expected(logits, greedy)
        row = dict(zip(FIELDS, rows.value[:, :COUNT], strict=True))
        stepped = {"ids": want, "position": POSITION + 1, "slot": POSITION + 1, "count": 1}
        found = {name: (row[name], np.broadcast_to(value, COUNT)) for name, value in stepped.items()}
        return found | {"history": (history.value[:, 0], want)}

    return results
