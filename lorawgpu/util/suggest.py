"""What was meant by a word that is not known: said only where it is really near."""

import difflib
from collections.abc import Iterable

NEAR = 0.75  # likeness as difflib counts it: `gradient_clipping` and `gradient_checkpointing` have 0.72


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The most alike of the known words, in small letters or capitals; None when none is alike, begins with the word or
    ends with it as a part (`alpha`: lora_alpha)."""
    word = word.lower()

    def likeness(name: str) -> float:
        return difflib.SequenceMatcher(None, name.lower(), word).ratio()

    def near(name: str) -> bool:
        part = name.lower().startswith(word) or name.lower().endswith(f"_{word}")
        return len(word) > 2 and part or likeness(name) >= NEAR

    return max(filter(near, known), key=likeness, default=None)
