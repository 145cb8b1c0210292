"""Slices and sums of splits, and shards: the records are those that `datasets` 5.2 gave for the same data."""

import json
from dataclasses import replace

import pyarrow
import pytest
from pyarrow import parquet
from test_dataset import ids_of, loading, tokens, write_lines

from lorawgpu.data.dataset import DatasetSpec, load, tokenize
from lorawgpu.data.slices import Shard, Slice, parse_split
from lorawgpu.errors import UserError

TRAIN, TEST = 15, 7  # records; those of the test split are numbered from 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two splits, of which `train` has two files; a record of number n is the sample [n, n]."""
    folder = tmp_path_factory.mktemp("set")
    write_lines(folder / "train-0.jsonl", *[tokens(n, n) for n in range(4)], "")
    (folder / "train-1.json").write_text(json.dumps([tokens(n, n) for n in range(4, TRAIN)]))
    write_lines(folder / "test.jsonl", *[tokens(100 + n, 100 + n) for n in range(TEST)])
    return folder


def numbers(spec, **options):
    return [first for first, _ in ids_of(tokenize(spec, loading(vocab_size=200, **options)))]


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        ("train", [*range(15)]),
        ("train[:5]", [0, 1, 2, 3, 4]),
        ("train[10%:30%]", [2, 3]),
        ("train[-4:]", [11, 12, 13, 14]),
        ("train[:-12]", [0, 1, 2]),
        ("train[10:99]", [10, 11, 12, 13, 14]),
        ("train[-99:3]", [0, 1, 2]),
        ("train[30%:70%]", [4, 5, 6, 7, 8, 9]),
        ("train[-10%:]", [13, 14]),
        ("train[50%:]", [8, 9, 10, 11, 12, 13, 14]),
        ("train[:3]+test[:2]", [0, 1, 2, 100, 101]),
        ("test+train[-1:]", [*range(100, 107), 14]),
        ("train[2:4]+train[3:5]", [2, 3, 3, 4]),
        ("train[12:50%]", [2, 3, 4, 5, 6, 7]),
        ("train[:10%]", [0, 1]),
        ("train[90%:]", [14]),
        ("test[:50%]", [100, 101, 102, 103]),
        ("train[1:]+test", [*range(1, 15), *range(100, 107)]),
        ("train[:1_0]", [*range(10)]),
    ],
)
def test_a_slice_has_the_records_that_datasets_gives(folder, split, wanted):
    assert numbers(DatasetSpec(str(folder), split=split)) == wanted


SHARDS = {
    42: ([3, 6, 7, 9], [0, 10, 11, 14], [2, 4, 5, 12], [1, 8, 13]),
    7: ([3, 6, 8, 10], [0, 1, 7, 13], [2, 4, 12, 14], [5, 9, 11]),
}


@pytest.mark.parametrize("seed", SHARDS)
def test_a_shard_has_the_records_of_shuffle_and_shard_of_datasets(folder, seed):
    spec = DatasetSpec(str(folder), split="train")
    shards = [numbers(replace(spec, shard=Shard(4, index, seed))) for index in range(4)]
    assert shards == list(SHARDS[seed])
    assert sorted(sum(shards, [])) == [*range(15)]


def test_shards_are_of_the_slice(folder):
    parts = [numbers(DatasetSpec(str(folder), split="train[2:6]+test[:2]", shard=Shard(2, i, 42))) for i in range(2)]
    assert [len(part) for part in parts] == [3, 3] and sorted(sum(parts, [])) == [2, 3, 4, 5, 100, 101]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_every_format_is_sliced_and_one_file_is_the_split_train(tmp_path, name):
    rows = [{"input_ids": [n, n]} for n in range(9)]
    if name == "a.csv":
        (tmp_path / name).write_text("input_ids\n" + "".join(f'"[{n}, {n}]"\n' for n in range(9)))
    elif name == "a.parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
    elif name == "a.json":
        (tmp_path / name).write_text(json.dumps(rows))
    else:
        write_lines(tmp_path / name, *rows)
    store = tokenize(DatasetSpec(str(tmp_path / name), split="train[-2:]"), loading(vocab_size=200))
    assert ids_of(store) == [[7, 7], [8, 8]]
    line = {"a.jsonl": 8, "a.json": 1, "a.csv": 9, "a.parquet": 8}[name]
    assert store.place(0) == (str(tmp_path / name), line) and store.counts.samples == 2


def test_what_is_outside_the_slice_is_not_judged(tmp_path):
    spec = write_lines(tmp_path / "a.jsonl", "{", {"text": 3}, tokens(1, 1), tokens(2, 2), "no JSON")
    assert numbers(replace(spec, split="train[2:4]")) == [1, 2]
    with pytest.raises(UserError, match="a.jsonl, line 5: not valid JSON"):
        tokenize(replace(spec, split="train[2:]"), loading(vocab_size=200))
    store = tokenize(replace(spec, split="train[2:]"), loading(vocab_size=200, skip_bad_lines=True))
    assert (store.counts.samples, store.counts.skipped) == (2, 1)


def test_a_large_file_is_sliced_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("lorawgpu.data.workers.CHUNK", 100)
    spec = write_lines(tmp_path / "a.jsonl", *[tokens(n, n) for n in range(150)])
    assert numbers(replace(spec, split="train[20:140]")) == [*range(20, 140)]
    assert numbers(replace(spec, split="train[20:140]", shard=Shard(1, 0, 0))) == [*range(20, 140)]


def test_the_cache_and_the_identity_know_the_records(tmp_path, folder):
    def digest(**keys):
        return load([DatasetSpec(str(folder), **keys)], loading(vocab_size=200, cache_dir=tmp_path), 0, seed=0).digest

    choices = [{}, {"split": "train[:5]"}, {"split": "train[:6]"}, {"split": "train[:2]+train[2:5]"}]
    choices += [{"shard": Shard(4, 0, 42)}, {"shard": Shard(4, 1, 42)}, {"shard": Shard(4, 0, 7)}]
    digests = [digest(**keys) for keys in choices]
    assert len({*digests}) == len(choices) and [digest(**keys) for keys in choices] == digests
    assert digest(split="train") == digests[0]


def test_parts_of_a_file_that_share_no_record_are_no_reason_for_a_note(folder):
    def notes(train, held_out):
        specs = [DatasetSpec(str(folder), split=split) for split in (train, held_out)]
        return load([specs[0]], loading(vocab_size=200), 0, seed=0, val_specs=[specs[1]]).notes

    assert notes("test[:5]", "test[5:]") == []
    assert "trained on and held out" in notes("test[:5]", "test[4:]")[0]
    assert "trained on and held out" in notes("test[:5]", "test")[0]


def test_a_split_of_no_form_or_no_record_is_refused(folder, tmp_path):
    for text in ("train[", "train[3]", "train[:5", "train[%:]", "train[a:b]", "+", "train+", "[:5]", "train[:5](x)"):
        with pytest.raises(UserError, match=r"wanted a split, or slices such as train\[:500\]"):
            parse_split(text)
    with pytest.raises(UserError, match="wanted at most 100%"):
        parse_split("train[:101%]")
    assert parse_split("train_sft") == (Slice("train_sft"),)
    for split in ("train[15:]", "train[5:3]", "test[14%:15%]"):
        with pytest.raises(UserError, match=r"no records in split .*; the files have \d+: take a larger part"):
            tokenize(DatasetSpec(str(folder), split=split), loading(vocab_size=200))
    one = write_lines(tmp_path / "a.jsonl", tokens(1, 1))
    with pytest.raises(UserError, match="no records in shards_idx 2 of 3 shards"):
        tokenize(replace(one, shard=Shard(3, 2, 0)), loading(vocab_size=200))
    with pytest.raises(UserError, match="a.jsonl: no file is of the split `test`: .* remove `split`, or give the fold"):
        tokenize(replace(one, split="test[:1]"), loading(vocab_size=200))
