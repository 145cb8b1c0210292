"""The safetensors header reader: right values, and a clear error for every damaged one."""

import json
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from lorawgpu.errors import UserError
from lorawgpu.files.safetensors import SafetensorsFile

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path, header, data=bytes(8)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def error_of(path):
    with pytest.raises(UserError) as caught:
        SafetensorsFile(path)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def test_reads_what_the_library_wrote(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5), dtype=np.float32),
        "b": rng.standard_normal(7).astype(np.float16),
        "c": rng.integers(0, 255, (4, 2), dtype=np.uint8),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, tmp_path / "t.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "t.safetensors")
    assert set(file.entries) == set(tensors)
    for name, wanted in tensors.items():
        assert file.read(name).dtype == wanted.dtype
        np.testing.assert_array_equal(file.read(name), wanted)


def test_bf16_is_raw_bits_also_at_an_odd_offset(tmp_path):
    header = {"x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
              "y": {"dtype": "BF16", "shape": [2], "data_offsets": [3, 7]}}  # fmt: skip
    for pad in range(2):  # whatever parity the header has
        text = json.dumps(header).encode() + b" " * pad
        file = SafetensorsFile(write(tmp_path / "t", text, b"\1\2\3" + struct.pack("<HH", 0x3F80, 0xC000)))
        assert file.read("y").tolist() == [0x3F80, 0xC000]


def test_other_dtypes_are_rejected_by_name(tmp_path):
    file = SafetensorsFile(write(tmp_path / "t", {"x": ENTRY | {"dtype": "F64", "shape": [1]}}))
    with pytest.raises(UserError, match="F64"):
        file.read("x")


@pytest.mark.parametrize(
    ("header", "data", "named"),
    [
        ({"x": ENTRY | {"data_offsets": [0, 4]}}, bytes(4), "needs 8 bytes"),
        ({"x": ENTRY | {"data_offsets": [8, 0]}}, bytes(8), "needs 8 bytes"),
        ({"x": ENTRY | {"data_offsets": [-8, 0]}}, bytes(8), "data_offsets"),
        ({"x": ENTRY | {"data_offsets": [0, 8.0]}}, bytes(8), "data_offsets"),
        ({"x": ENTRY | {"shape": [-2]}}, bytes(8), "shape"),
        ({"x": ENTRY | {"shape": [2**62, 2**62]}}, bytes(8), "too large for any memory"),
        ({"x": ENTRY | {"shape": [1000, 1000]}}, bytes(8), "needs"),
        ({"x": ENTRY | {"shape": [1] * 9}}, bytes(8), "shape"),
        ({"x": ENTRY | {"shape": 2}}, bytes(8), "shape"),
        ({"x": ENTRY | {"dtype": "F33"}}, bytes(8), "F33"),
        ({"x": ENTRY | {"more": 1}}, bytes(8), "needs exactly dtype"),
        ({"x": 3}, bytes(8), "needs exactly dtype"),
        ({"x": ENTRY, "y": ENTRY}, bytes(8), "overlaps"),
        ({"x": ENTRY, "y": ENTRY | {"data_offsets": [12, 20]}}, bytes(20), "gap"),
        ({"x": ENTRY}, bytes(7), "truncated"),
        ({"x": ENTRY}, bytes(9), "after the last tensor"),
        ({"x": ENTRY, "__metadata__": {"a": 1}}, bytes(8), "__metadata__"),
        (b'{"x": 1, "x": 2}', b"", "appears twice"),
        (b"[1]", b"", "wanted an object"),
        (b"\xff\xfe", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "nested"),
        ({"n" * 100_000: 3}, b"", "needs exactly dtype"),
    ],
)
def test_damaged_headers(tmp_path, header, data, named):
    assert named in error_of(write(tmp_path / "t", header, data))


def test_header_length_is_bounded(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert "header of" in error_of(path)
    path.write_bytes(b"\1\0")
    assert "too short" in error_of(path)
    assert "no such file" in error_of(tmp_path / "absent")


GOOD = json.dumps({"a": ENTRY, "b": ENTRY | {"data_offsets": [8, 16]}, "__metadata__": {"format": "pt"}}).encode()
GOOD = struct.pack("<Q", len(GOOD)) + GOOD + bytes(range(16))


@st.composite
def damaged(draw):
    """A good file with bytes flipped, removed or repeated."""
    raw = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(raw) - 1)))
        end = draw(st.integers(start, min(len(raw), start + 40)))
        kind = draw(st.sampled_from(["flip", "cut", "double", "end"]))
        if kind == "flip" and raw:
            raw[start] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del raw[start:end]
        elif kind == "double":
            raw[start:start] = raw[start:end]
        elif kind == "end":
            del raw[start:]
    return bytes(raw)


@settings(max_examples=400, deadline=None)
@example(GOOD)
@given(damaged())
def test_fuzzed_files_are_read_within_bounds_or_rejected(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(raw)
    try:
        file = SafetensorsFile(path)
        tensors = [file.read(name) for name in file.entries]
    except UserError as error:
        assert len(str(error)) < 1000
        return
    assert sum(tensor.nbytes for tensor in tensors) <= len(raw)
