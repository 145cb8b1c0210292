"""Ways to spoil a file: bits, cuts, copies, numbers that lie, JSON with the wrong thing in the right place."""

import json
import re
import struct

HUGE = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
ODD = [
    None, True, -1, 0, 1.5, 2**31, 2**63, 10**30, 1e308, "", "x" * 5000, "\u0000", "../../etc/passwd", [], {}, [[]],
    [1] * 300, {"a": {"a": {}}}, "{{ 1 }}", "nan", float("nan"), float("inf"),
]  # fmt: skip


def flip(raw, rng):
    out = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def flip_early(raw, rng):
    """In the header, where it matters."""
    end = max(1, min(len(raw), 2000))
    return flip(raw[:end], rng) + raw[end:]


def cut(raw, rng):
    return raw[: rng.randrange(len(raw))]


def cut_middle(raw, rng):
    start = rng.randrange(len(raw))
    return raw[:start] + raw[start + rng.randrange(1, 200) :]


def double(raw, rng):
    return raw + raw if rng.random() < 0.3 else raw[: (end := rng.randrange(1, len(raw)))] + raw[:end] + raw[end:]


def repeat_piece(raw, rng):
    start = rng.randrange(len(raw))
    piece = raw[start : start + rng.randrange(1, 60)]
    return raw[:start] + piece * rng.choice([2, 50, 2000]) + raw[start:]


def zeros(raw, rng):
    start, size = rng.randrange(len(raw)), rng.randrange(1, 400)
    return raw[:start] + bytes(min(size, len(raw) - start)) + raw[start + size :]


def noise(raw, rng):
    start = rng.randrange(len(raw))
    return raw[:start] + rng.randbytes(rng.randrange(1, 100)) + raw[start:]


def lying_word(raw, rng):
    """A 32- or 64-bit number of the header says something else."""
    size = rng.choice([4, 8])
    at = rng.randrange(max(1, min(len(raw), 3000) - size))
    word = struct.pack("<Q", rng.choice(HUGE))[:size]
    return raw[:at] + word + raw[at + size :]


def lying_digits(raw, rng):
    """A number in the text says something else."""
    found = list(re.finditer(rb"-?\d+(\.\d+)?", raw[:200_000]))
    if not found:
        return flip(raw, rng)
    match = rng.choice(found)
    number = rng.choice([b"-1", b"0", b"99999999999999999999", b"1e400", b"1.5", b"9" * 5000, b"NaN", b"null", b'"7"'])
    return raw[: match.start()] + number + raw[match.end() :]


def deep(raw, rng):
    """Nesting that no parser's stack holds."""
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}"), (b"- ", b"")])
    return opening * 100_000 + b"1" + closing * 100_000


def odd_json(raw, rng):
    """One value somewhere in the JSON becomes another."""
    try:
        data = json.loads(raw)
    except ValueError:
        return flip(raw, rng)
    holder = data
    while True:
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        if not keys:
            break
        key = rng.choice(list(keys))
        if isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.8:
            holder = holder[key]
            continue
        if rng.random() < 0.15 and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = rng.choice(ODD)
        break
    return json.dumps(data).encode()


def odd_header(raw, rng):
    """`odd_json` for the header of a safetensors file."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = odd_json(raw[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + raw[8 + length :]


def odd_line(raw, rng):
    """`odd_json` for one line of JSONL."""
    lines = raw.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = odd_json(lines[at], rng)
    return b"\n".join(lines) + b"\n"


BYTES = (flip, flip_early, cut, cut_middle, double, repeat_piece, zeros, noise)
