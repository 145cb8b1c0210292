"""Mistakes of users, by topic: each is a command line with its files, and a part of the expected message."""

import json
import shutil
import struct
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden"
DENSE, TERNARY = GOLDEN / "llama_dense", GOLDEN / "bitnet_packed"
RECORD = '{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}\n'


def evaluate(folder, model=DENSE, adapter=None, data=None) -> list[str]:
    """The command line of an evaluation, by default of a good data file."""
    if data is None:
        data = folder / "good.jsonl"
        data.write_text(RECORD)
    return ["evaluate", "--model", model, "--data", data, *(["--adapter", adapter] if adapter else [])]


def copy_of(source: Path, folder: Path, name="copy") -> Path:
    return shutil.copytree(source, folder / name)


def change(path: Path, **keys) -> None:
    """Set keys of a JSON file; `...` removes one."""
    data = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


def tensors_of(path: Path) -> tuple[dict, bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_tensors(path: Path, header, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
