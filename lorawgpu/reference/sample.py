"""Choose the next token: the specification of shaders/sample.wgsl, in float64 except for the 32-bit hash."""

import numpy as np

from lorawgpu.reference.dropout import START, fold, mix


def key_of(seed: int) -> np.ndarray:
    """The key, uint32 [2], of a seed of up to 64 bits."""
    key = np.array(START, np.uint32)
    for word in (seed, seed >> 32):
        key = fold(key, word)
    return key


def scores(logits, seen, penalty, temperature):
    """logits [V] with the repetition penalty applied to ids in `seen`, divided by the temperature unless it is 0."""
    out = np.array(logits, np.float64)
    held = np.unique(np.asarray(seen, np.int64))
    out[held] = np.where(out[held] < 0, out[held] * penalty, out[held] / penalty)
    return out / (temperature or 1.0)


def kept(scores, top_k, top_p, min_p):
    """bool [V]: the tokens that may be drawn. Ties at a threshold are all kept."""
    keep = np.ones(len(scores), bool)
    if 0 < top_k < len(scores):
        keep = scores >= np.sort(scores)[-top_k]
    weight = np.where(keep, np.exp(scores - scores.max()), 0.0)
    if top_p < 1:
        order = np.argsort(-scores, kind="stable")
        reached = np.searchsorted(np.cumsum(weight[order]), top_p * weight.sum())
        keep &= scores >= scores[order[min(reached, len(order) - 1)]]
    return keep & (weight >= min_p)


def noise(seed, stream, position, vocab):
    """Gumbel noise [V] for one draw: -log(-log u), with u uniform in (0, 1)."""
    k0, k1 = fold(fold(key_of(seed), stream), position)
    v = (mix(mix(np.arange(vocab, dtype=np.uint32) ^ k0) + k1).astype(np.float64) + 0.5) / 2**32
    return -np.log(-np.log1p(-v))


def draw(scores, keep, gumbel):
    """The id drawn from softmax(scores) over `keep`: argmax of score + noise."""
    return int(np.argmax(np.where(keep, scores + gumbel, -np.inf)))
