"""Lines of data files in words, for a message."""

from collections.abc import Iterable

MOST = 12  # lines named; a packed step holds more than anybody looks at


def in_words(places: Iterable[tuple[str, int]]) -> str:
    """`a.jsonl, lines 3, 7; b.jsonl, line 1`, each line once; beyond a dozen, how many more there are."""
    known = sorted(set(places))
    lines: dict[str, list[str]] = {}
    for file, line in known[:MOST]:
        lines.setdefault(file, []).append(str(line))
    text = "; ".join(f"{file}, line{'s' if len(of) > 1 else ''} {', '.join(of)}" for file, of in lines.items())
    return text + (f", and {len(known) - MOST} more" if len(known) > MOST else "")
