"""The cache of tokens: what it is keyed by, damage that is noticed, and where it lies."""

from dataclasses import replace

import pytest
from test_dataset import ids_of, loading, tokens, write_lines

from lorawgpu.data import dataset
from lorawgpu.data.dataset import tokenise
from lorawgpu.data.read_files import BadLine
from lorawgpu.data.token_store import default_cache_dir


def test_the_cache_is_keyed_by_content_and_settings(tmp_path, monkeypatch):
    made = []
    fill = dataset.fill
    monkeypatch.setattr(dataset, "fill", lambda *args: (made.append(1), fill(*args)))
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}
    spec = write_lines(tmp_path / "a.jsonl", chat)
    cached = {"cache_dir": tmp_path / "cache"}
    first = tokenise(spec, loading(**cached))
    moved = write_lines(tmp_path / "moved.jsonl", chat)
    again = tokenise(moved, loading(**cached))
    assert len(made) == 1 and ids_of(first) == ids_of(again) and again.place(0) == (moved.path, 1)
    for other in (loading(32, **cached), loading(template="llama-3", **cached), loading(skip_bad_lines=True, **cached)):
        tokenise(spec, other)
    write_lines(tmp_path / "a.jsonl", chat, chat)
    assert len(tokenise(spec, loading(**cached))) == 2
    assert len(made) == 5
    assert not [p for p in (tmp_path / "cache" / "tokens").iterdir() if p.name.startswith(".")]


FILES = ["ids.i32", "labels.i32", "ends.i64", "lines.i64", "meta.json"]


DAMAGE = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:5]),
    "garbled": lambda file: file.write_bytes(bytes(b ^ 0xA5 for b in file.read_bytes())),
    "one bit": lambda file: file.write_bytes(file.read_bytes()[:-3] + bytes([file.read_bytes()[-3] ^ 1]) + b"00"),
    "gone": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_store_is_made_anew(tmp_path, caplog, name, damage):
    spec = write_lines(tmp_path / "a.jsonl", tokens(5, 6, 7), tokens(8, 9))
    cached = loading(cache_dir=tmp_path / "cache")
    first = tokenise(spec, cached)
    file = first.folder / name
    before = file.read_bytes()
    DAMAGE[damage](file)
    for read_only in (True, False):  # a dry run changes no cache, and is told the right tokens all the same
        again = tokenise(spec, replace(cached, read_only=read_only))
        assert ids_of(again) == [[5, 6, 7], [8, 9]]
        assert f"{name} is not what was written: tokenised anew" in caplog.text
        caplog.clear()
    assert file.read_bytes() == before
    tokenise(spec, cached)
    assert caplog.text == ""


def test_a_flipped_count_is_noticed(tmp_path, caplog):
    spec = write_lines(tmp_path / "a.jsonl", tokens(5, 6, 7))
    cached = loading(cache_dir=tmp_path / "cache")
    meta = tokenise(spec, cached).folder / "meta.json"
    meta.write_text(meta.read_text().replace('"samples": 1', '"samples": 2'))
    assert tokenise(spec, cached).counts.samples == 1 and "meta.json is not what was written" in caplog.text


def test_a_failed_run_leaves_no_store_behind(tmp_path):
    spec = write_lines(tmp_path / "a.jsonl", tokens(1, 2), "{")
    with pytest.raises(BadLine):
        tokenise(spec, loading(cache_dir=tmp_path / "cache"))
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "cache").write_text("a file in its place")
    spec = write_lines(tmp_path / "a.jsonl", tokens(1, 2))
    assert len(tokenise(spec, loading(cache_dir=tmp_path / "cache"))) == 1


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("LORAWGPU_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
