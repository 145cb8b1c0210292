"""Log-probabilities of chosen tokens and of their likeliest alternatives, before temperature and filters."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Score(NamedTuple):
    """`top`: the likeliest tokens and their log-probabilities, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def scores_of(logits: np.ndarray, ids: Sequence[int], top: int) -> list[Score]:
    """The scores of token ids[i] under logits[i], float32 [n, V]: log softmax, summed in float64."""
    peaks = logits.max(-1, keepdims=True)
    totals = np.log(np.exp(logits - peaks).sum(-1, dtype=np.float64)) + peaks[:, 0].astype(np.float64)
    likeliest = np.argpartition(-logits, top - 1, axis=-1)[:, :top] if top else np.zeros((len(ids), 0), int)
    scores = []
    for row, token, total, some in zip(logits, ids, totals, likeliest, strict=True):
        some = some[np.lexsort((some, -row[some]))]  # ties go to the lowest id, as in greedy decoding
        scores.append(Score(token, float(row[token] - total), [(int(i), float(row[i] - total)) for i in some]))
    return scores
