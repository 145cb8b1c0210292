"""Durations in words."""

UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def duration(seconds: float) -> str:
    """At most two units, rounded: "0.4 s", "36 s", "6 min 5 s", "2 h 10 min", "3 d 4 h"."""
    if seconds < 9.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s".replace(".0 ", " ")
    for (unit, size), (smaller, part) in zip(UNITS, UNITS[1:], strict=False):
        if (whole := round(seconds / part)) * part >= size:
            rest = whole % (size // part)
            return f"{whole // (size // part)} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{round(seconds)} s"
