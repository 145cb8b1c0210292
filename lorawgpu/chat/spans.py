"""Which tokens hold the characters of a span."""

import numpy as np
from tokenizers import Encoding

Span = tuple[int, int]  # first and, exclusive, last


def tokens_of(encoding: Encoding, span: Span) -> Span:
    """The first and, exclusive, the last token that hold a character of `span`. Asks for a few tokens alone: taking the
    offsets of all out of the library costs as much as a third of tokenising."""
    start, end = span
    if start >= end:
        return 0, 0
    inside = (encoding.char_to_token(c) for c in range(start, end))
    first = next((token for token in inside if token is not None), None)
    if first is None:  # nothing that the tokenizer keeps
        return 0, 0
    backwards = (encoding.char_to_token(c) for c in range(end - 1, start - 1, -1))
    last = next(token for token in backwards if token is not None) + 1
    while last < len(encoding) and _covers(encoding, last, end - 1):  # the other bytes of one character
        last += 1
    return first, last


def blanks_before(text: str, encoding: Encoding, start: int) -> Span:
    """The tokens that are nothing but blanks right before `start` (the first character of a body), as a range."""
    blank = start
    while text[blank - 1 : blank] == " ":
        blank -= 1
    first, last = tokens_of(encoding, (blank, start))
    while first < last and encoding.token_to_chars(last - 1)[1] > start:
        last -= 1
    while first < last and encoding.token_to_chars(first)[0] < blank:
        first += 1
    return first, last


def special_at(encoding: Encoding, ids: list[int], special_ids: frozenset[int], start: int) -> int | None:
    """Where the special token ends that starts at character `start`; None when none does."""
    token = encoding.char_to_token(start)
    if token is None or ids[token] not in special_ids:
        return None
    first, end = encoding.token_to_chars(token)
    return end if first == start else None


def _covers(encoding: Encoding, token: int, char: int) -> bool:
    chars = encoding.token_to_chars(token)
    return chars is not None and chars[0] <= char < chars[1]


def overlapping(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    """For tokens at character `offsets` [tokens, 2]: whether each holds a character of one of the `spans`."""
    starts, ends = offsets.reshape(-1, 2).T
    out = np.zeros(len(starts), bool)
    for first, last in (span for span in spans if span[0] < span[1]):
        out |= (starts < last) & (ends > first)
    return out & (starts < ends)  # a token that stands for no character (BOS) belongs to nobody
