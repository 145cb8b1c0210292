"""The state of the sequences that are being decoded, in one small buffer on the GPU: a field is STRIDE words.

ids       the token that the next step feeds                position  where it stands in its sequence
slot      where its k and v go                              kv_start  the sequence's first slot
end       the first slot past the sequence's own            stream    of random numbers
count     tokens sampled since the host last set it to 0
"""

from collections import namedtuple

from lorawgpu.gpu import Device, Tensor

FIELDS = ("ids", "position", "slot", "kv_start", "end", "stream", "count")
_Fields = namedtuple("_Fields", FIELDS)
STRIDE = 64  # words: an offset of 256 bytes, so that a field can be bound by itself
MAX_SEQUENCES = STRIDE


def rows_buffer(device: Device) -> Tensor:
    return device.tensor((len(FIELDS), STRIDE), "i32", "rows", "step")


def field(rows: Tensor, name: str, count: int) -> Tensor:
    """The first `count` values of a field, i32 [count]."""
    return rows.view(FIELDS.index(name) * STRIDE, (count,), name)


def template() -> dict:
    """Where the fields are, for shaders: rows[fields.slot * stride + row]."""
    return {"fields": _Fields(*range(len(FIELDS))), "stride": STRIDE}
