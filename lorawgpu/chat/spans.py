"""Which tokens contain the characters of a span."""

import numpy as np
from tokenizers import Encoding

Span = tuple[int, int]  # [start, end)


def token_span(encoding: Encoding, span: Span) -> Span:
    """The range of tokens that contain a character of `span`; (0, 0) if there are none.

    It looks up single characters: getting the offsets of all tokens takes a third of the time of tokenizing.
    """
    start, end = span
    if start >= end:
        return 0, 0
    inside = (encoding.char_to_token(c) for c in range(start, end))
    first = next((token for token in inside if token is not None), None)
    if first is None:  # the tokenizer drops all these characters
        return 0, 0
    backwards = (encoding.char_to_token(c) for c in range(end - 1, start - 1, -1))
    last = next(token for token in backwards if token is not None) + 1
    while last < len(encoding) and _covers(encoding, last, end - 1):  # the remaining bytes of that character
        last += 1
    return first, last


def answer_tokens(encoding: Encoding, ids: list[int], special_ids: frozenset[int], span: Span) -> Span:
    """The same without a control token that begins before `span`: Phi-3's `<|assistant|>` contains the white space
    that an answer begins with, but the model does not write it."""
    first, last = token_span(encoding, span)
    if first < last and ids[first] in special_ids and encoding.token_to_chars(first)[0] < span[0]:
        first += 1
    return first, last


def spaces_before(text: str, encoding: Encoding, start: int) -> Span:
    """The range of tokens right before character `start` that consist of spaces alone."""
    space = start
    while text[space - 1 : space] == " ":
        space -= 1
    first, last = token_span(encoding, (space, start))
    while first < last and encoding.token_to_chars(last - 1)[1] > start:
        last -= 1
    while first < last and encoding.token_to_chars(first)[0] < space:
        first += 1
    return first, last


def special_token_end(encoding: Encoding, ids: list[int], special_ids: frozenset[int], start: int) -> int | None:
    """The end of the special token that starts at character `start`; None if there is none."""
    token = encoding.char_to_token(start)
    if token is None or ids[token] not in special_ids:
        return None
    first, end = encoding.token_to_chars(token)
    return end if first == start else None


def _covers(encoding: Encoding, token: int, char: int) -> bool:
    chars = encoding.token_to_chars(token)
    return chars is not None and chars[0] <= char < chars[1]


def overlapping(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Bool [tokens]: whether a token with these character `offsets` [tokens, 2] contains a character of any span."""
    starts, ends = offsets.reshape(-1, 2).T
    out = np.zeros(len(starts), bool)
    for first, last in (span for span in spans if span[0] < span[1]):
        out |= (starts < last) & (ends > first)
    return out & (starts < ends)  # not a token without characters (BOS)
