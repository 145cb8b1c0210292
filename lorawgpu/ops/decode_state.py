"""The state of the sequences being decoded, in one small buffer on the GPU. Each field has STRIDE words.

ids       the next input token                              position  its position in the sequence
slot      the slot for its k and v                          kv_start  the sequence's first slot
end       the first slot past the sequence's span           stream    the sequence's stream of random numbers
count     tokens sampled since the host last set it to 0
"""

from collections import namedtuple

from lorawgpu.gpu import Device, Tensor

FIELDS = ("ids", "position", "slot", "kv_start", "end", "stream", "count")
_Fields = namedtuple("_Fields", FIELDS)
STRIDE = 64  # words, or 256 bytes: the alignment at which a field can be bound separately
MAX_SEQUENCES = STRIDE


def rows_buffer(device: Device) -> Tensor:
    return device.tensor((len(FIELDS), STRIDE), "i32", "rows", "step")


def field(rows: Tensor, name: str, count: int) -> Tensor:
    """The first `count` values of a field, i32 [count]."""
    return rows.view(FIELDS.index(name) * STRIDE, (count,), name)


def template() -> dict:
    """Template values that locate a field in a shader: rows[fields.slot * stride + row]."""
    return {"fields": _Fields(*range(len(FIELDS))), "stride": STRIDE}
