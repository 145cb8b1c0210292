"""The limits that the generated files of tests/hostile led to, each tested once with a small file."""

import gzip
import io
import json
import shutil
import struct
import time
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet
from tiny_tokenizer import backend

from lorawgpu.config.load import load_config
from lorawgpu.data.read_files import MAX_RECORD, parse, read
from lorawgpu.errors import UserError
from lorawgpu.files.safetensors import SafetensorsFile
from lorawgpu.tokenizer.guarded import GuardedTokenizer
from lorawgpu.tokenizer.hf import Tokenizer
from lorawgpu.train.metrics import read_metrics
from lorawgpu.verify import cases as golden
from lorawgpu.weights.loader import open_checkpoint

GOLDEN = Path(__file__).parent / "golden"
MIB = 1 << 20


def test_an_empty_tensor_of_a_shape_beyond_numpy(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UserError, match="'a': shape .* is too large for any memory"):
        SafetensorsFile(tmp_path / "a.safetensors")


def test_a_wrong_index_is_named(tmp_path):
    folder = shutil.copytree(GOLDEN / "llama_dense", tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = {"weight_map": {"model.nothing.weight": "one.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="index.json: tensor 'model.nothing.weight' is not in one.safetensors"):
        open_checkpoint(folder)


def test_a_tokenizer_that_expands_text(tmp_path):
    """Five replacements of one letter by ninety: the library aborts its process."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 90}
    for part, inner in (("normalizer", "normalizers"), ("decoder", "decoders")):
        words = json.loads(backend().to_str()) | {part: {"type": "Sequence", inner: [step] * 5}}
        (tmp_path / "tokenizer.json").write_text(json.dumps(words))
        with pytest.raises(UserError, match=r"tokenizer.json|the tokenizer was stopped"):
            words = GuardedTokenizer.from_hf_folder(tmp_path)
            words.decode(words.encode("a"))


def test_a_tokenizer_that_the_library_cannot_read_back(tmp_path):
    """A duplicate word in the vocabulary: loaded with the second id, but saved with a merge of an unknown word."""
    (tmp_path / "tokenizer.json").write_text(backend().to_str())
    tokenizer = Tokenizer.from_hf_folder(tmp_path)

    class Odd:
        def to_str(self):
            return backend().to_str().replace('"merges":[', '"merges":[["never","seen"],')

    tokenizer._backend = Odd()
    with pytest.raises(UserError, match="tokenizer.json: not a valid tokenizer: .*out of vocabulary"):
        tokenizer.encode("a", parse_special=False)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_file_of_a_wrong_special_token_is_named(tmp_path, name):
    (tmp_path / "tokenizer.json").write_text(backend().to_str())
    (tmp_path / name).write_text('{"bos_token": 7}')
    with pytest.raises(UserError, match=f"{name}: bos_token is 7; wanted a string"):
        Tokenizer.from_hf_folder(tmp_path)


def config_error(tmp_path, text) -> str:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(tmp_path / "c.yaml")
    return str(caught.value)


def test_a_config_with_thousands_of_mistakes_gives_a_short_message_soon(tmp_path):
    began = time.perf_counter()
    message = config_error(tmp_path, "".join(f"key{i}: 1\n" for i in range(5000)))
    assert time.perf_counter() - began < 20  # finding the nearest key 5000 times takes a minute
    assert "5002 problems" in message and "and 4992 more" in message and len(message) < 2000


def test_a_key_of_a_megabyte_is_cut(tmp_path):
    assert len(config_error(tmp_path, f"{'a' * 900_000}: 1\n")) < 2000


@pytest.mark.parametrize("number", ["0x" + "f" * 9000, "59:" * 3000 + "59"])
def test_a_number_too_long_to_print(tmp_path, number):
    assert "a number of" in config_error(tmp_path, f"lora_r: [{number}]\n")


@pytest.mark.parametrize(
    "setting",
    ["lora_r: 100000", f"lora_alpha: 1{'0' * 400}", "sequence_len: 9999999999", f"max_steps: 1{'0' * 30}",
     "num_epochs: 1e9", "learning_rate: 1e300", "dataset_num_proc: 100000", "adam_epsilon: 1e-300",
     "warmup_steps: 9999999999"],
)  # fmt: skip
def test_numbers_that_would_overflow_later(tmp_path, setting):
    """In the adapter's memory, in float32, or in a loop over all epochs."""
    key = setting.split(":")[0]
    assert f"line 1: {key}: got " in config_error(tmp_path, setting)


def test_billion_laughs(tmp_path):
    lines = ["a0: &a0 lol"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert len(config_error(tmp_path, "\n".join([*lines, "datasets: *a11"]))) < 2000


def npy(shape, data=b"", descr="<f4") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (npy("(1000000000000,)"), "has 0 bytes, which do not match float32"),
        (npy("()", descr="<U500000000"), "has 0 bytes"),
        (npy(f"({64 * MIB},)", bytes(64 * MIB), "|u1"), "expands more than 50-fold"),
        (npy("()", b"\x80\x04cos\nsystem\n", "|O"), "allow_pickle"),
        (b"\x93NUMPY\x09\x00", "version"),
    ],
)
def test_bad_arrays_of_a_golden_case(tmp_path, array, words):
    folder = shutil.copytree(GOLDEN / "bitnet_q_only", tmp_path / "case")
    with zipfile.ZipFile(folder / "expected.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("loss.npy", array)
    with pytest.raises(UserError, match=f"expected.npz: not a readable .npz of plain arrays: .*{words}"):
        golden.read_case(folder)


def test_arrays_of_all_kinds_are_read(tmp_path):
    arrays = {"a": np.float32(1), "b": np.arange(6).reshape(2, 3), "c": np.zeros((0, 4)), "d": np.eye(3, order="F")}
    np.savez(tmp_path / "x.npz", **arrays)
    read_back = golden._read_arrays(tmp_path / "x.npz")
    assert all(np.array_equal(read_back[name], array) for name, array in arrays.items())


@pytest.fixture(scope="module")
def bombs():
    line = b'{"text": "' + b"a" * (40 * MIB)
    table = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["a" * MIB] * 40}), table, compression="zstd")
    return {
        "d.jsonl.gz": gzip.compress((line[:1023] + b"\n") * (40 << 10)),
        "d.jsonl.zst": zstandard.ZstdCompressor().compress(line),
        "d.json.gz": gzip.compress(b"[" + line),
        "d.csv.gz": gzip.compress(b"text\n" + (b"a" * 1023 + b"\n") * (40 << 10)),
        "d.parquet": table.getvalue(),
        "d.parquet.gz": gzip.compress(bytes(40 * MIB)),
    }


KINDS = ["d.jsonl.gz", "d.jsonl.zst", "d.json.gz", "d.csv.gz", "d.parquet", "d.parquet.gz"]


@pytest.mark.parametrize("name", KINDS)
def test_a_decompression_bomb(tmp_path, bombs, name):
    path = tmp_path / name
    path.write_bytes(bombs[name])
    with pytest.raises(UserError, match=rf"{name}: expands more than \d+-fold; .* decompress it first"):
        for _ in read(path):
            pass


def test_a_line_that_is_too_long_is_one_bad_record(tmp_path):
    path = tmp_path / "d.jsonl"
    good = b'{"text": "a"}\n'
    path.write_bytes(good + b'{"text": "' + b"a" * (2 * MAX_RECORD) + b'"}\n' + good)
    records = list(read(path))
    assert [line for line, _ in records] == [1, 2, 3] and len(records[1][1]) <= MAX_RECORD + 1
    assert parse("d.jsonl", 3, records[2][1]) == {"text": "a"}
    with pytest.raises(UserError, match="d.jsonl, line 2: longer than 16 MiB"):
        parse("d.jsonl", *records[1])


def test_a_deeply_nested_line_of_metrics_is_skipped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + "[" * 200_000 + '\n{"step": 2}\n')
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_config_of_60_megabytes_is_not_parsed(tmp_path):
    folder = shutil.copytree(GOLDEN / "llama_dense", tmp_path / "model")
    (folder / "config.json").write_text('{"a": [' + "[]," * 20_000_000 + "1]}")
    with pytest.raises(UserError, match=r"config.json: \d+ bytes; at most 16777216 are allowed"):
        open_checkpoint(folder)
