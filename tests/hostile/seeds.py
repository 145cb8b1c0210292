"""Good files to spoil, and files that were hostile from the start."""

import gzip
import io
import json
import random
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import zstandard
from pyarrow import parquet
from test_checkpoint import snapshot
from test_gguf import write_gguf
from test_tokenizer import gguf_values
from tiny_tokenizer import backend

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.train.checkpoint import save_checkpoint

from . import mutations as m

GOLDEN = Path(__file__).parent.parent / "golden"
MIB = 1 << 20


@dataclass(frozen=True)
class Hostile:
    """A file of `kind` (a reader) that lies in a folder of the right other files."""

    kind: str
    file: str  # its name, below a folder that `place` filled
    how: str
    content: bytes


@dataclass(frozen=True)
class Seed:
    """A good file: `place(folder)` puts it there with what belongs to it; `ways` spoil it, `tries` times each."""

    kind: str
    file: str
    place: object
    ways: tuple
    tries: int = 3

    def content(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            self.place(Path(folder))
            return (Path(folder) / self.file).read_bytes()


def model_folder(folder):
    shutil.copytree(GOLDEN / "bitnet_packed", folder, dirs_exist_ok=True)


def sharded_folder(folder):
    model_folder(folder)
    raw = (folder / "model.safetensors").read_bytes()
    names = [name for name in json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]]) if name != "__metadata__"]
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = {"weight_map": dict.fromkeys(names, "one.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def adapter_folder(folder):
    shutil.copytree(GOLDEN / "llama_dense" / "adapter_init", folder, dirs_exist_ok=True)


def gguf_file(folder):
    words = {f"tokenizer.ggml.{key}": value for key, value in gguf_values(backend(), pre="gpt-2").items()}
    write_gguf(folder / "model.gguf", metadata=words)


def tokenizer_folder(folder):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(backend().to_str())
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": BUILT_IN["chatml"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def run_folder(folder):
    save_checkpoint(folder, snapshot(7), "owner/base")


def golden_folder(folder):
    shutil.copytree(GOLDEN / "bitnet_q_only", folder, dirs_exist_ok=True)


RECORDS = [
    {"messages": [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": f"Answer {i}."}]}
    for i in range(20)
]


def data_folder(name, content):
    def place(folder):
        tokenizer_folder(folder / "tokenizer")
        (folder / name).write_bytes(content)

    return place


def parquet_bytes() -> bytes:
    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), out)
    return out.getvalue()


JSONL = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
CSV = b"instruction,output\n" + b"".join(b'"What, is %d?","It is\n%d"\n' % (i, i) for i in range(20))
DATA = {
    "d.jsonl": JSONL,
    "d.json": json.dumps(RECORDS).encode(),
    "d.csv": CSV,
    "d.parquet": parquet_bytes(),
    "d.jsonl.gz": gzip.compress(JSONL, mtime=0),
    "d.jsonl.zst": zstandard.ZstdCompressor().compress(JSONL),
}
YAML = f"base_model: {GOLDEN}/llama_dense\ndatasets:\n  - path: {__file__}\nlora_r: 8\nlearning_rate: 1e-4\n".encode()
METRICS = b'{"step": 1, "loss": 2.5, "learning_rate": 0.001}\n{"step": 2, "loss": 2.25}\n' * 5


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


JSON_WAYS = (m.odd_json, m.odd_json, m.odd_json, m.lying_digits, m.deep, m.flip, m.cut, m.double, m.repeat_piece)
LINE_WAYS = (m.odd_line, m.odd_line, m.lying_digits, m.deep, m.flip, m.cut, m.repeat_piece, m.noise)
SEEDS = [
    Seed("safetensors", "model.safetensors", model_folder, (m.odd_header, m.odd_header, m.lying_word, *m.BYTES)),
    Seed("model", "model.safetensors", model_folder, (m.odd_header, m.flip_early, m.zeros), 4),
    Seed("model", "config.json", model_folder, JSON_WAYS),
    Seed("model", "model.safetensors.index.json", sharded_folder, JSON_WAYS, 1),
    Seed("model", "model.gguf", gguf_file, (m.lying_word, m.lying_word, *m.BYTES), 4),
    Seed("tokenizer", "tokenizer.json", tokenizer_folder, JSON_WAYS, 6),
    Seed("tokenizer", "tokenizer_config.json", tokenizer_folder, JSON_WAYS, 2),
    Seed("adapter", "adapter_config.json", adapter_folder, JSON_WAYS),
    Seed("adapter", "adapter_model.safetensors", adapter_folder, (m.odd_header, m.lying_word, *m.BYTES), 2),
    Seed("checkpoint", "checkpoint-7/trainer_state.json", run_folder, JSON_WAYS, 1),
    Seed("checkpoint", "checkpoint-7/optimizer.safetensors", run_folder, (m.odd_header, *m.BYTES), 1),
    Seed("template", "t.jinja", written("t.jinja", BUILT_IN["gemma"].encode()), m.BYTES),
    Seed("config", "c.yaml", written("c.yaml", YAML), (m.lying_digits, m.deep, *m.BYTES), 2),
    Seed("npz", "expected.npz", golden_folder, (m.lying_word, *m.BYTES), 1),
    Seed("npz", "case.json", golden_folder, JSON_WAYS, 1),
    Seed("metrics", "metrics.jsonl", written("metrics.jsonl", METRICS), LINE_WAYS, 1),
    *(
        Seed("data", name, data_folder(name, raw), LINE_WAYS if name in ("d.jsonl", "d.json") else m.BYTES, 2)
        for name, raw in DATA.items()
    ),
]


def spoiled(seed: int) -> Iterator[tuple[Seed, Hostile]]:
    """Every seed spoiled in each of its ways, each time with a random state of its own."""
    for good in SEEDS:
        raw = good.content()
        for number, way in enumerate(good.ways):
            for attempt in range(good.tries):
                rng = random.Random(f"{seed} {good.file} {number} {attempt}")
                yield good, Hostile(good.kind, good.file, way.__name__, way(raw, rng))
