"""Files that were hostile from the start: bombs, shapes and counts that lie, texts and loops without end."""

import gzip
import io
import json
import struct
import zipfile
from collections.abc import Iterator

import pyarrow
import zstandard
from pyarrow import parquet
from test_sandbox import HIDDEN, TOO_MUCH, UNCOMPILED
from tiny_tokenizer import backend

from .seeds import GOLDEN, SEEDS, Hostile, Seed, data_folder, spoiled

MIB = 1 << 20


def _npz(**arrays) -> bytes:
    """Arrays in a compressed zip; a value of bytes is a whole .npy file."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, value in arrays.items():
            file.writestr(f"{name}.npy", value)
    return out.getvalue()


def _npy(shape: str, descr="<f4", data=b"") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def _safetensors(header, data=b"") -> bytes:
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header)) + header + data


def _gguf(tensors=0, keys=0, rest=b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def _key(name: bytes, kind: int, rest: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + rest


def _tokenizer(**parts) -> bytes:
    return json.dumps(json.loads(backend().to_str()) | parts).encode()


def _replace(pattern: dict, content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _adapter(**keys) -> bytes:
    good = json.loads((GOLDEN / "llama_dense/adapter_init/adapter_config.json").read_text())
    return json.dumps(good | keys).encode()


def _laughs(depth: int) -> bytes:
    lines = ["a0: &a0 lol"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, depth)]
    return "\n".join(lines).encode()


def _bomb_table(texts: list) -> bytes:
    """Megabytes of one value, which a dictionary and run lengths hold in a few thousand bytes."""
    out = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), out, compression="zstd")
    return out.getvalue()


def _table(columns: dict) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def _no_utf8() -> bytes:
    text = pyarrow.Array.from_buffers(
        pyarrow.string(),
        1,
        [None, pyarrow.array([0, 3], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"a\xff\xfe")],
    )
    return _table({"text": text})


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
BORN = {  # (kind, file) -> what was hostile from the start
    ("safetensors", "model.safetensors"): {
        "an endless header": struct.pack("<Q", 2**63) + b"{}",
        "a header longer than the file": struct.pack("<Q", 10**6) + b"{}",
        "a shape beyond memory": _safetensors({"a": F32 | {"shape": [2**62, 4]}}, bytes(4)),
        "an empty shape beyond memory": _safetensors({"a": F32 | {"shape": [0, 2**62], "data_offsets": [0, 0]}}),
        "a thousand dimensions": _safetensors({"a": F32 | {"shape": [1] * 1000}}, bytes(4)),
        "two tensors in one place": _safetensors({"a": F32, "b": F32}, bytes(4)),
        "a hole": _safetensors({"a": F32 | {"data_offsets": [4, 8]}}, bytes(8)),
        "a backward tensor": _safetensors({"a": F32 | {"data_offsets": [8, 4]}}, bytes(8)),
        "the same name twice": _safetensors(b'{"a":%b,"a":%b}' % ((json.dumps(F32).encode(),) * 2), bytes(4)),
        "many empty tensors": _safetensors(
            {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(20000)}
        ),
        "a megabyte of a name": _safetensors({"a" * MIB: F32 | {"dtype": "F31"}}, bytes(4)),
        "a deep header": _safetensors(b"[" * 200_000),
    },
    ("model", "model.gguf"): {
        "endless counts": _gguf(2**64 - 1, 2**64 - 1),
        "a billion tensors": _gguf(10**9, 0, bytes(1000)),
        "an endless string": _gguf(0, 1, struct.pack("<Q", 2**64 - 1)),
        "an endless array": _gguf(0, 1, _key(b"a", 9, struct.pack("<IQ", 0, 2**60)) + bytes(50)),
        "an endless array of strings": _gguf(0, 1, _key(b"a", 9, struct.pack("<IQ", 8, 2**40)) + bytes(900)),
        "arrays in arrays": _gguf(0, 1, _key(b"a", 9, struct.pack("<IQ", 9, 1) * 5000)),
        "a type that is none": _gguf(0, 1, _key(b"a", 77, b"")),
        "an alignment of 0": _gguf(0, 1, _key(b"general.alignment", 4, struct.pack("<I", 0))),
        "dimensions beyond memory": _gguf(
            1, 0, struct.pack("<Q", 1) + b"a" + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)
        ),
        "another byte order": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        "nothing": b"",
    },
    ("tokenizer", "tokenizer.json"): {
        "nothing": b"",
        "no object": b"[]",
        "an endless pattern": _tokenizer(
            pre_tokenizer={"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": "(a*)*b" * 9}}
        ),
        "an open pattern": _tokenizer(normalizer=_replace({"Regex": "("}, "")),
        "text that grows": _tokenizer(
            normalizer={"type": "Sequence", "normalizers": [_replace({"String": "a"}, "a" * 90)] * 5}
        ),
        "a backtracking pattern in a normalizer": _tokenizer(normalizer=_replace({"Regex": "(a|a)*(a|aa)+$c"}, "")),
        "a backtracking pattern of words": _tokenizer(
            pre_tokenizer={"type": "Split", "behavior": "Removed", "invert": True, "pattern": {"Regex": "(a+)+(?=c)|x"}}
        ),
        "an empty pattern": _tokenizer(normalizer=_replace({"String": ""}, "a" * 1000)),
        "an empty expression": _tokenizer(normalizer=_replace({"Regex": ""}, "a" * 1000)),
        "no unknown token": _tokenizer(
            model={"type": "WordPiece", "vocab": {"a": 0, "<s>": 1, "</s>": 2}, "unk_token": "[UNK]",
                   "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}, added_tokens=[],
        ),
        "words without an unknown one": _tokenizer(
            model={"type": "WordLevel", "vocab": {"a": 0, "<s>": 1, "</s>": 2}, "unk_token": "[UNK]"}, added_tokens=[],
        ),
        "pieces without an unknown one": _tokenizer(
            model={"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None, "byte_fallback": False}, added_tokens=[],
        ),
        "a precompiled map of noise": _tokenizer(
            normalizer={"type": "Precompiled", "precompiled_charsmap": "AAEAAP///3////9/gICAgICAgICAgICAgICAgA=="}
        ),
        "a precompiled map that is short": _tokenizer(
            normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}
        ),
        "megabytes before each text": _tokenizer(normalizer={"type": "Prepend", "prepend": "ab" * 4 * MIB}),
        "ids of a billion": _tokenizer(
            model={"type": "BPE", "vocab": {"a": 0, "b": 10**9, "<s>": 2, "</s>": 3}, "merges": []}, added_tokens=[],
        ),
        "deep steps": _tokenizer(normalizer=json.loads(
            '{"type": "Sequence", "normalizers": [' * 90 + '{"type": "NFC"}' + "]}" * 90)),
        "padding of a million": _tokenizer(
            padding={"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                     "pad_type_id": 0, "pad_token": "<s>"}
        ),
        "text that grows when decoded": _tokenizer(
            decoder={"type": "Sequence", "decoders": [_replace({"String": "a"}, "a" * 90)] * 5}
        ),
    },
    ("adapter", "adapter_config.json"): {
        "a pattern that never ends": _adapter(rank_pattern={"(.*.*.*.*)*x": 4}),
        "a pattern of many choices": _adapter(rank_pattern={"(a|a|a)" * 25 + "x": 4}),
        "a rank beyond memory": _adapter(r=10**12),
    },
    ("template", "t.jinja"): {
        f"{what}: {name}": source.encode()
        for what, some in (
            ("too much", TOO_MUCH), ("uncompiled", UNCOMPILED), ("hidden", dict(zip(HIDDEN, HIDDEN, strict=True)))
        )
        for name, source in some.items()
    },
    ("config", "c.yaml"): {
        "billion laughs": _laughs(12),
        "billion laughs in a key": _laughs(9) + b"\nbase_model: *a8\n",
        "billion laughs in a list": _laughs(9) + b"\ndatasets: *a8\n",
        "a merge bomb": b"a: &a {x: 1}\n" + b"".join(
            b"b%d: &b%d {<<: [%b]}\n" % (i, i, b", ".join([b"*b%d" % (i - 1) if i else b"*a"] * 10)) for i in range(8)
        ),
        "itself": b"datasets: &d [*d]\nlora_r: &r {r: *r}\n",
        "python objects": b"lora_r: !!python/object/apply:os.system ['exit 3']\n",
        "a number of many digits": b"seed: " + b"9" * 100_000 + b"\n",
        "sexagesimal": b"seed: " + b"59:" * 5000 + b"59\n",
        "an int in hexadecimal": b"lora_r: 0x" + b"f" * 100_000 + b"\n",
        "a float of many digits": b"learning_rate: 1" + b"0" * 100_000 + b".0\n",
        "a date that is none": b"output_dir: 2024-99-99\n",
        "deep flow": b"a: " + b"[" * 5000,
        "deep blocks": b"".join(b" " * i + b"a:\n" for i in range(900)),
        "many documents": b"--- a\n" * 5000,
        "many keys": b"".join(b"k%d: 1\n" % i for i in range(20_000)),
        "a megabyte of one key": b"a" * 900_000 + b": 1\n",
        "a directive": b"%YAML 9.9\n---\nlora_r: 1\n",
        "no text": bytes(range(256)),
    },
    ("npz", "expected.npz"): {
        "a shape beyond memory": _npz(loss=_npy("(1000000000000,)")),
        "an object": _npz(loss=_npy("()", "|O", b"\x80\x04cos\nsystem\n(S'exit 3'\ntR.")),
        "a zip bomb": _npz(loss=_npy(f"({100 * MIB},)", "|u1", bytes(100 * MIB))),
        "a text dtype beyond memory": _npz(loss=_npy("()", "<U1000000000")),
        "a header that is no header": _npz(loss=b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 60_000),
        "a header of code": _npz(loss=_npy("__import__('os').getpid()")),
        "no zip": b"PK\x03\x04" + bytes(100),
    },
    ("data", "d.jsonl"): {
        "a line of 30 MB": b'{"text": "' + b"a" * 30_000_000,
        "a deep line": b"[" * 500_000,
        "a number of many digits": b'{"text": ' + b"1" * 500_000 + b"}\n",
        "half a surrogate pair": b'{"text": "\\ud800 abc"}\n',
        "ids beyond 64 bits": b'{"input_ids": [1, 99999999999999999999], "labels": [1, 2]}\n',
        "zeros": bytes(100_000),
        "blank lines": b"\n" * 500_000,
        "nothing": b"",
    },
    ("data", "e.jsonl"): {
        "a long text": json.dumps({"text": "ab " * 5 * MIB}).encode(),
        "a text of one letter": json.dumps({"text": "a" * 15 * MIB}).encode(),
        "brackets in tools": json.dumps(
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
             "tools": "[" * 100_000}
        ).encode(),
        "digits in tools": json.dumps(
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
             "tools": "[" + "9" * 5000 + "]"}
        ).encode(),
        "a message of nested lists": (
            b'{"messages": [{"role": "user", "content": "a", "x": ' + b"[" * 900 + b"]" * 900
            + b'}, {"role": "assistant", "content": "b"}]}'
        ),
    },
    ("data", "e.json"): {
        "two arrays": json.dumps([{"text": "a"}] * 9).encode() * 2,
        "an array and a word": json.dumps([{"text": "a"}]).encode() + b"\nmore",
    },
    ("data", "e.csv"): {
        "a cell of 50 MB": b"text\n" + b"a" * 50 * MIB + b"\n",
        "300,000 columns": b",".join(b"c%d" % i for i in range(300_000)) + b"\n" + b"," * 299_999 + b"\n",
        "brackets in a cell": b'messages\n"' + b"[" * 100_000 + b'"\n',
        "digits in a cell": b"input_ids\n[" + b"9" * 5000 + b"]\n",
    },
    ("data", "e.jsonl.zst"): {
        "half of it": (c := zstandard.ZstdCompressor().compress(b'{"text": "some text %d"}\n' * 9000))[: len(c) // 2],
        "a second frame that is cut": c + c[:-3],
    },
    ("data", "e.parquet"): {
        "text that is no UTF-8": _no_utf8(),
        "times in a column that is used": _table({"text": pyarrow.array([10**18 + 1], pyarrow.timestamp("ns"))}),
        "dates beyond Python's": _table({"text": pyarrow.array([2**31 - 1], pyarrow.date32())}),
        "durations": _table({"text": pyarrow.array([1], pyarrow.duration("ns"))}),
    },
    ("data", "d.json"): {"an open array": b"[" * 300_000, "an array of open objects": b'[{"a":' * 100_000},
    ("data", "d.csv"): {
        "an open quote": b'instruction,output\n"' + b"a\n" * 100_000,
        "a million cells": b"instruction,output\n" + b"," * 1_000_000 + b"\n",
        "no header": b"\n\n\n",
        "zeros": b"instruction,output\n\0,\0\n",
    },
    ("data", "d.jsonl.gz"): {
        "a bomb in one line": gzip.compress(b'{"text": "' + b"a" * (100 * MIB), mtime=0),
        "a bomb in many lines": gzip.compress((b" " * 15 + b"\n") * (100 * MIB >> 4), mtime=0),
        "no gzip": b"\x1f\x8b\x08" + bytes(50),
    },
    ("data", "d.json.gz"): {"a bomb": gzip.compress(b"[" + b" " * (100 * MIB), mtime=0)},
    ("data", "d.jsonl.zst"): {
        "a bomb in one line": zstandard.ZstdCompressor().compress(b'{"text": "' + b"a" * (100 * MIB)),
        "a window beyond memory": b"\x28\xb5\x2f\xfd\x00\xb8" + b"\x03\x00\x00",
    },
    ("data", "d.parquet"): {
        "a bomb": _bomb_table(["a" * 1000] * 30_000),
        "long cells": _bomb_table(["a" * 8 * MIB] * 20),
        "a footer longer than the file": b"PAR1" + bytes(20) + struct.pack("<I", 2**31 - 1) + b"PAR1",
        "an empty footer": b"PAR1" + struct.pack("<I", 0) + b"PAR1",
    },
    ("data", "d.parquet.gz"): {"a bomb": gzip.compress(bytes(100 * MIB), mtime=0)},
}  # fmt: skip


def born() -> Iterator[tuple[Seed, Hostile]]:
    """The hostile files above, each in the folder of the seed of its kind."""
    places = {(seed.kind, seed.file): seed for seed in SEEDS}
    for (kind, file), contents in BORN.items():
        seed = places.get((kind, file)) or Seed(kind, file, data_folder(file, b""), ())
        for how, content in contents.items():
            yield seed, Hostile(kind, file, how, content)


def corpus(seed: int) -> Iterator[tuple[Seed, Hostile]]:
    """All hostile files of a seed; those that were hostile from the start are of the first one."""
    if seed == 0:
        yield from born()
    yield from spoiled(seed)
