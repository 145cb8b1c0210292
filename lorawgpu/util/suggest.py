"""Suggestions for misspelled words ("did you mean"), only if they are close."""

import difflib
from collections.abc import Iterable

CLOSE = 0.75  # difflib ratio; `gradient_clipping` and `gradient_checkpointing`, which differ in meaning, have 0.72


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to `word`, ignoring case, or None if none is close.

    A known word also counts as close if it starts with `word` or ends with it as a part (alpha: lora_alpha).
    """
    word = word.lower()

    def similarity(name: str) -> float:
        return difflib.SequenceMatcher(None, name.lower(), word).ratio()

    def close(name: str) -> bool:
        part = name.lower().startswith(word) or name.lower().endswith(f"_{word}")
        return len(word) > 2 and part or similarity(name) >= CLOSE

    return max(filter(close, known), key=similarity, default=None)
