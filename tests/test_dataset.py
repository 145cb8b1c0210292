"""From data sets to samples: counts, limits, bad lines, held-out samples, workers."""

import json
import os
import signal

import numpy as np
import pytest
from tiny_tokenizer import tiny_tokenizer

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.template import ChatTemplate
from lorawgpu.data import workers
from lorawgpu.data.bad_line import BadLine
from lorawgpu.data.batch_order import Batches, BatchSettings
from lorawgpu.data.batching import IGNORE
from lorawgpu.data.dataset import DatasetSpec, LoadSettings, load, split, tokenize
from lorawgpu.data.encode import EncodeSettings
from lorawgpu.data.preview import summary
from lorawgpu.data.token_store import STORES, Counts
from lorawgpu.errors import UserError
from lorawgpu.util import progress


def loading(sequence_len=64, strategy="truncate", template="chatml", **options):
    tokenizer = tiny_tokenizer()
    chat = ChatTemplate(BUILT_IN.get(template, template), tokenizer.special_tokens)
    return LoadSettings(EncodeSettings(sequence_len, strategy, False, ("assistant",)), tokenizer, chat, **options)


def write_lines(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), "utf-8")
    return DatasetSpec(str(path))


def tokens(*ids):
    return {"input_ids": list(ids), "labels": [IGNORE, *ids[1:]]}


def ids_of(source):
    return [source[i].input_ids.tolist() for i in range(len(source))]


def test_counts_say_what_became_of_every_record(tmp_path):
    spec = write_lines(
        tmp_path / "a.jsonl",
        tokens(1, 2, 3),
        {"input_ids": list(range(9)), "labels": [IGNORE] * 2 + list(range(2, 9))},
        "{",
        {"input_ids": list(range(9)), "labels": [IGNORE] * 8 + [8]},
        tokens(4, 5),
    )
    store = tokenize(spec, loading(sequence_len=5, skip_bad_lines=True))
    assert store.counts == Counts(samples=3, tokens=10, trained_tokens=6, truncated=1, dropped=1, skipped=1)
    assert ids_of(store) == [[1, 2, 3], [0, 1, 2, 3, 4], [4, 5]]
    assert store.lengths.tolist() == [3, 5, 2]
    assert [store.place(i) for i in range(3)] == [(spec.path, 1), (spec.path, 2), (spec.path, 5)]
    assert store.skipped == [
        f"{spec.path}, line 3: not valid JSON (Expecting property name enclosed in double quotes at column 2): {{"
    ]


def test_a_bad_line_stops_unless_it_may_be_skipped(tmp_path):
    spec = write_lines(tmp_path / "a.jsonl", tokens(1, 2), {"text": "x"})
    with pytest.raises(BadLine, match="a.jsonl, line 2: .* `input_ids`; it has `text`"):
        tokenize(spec, loading())


def test_a_folder_with_two_types_says_which_record_set_the_type(tmp_path):
    write_lines(tmp_path / "a.jsonl", "", tokens(1, 2))
    write_lines(tmp_path / "b.jsonl", {"text": "x"})
    with pytest.raises(BadLine, match=r"b.jsonl, line 1: .* `input_ids`.* detected from .*a.jsonl, line 2"):
        tokenize(DatasetSpec(str(tmp_path)), loading())
    with pytest.raises(BadLine, match="it has `text`. --skip"):  # declared, not detected
        tokenize(DatasetSpec(str(tmp_path), "pretokenized"), loading())


def test_drop_and_raise(tmp_path):
    spec = write_lines(tmp_path / "a.jsonl", tokens(1, 2), tokens(1, 2, 3, 4))
    store = tokenize(spec, loading(3, "drop"))
    assert store.counts == Counts(1, 2, 1, dropped=1)
    assert "note: 1 samples dropped" in summary(store.counts) and "sequence_len" in summary(store.counts)
    with pytest.raises(UserError, match="line 2: 4 tokens, more than sequence_len 3"):
        tokenize(spec, loading(3, "raise", skip_bad_lines=True))  # not a bad line


def test_nothing_to_train_is_an_error(tmp_path):
    with pytest.raises(UserError, match="nothing to train: 1 samples dropped"):
        tokenize(write_lines(tmp_path / "a.jsonl", tokens(1, 2, 3)), loading(2, "drop"))
    with pytest.raises(UserError, match="no readable records"):
        tokenize(write_lines(tmp_path / "b.jsonl", "", ""), loading())
    with pytest.raises(UserError, match="no such file"):
        tokenize(DatasetSpec(str(tmp_path / "none.jsonl")), loading())


def test_a_declared_type_settles_ambiguous_keys(tmp_path):
    spec = write_lines(tmp_path / "a.jsonl", {"text": "Hello", "instruction": "Hi", "output": "Yes"})
    with pytest.raises(BadLine, match="fit several formats"):
        tokenize(spec, loading())
    assert tokenize(DatasetSpec(spec.path, "text"), loading())[0].targets > 0
    with pytest.raises(UserError, match="`texts`"):
        tokenize(DatasetSpec(spec.path, "texts"), loading())


def test_samples_of_several_files_know_their_lines(tmp_path):
    write_lines(tmp_path / "a.jsonl", tokens(1, 2))
    (tmp_path / "b.json").write_text(json.dumps([tokens(3, 4), tokens(5, 6)], indent=1))
    (tmp_path / "c.csv").write_text('input_ids,labels\n"[7, 8]","[7, 8]"\n')
    store = tokenize(DatasetSpec(str(tmp_path)), loading())
    assert ids_of(store) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    files = [(tmp_path / name).as_posix() for name in ("a.jsonl", "b.json", "b.json", "c.csv")]
    assert [store.place(i)[0] for i in range(4)] == files and store.place(2)[1] > store.place(1)[1] > 1


def test_held_out_data_is_a_fraction_a_count_or_a_file(tmp_path):
    specs = [
        write_lines(tmp_path / "a.jsonl", *[tokens(i, i) for i in range(30)]),
        write_lines(tmp_path / "b.jsonl", *[tokens(i, i) for i in range(100, 110)]),
    ]
    for size, count in ((0.1, 4), (3, 3), (1, 1), (0.001, 1), (39, 39)):
        data = load(specs, loading(), size, seed=0)
        held, kept = ids_of(data.validation), [i for s in data.train for i in ids_of(s)]
        assert len(held) == len(data.validation) == count
        assert sorted(held + kept) == [[i, i] for i in (*range(30), *range(100, 110))]
        assert data.validation.lengths.tolist() == [2] * count
    assert load(specs, loading(), 0, seed=0).validation is None
    assert ids_of(load(specs, loading(), 5, seed=0).validation) != ids_of(load(specs, loading(), 5, seed=1).validation)
    other = load(specs[:1], loading(), 0, seed=0, val_specs=specs[1:])
    assert len(other.validation) == 10 and len(other.train[0]) == 30
    with pytest.raises(UserError, match="val_set_size 40 leaves nothing .* 40 samples"):
        load(specs, loading(), 40, seed=0)
    with pytest.raises(UserError, match="not both"):
        load(specs, loading(), 0.1, seed=0, val_specs=specs)


def test_holding_out_may_leave_a_data_set_empty(tmp_path):
    stores = [tokenize(write_lines(tmp_path / f"{n}.jsonl", tokens(n, n)), loading()) for n in range(3)]
    train, held = split(stores, 2, seed=0)
    batches = Batches(train, BatchSettings(0, 4, 1, 128, True), [1.0, 2.0, 1.0])
    step = next(batches.step_batches())
    assert len(held) == 2 and step.ends_epoch and step.micro_batches[0].samples in (1, 2)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_workers_make_the_same_samples_with_the_same_lines(tmp_path, monkeypatch, name):
    records = [{"text": "naïve café " * (i % 50 + 1)} for i in range(400)]
    records[123] = {"text": ""}
    spec = write_lines(tmp_path / "a.jsonl", *records)
    if name == "a.json":
        (tmp_path / name).write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]")
        spec = DatasetSpec(str(tmp_path / name))
    options = {"sequence_len": 256, "skip_bad_lines": True}
    alone = tokenize(spec, loading(workers=1, **options))
    monkeypatch.setattr(workers, "MIN_PARALLEL", 0)
    monkeypatch.setattr(workers, "CHUNK", 10_000)  # some forty tasks
    shared = tokenize(spec, loading(workers=2, **options))
    assert shared.counts == alone.counts and alone.counts.skipped == 1
    assert shared.skipped == alone.skipped
    np.testing.assert_array_equal(np.concatenate(ids_of(shared)), np.concatenate(ids_of(alone)))
    assert [shared.place(i) for i in range(399)] == [alone.place(i) for i in range(399)]
    with pytest.raises(BadLine, match=f"{name}, line {124 if name == 'a.jsonl' else 125}: `text` is empty"):
        tokenize(spec, loading(workers=2, sequence_len=256))


def killed(task, encoder, skip_bad_lines):
    """As the kernel does when memory runs out; runs in a worker process."""
    os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


def test_a_worker_that_is_killed_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "MIN_PARALLEL", 0)
    monkeypatch.setattr(workers, "_encode", killed)
    spec = write_lines(tmp_path / "a.jsonl", *[{"text": "a"}] * 3)
    with pytest.raises(UserError, match=r"a\.jsonl: reading took more than 640 MiB of memory"):
        tokenize(spec, loading(workers=2, cache_dir=tmp_path / "cache"))
    assert list((tmp_path / "cache" / STORES).iterdir()) == []


def test_progress_is_shown_only_if_it_takes_long(tmp_path, monkeypatch, capsys):
    spec = write_lines(tmp_path / "a.jsonl", *[{"text": "a b c"}] * 40)
    tokenize(spec, loading())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(workers, "CHUNK", 200)
    monkeypatch.setattr(progress, "INTERVAL", 0)
    tokenize(spec, loading())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 3 and lines[-1] == "tokenizing: 100% of 720B"


def test_the_default_number_of_workers_is_bounded_by_memory(monkeypatch):
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 64)
    few, many = workers.default_workers(128_000), workers.default_workers(49_152)
    assert 1 < few < many < 64 and workers.default_workers(10_000_000) == 1
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 2)
    assert workers.default_workers(128_000) == 2


def test_data_digests_tell_data_and_weights_apart(tmp_path):
    spec = write_lines(tmp_path / "a.jsonl", *[tokens(i, i) for i in range(9)])
    one = load([spec], loading(), 0, seed=0).digest
    assert one == load([spec], loading(), 0, seed=0).digest
    assert one != load([DatasetSpec(spec.path, weight=2.0)], loading(), 0, seed=0).digest
    assert one != load([spec], loading(), 2, seed=0).digest
    assert one != load([spec], loading(sequence_len=32), 0, seed=0).digest
