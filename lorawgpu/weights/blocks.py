"""GGML's blocks repacked for shaders, which read 32-bit words: records of four rows, with every value kept.

common/blocks.wgsl describes a record: planes of codes, then scales, then f16 scales. The types' layouts are those of
ggml-quants.c in llama.cpp. Arrays are uint8 [rows, blocks of a row, ..] unless said.
"""

from collections.abc import Callable

import numpy as np

from lorawgpu.gpu.tensor import padded
from lorawgpu.ops.stores import Store
from lorawgpu.weights.affine import Rows

Planes = list[np.ndarray]  # uint32 [rows / 4, blocks of a row, words]


def records(raw: np.ndarray, store: Store) -> np.ndarray:
    """GGML's blocks, uint8 [rows, bytes of a row], as uint32 [rows / 4 (rounded up), words].

    Rows past the end are zero. ValueError if a scale is not finite.
    """
    planes, size = LAYOUTS[store.name], block_bytes(store)
    rows, width = raw.shape
    raw = np.pad(raw, [(0, padded(rows, 4) - rows), (0, 0)]) if rows % 4 else raw
    return joined(planes(raw.reshape(len(raw), width // size, size)), store)


def joined(planes: Planes, store: Store) -> np.ndarray:
    """Planes as records, uint32 [rows / 4, words]. ValueError if a scale is not finite."""
    record = np.concatenate(planes, axis=-1)
    scales = record[..., -store.scale_words :]
    exponent = 0x7F800000 if store.scales == "f32" else 0x7C00
    if (scales.view("<u4" if store.scales == "f32" else "<u2") & exponent == exponent).any():
        raise ValueError("some of its scales are not finite")
    return record.reshape(len(record), -1)


def block_bytes(store: Store) -> int:
    """Bytes of one of GGML's blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType[store.name.upper()]][1]


def codes(values: np.ndarray, bits: int) -> np.ndarray:
    """A plane of codes of 1, 2 or 4 bits, from [rows, blocks, columns of a block]."""
    rows, blocks, columns = values.shape
    shared = 4 // bits  # blocks of 4 x 4 that share two words
    quads = values.view("<u4").reshape(rows // 4, 2, 2, blocks, columns // 4 // shared, shared)
    words = np.zeros((rows // 4, 2, blocks, columns // 4 // shared), np.uint32)
    for row in range(2):
        for j in range(shared):  # no code leaves its byte
            words |= quads[:, :, row, :, :, j] << np.uint32(bits * (2 * j + row))
    return np.moveaxis(words, 1, 3).reshape(rows // 4, blocks, -1)


def code_bytes(values: np.ndarray) -> np.ndarray:
    """A plane of codes of 8 bits: for each 4 x 4 block, a word of each row."""
    rows, blocks, columns = values.shape
    words = np.ascontiguousarray(values).view("<u4").reshape(rows // 4, 4, blocks, columns // 4)
    return np.moveaxis(words, 1, 3).reshape(rows // 4, blocks, columns)


def words_of_rows(values: np.ndarray) -> np.ndarray:
    """Scales of 32 bits [rows, blocks, n]: words of four rows for each of n."""
    rows, blocks, n = values.shape
    return np.moveaxis(values.reshape(rows // 4, 4, blocks, n), 1, 3).reshape(rows // 4, blocks, 4 * n)


def scale_bytes(*values: np.ndarray) -> np.ndarray:
    """Scales of 8 bits [rows, blocks, n]: a word of four rows for each of n, with several arrays in turns."""
    rows, blocks, n = values[0].shape
    quads = np.stack(values, axis=-1).reshape(rows // 4, 4, blocks, n * len(values))
    return np.ascontiguousarray(np.moveaxis(quads, 1, 3)).view("<u4")[..., 0]


def scale(raw: np.ndarray, start: int) -> np.ndarray:
    """The f16 at byte `start` of each block: two words of four rows."""
    halves = np.ascontiguousarray(raw[..., start : start + 2]).view("<u2")
    rows, blocks, _ = halves.shape
    return np.ascontiguousarray(np.moveaxis(halves.reshape(rows // 4, 4, blocks), 1, 2)).view("<u4")


def fields(raw: np.ndarray, bits: int, run: int) -> np.ndarray:
    """The codes in bytes whose lowest `bits` belong to `run` columns, the next bits to the next columns, and so on."""
    word = np.dtype("<u4" if run % 4 == 0 else "u1")  # several bytes at a time
    mask = word.type(((1 << bits) - 1) * (0x01010101 if word.itemsize == 4 else 1))
    grouped = np.ascontiguousarray(raw).view(word).reshape(*raw.shape[:2], -1, 1, run // word.itemsize)
    shifts = np.arange(0, 8, bits, dtype=word)[:, None]
    return (grouped >> shifts & mask).view(np.uint8).reshape(*raw.shape[:2], -1)


def top_bits(raw: np.ndarray) -> np.ndarray:
    """Bit j of four bytes is that of column j."""
    return np.unpackbits(raw, axis=-1, bitorder="little")


def six_bits(raw: np.ndarray) -> np.ndarray:
    """The plane of (s, m) from twelve bytes of Q4_K and Q5_K, which have six bits of each for every 32 columns."""
    a, b, c = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    s = np.concatenate([a & 63, c & 15 | a >> 2 & 48], axis=-1)
    return scale_bytes(s, np.concatenate([b & 63, c >> 4 | b >> 2 & 48], axis=-1))


def q8_0(raw: np.ndarray) -> Planes:
    return [code_bytes(raw[..., 2:]), scale(raw, 0)]


def q4_0(raw: np.ndarray) -> Planes:
    return [codes(fields(raw[..., 2:], 4, 16) ^ 8, 4), scale(raw, 0)]


def q4_1(raw: np.ndarray) -> Planes:
    return [codes(fields(raw[..., 4:], 4, 16), 4), scale(raw, 0), scale(raw, 2)]


def q5_0(raw: np.ndarray) -> Planes:
    return [codes(fields(raw[..., 6:], 4, 16), 4), codes(top_bits(raw[..., 2:6]) ^ 1, 1), scale(raw, 0)]


def q5_1(raw: np.ndarray) -> Planes:
    high = codes(top_bits(raw[..., 4:8]), 1)
    return [codes(fields(raw[..., 8:], 4, 16), 4), high, scale(raw, 0), scale(raw, 2)]


def iq4_nl(raw: np.ndarray) -> Planes:
    return [codes(fields(raw[..., 2:], 4, 16), 4), scale(raw, 0)]


def iq4_xs(raw: np.ndarray) -> Planes:
    low, high = fields(raw[..., 4:8], 4, 1), fields(raw[..., 2:4], 2, 1)
    return [codes(fields(raw[..., 8:], 4, 16), 4), scale_bytes((low | high << 4) - 32), scale(raw, 0)]


def q2_k(raw: np.ndarray) -> Planes:
    return [codes(fields(raw[..., 16:80], 2, 32), 2), scale_bytes(raw[..., :16]), scale(raw, 80), scale(raw, 82)]


def q3_k(raw: np.ndarray) -> Planes:
    low, high = fields(raw[..., 96:104], 4, 8), fields(raw[..., 104:108], 2, 4)
    q = [codes(fields(raw[..., 32:96], 2, 32), 2), codes(fields(raw[..., :32], 1, 32) ^ 1, 1)]
    return [*q, scale_bytes((low | high << 4) - 32), scale(raw, 108)]


def q4_k(raw: np.ndarray) -> Planes:
    return [codes(fields(raw[..., 16:], 4, 32), 4), six_bits(raw[..., 4:16]), scale(raw, 0), scale(raw, 2)]


def q5_k(raw: np.ndarray) -> Planes:
    low, high = codes(fields(raw[..., 48:], 4, 32), 4), codes(fields(raw[..., 16:48], 1, 32), 1)
    return [low, high, six_bits(raw[..., 4:16]), scale(raw, 0), scale(raw, 2)]


def q6_k(raw: np.ndarray) -> Planes:
    low, high = codes(fields(raw[..., :128], 4, 64), 4), codes(fields(raw[..., 128:192], 2, 32) ^ 2, 2)
    return [low, high, scale_bytes(raw[..., 192:208]), scale(raw, 208)]


def affine_records(rows: Rows, store: Store) -> np.ndarray:
    """Any number of rows as records, uint32 [rows / 4 (rounded up), words]. ValueError if a scale is not finite."""
    more = [(0, -len(rows.codes) % 4), (0, 0)]
    q, s, b = (np.pad(part, more) for part in rows)
    q = q.reshape(len(q), -1, store.block)
    scales: Planes = [words_of_rows(np.ascontiguousarray(part[..., None]).view("<u4")) for part in (s, -b)]
    return joined([codes(q, 4) if store.name.startswith("affine4") else code_bytes(q), *scales], store)


LAYOUTS: dict[str, Callable[[np.ndarray], Planes]] = {
    "q8_0": q8_0, "q4_0": q4_0, "q4_1": q4_1, "q5_0": q5_0, "q5_1": q5_1, "iq4_nl": iq4_nl, "iq4_xs": iq4_xs,
    "q2_k": q2_k, "q3_k": q3_k, "q4_k": q4_k, "q5_k": q5_k, "q6_k": q6_k,
}  # fmt: skip
