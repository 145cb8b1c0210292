"""Naming the lines of data files in a message."""

from collections.abc import Iterable

MAX_LINES = 12  # a packed step has more than anybody would look at


def describe_lines(sources: Iterable[tuple[str, int]]) -> str:
    """`a.jsonl, lines 3, 7; b.jsonl, line 1` of (file, line) pairs: each line once, at most a dozen of them."""
    distinct = sorted(set(sources))
    lines: dict[str, list[str]] = {}
    for file, line in distinct[:MAX_LINES]:
        lines.setdefault(file, []).append(str(line))
    text = "; ".join(f"{file}, line{'s' if len(ns) > 1 else ''} {', '.join(ns)}" for file, ns in lines.items())
    return text + (f", and {len(distinct) - MAX_LINES} more" if len(distinct) > MAX_LINES else "")
