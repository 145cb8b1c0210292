"""The token cache: its key, damage it detects, and its location."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_dataset import ids_of, loading, tokens, write_lines

from lorawgpu.data import dataset
from lorawgpu.data.bad_line import BadLine
from lorawgpu.data.dataset import tokenize
from lorawgpu.data.token_store import STORES
from lorawgpu.files.atomic import marked
from lorawgpu.files.paths import default_cache_dir


def test_the_cache_is_keyed_by_content_and_settings(tmp_path, monkeypatch):
    made = []
    encode_files = dataset.encode_files
    monkeypatch.setattr(dataset, "encode_files", lambda *args: (made.append(1), encode_files(*args)))
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}
    spec = write_lines(tmp_path / "a.jsonl", chat)
    cached = {"cache_dir": tmp_path / "cache"}
    first = tokenize(spec, loading(**cached))
    moved = write_lines(tmp_path / "moved.jsonl", chat)
    again = tokenize(moved, loading(**cached))
    assert len(made) == 1 and ids_of(first) == ids_of(again) and again.place(0) == (moved.path, 1)
    for other in (loading(32, **cached), loading(template="llama-3", **cached), loading(skip_bad_lines=True, **cached)):
        tokenize(spec, other)
    write_lines(tmp_path / "a.jsonl", chat, chat)
    assert len(tokenize(spec, loading(**cached))) == 2
    assert len(made) == 5
    assert not [p for p in (tmp_path / "cache" / STORES).iterdir() if p.name.startswith(".")]


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
def test_a_corrupt_store_is_rebuilt(tmp_path, caplog, name, damage):
    spec = write_lines(tmp_path / "a.jsonl", tokens(5, 6, 7), tokens(8, 9))
    cached = loading(cache_dir=tmp_path / "cache")
    first = tokenize(spec, cached)
    file = first.folder / name
    before = file.read_bytes()
    DAMAGE[damage](file)
    for read_only in (True, False):  # a dry run leaves the cache alone but still gets the right tokens
        again = tokenize(spec, replace(cached, read_only=read_only))
        assert ids_of(again) == [[5, 6, 7], [8, 9]]
        assert f"corrupt ({name})" in caplog.text
        caplog.clear()
    assert file.read_bytes() == before
    tokenize(spec, cached)
    assert caplog.text == ""


def test_a_changed_count_is_detected(tmp_path, caplog):
    spec = write_lines(tmp_path / "a.jsonl", tokens(5, 6, 7))
    cached = loading(cache_dir=tmp_path / "cache")
    meta = tokenize(spec, cached).folder / "meta.json"
    meta.write_text(meta.read_text().replace('"samples": 1', '"samples": 2'))
    assert tokenize(spec, cached).counts.samples == 1 and "corrupt (meta.json)" in caplog.text


def test_a_failed_run_leaves_no_store_behind(tmp_path):
    spec = write_lines(tmp_path / "a.jsonl", tokens(1, 2), "{")
    with pytest.raises(BadLine):
        tokenize(spec, loading(cache_dir=tmp_path / "cache"))
    assert list((tmp_path / "cache" / STORES).iterdir()) == []


KILLED = """
import sys
from pathlib import Path
from lorawgpu.data.token_store import StoreWriter
with StoreWriter(Path(sys.argv[1])) as writer:
    print(writer.work, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_began_is_swept_and_what_a_living_one_writes_stays(tmp_path):
    """As is what is not ours, or about to be renamed."""
    stores = tmp_path / "cache" / STORES
    writers = [
        subprocess.Popen([sys.executable, "-c", KILLED, str(stores / f"{name * 40}")], text=True,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE) for name in "ab"
    ]  # fmt: skip
    dead, living = (Path(writer.stdout.readline().strip()) for writer in writers)
    writers[0].kill()
    writers[0].wait()
    mine = stores / ".mine.partial"
    young, old = (marked(stores / name, "partial") for name in ("young", "old"))
    for folder in (mine, young, old):
        folder.mkdir()
    os.utime(old, (0, 0))
    assert dead.is_dir() and living.is_dir()
    tokenize(write_lines(tmp_path / "a.jsonl", tokens(1, 2)), loading(cache_dir=tmp_path / "cache"))
    hidden = {path.name for path in stores.iterdir() if path.name.startswith(".")}
    assert hidden == {living.name, mine.name, young.name}
    writers[1].communicate("")
    assert not living.exists() and writers[1].returncode == 0


def test_it_works_without_a_writable_cache(tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    spec = write_lines(tmp_path / "a.jsonl", tokens(1, 2))
    assert len(tokenize(spec, loading(cache_dir=tmp_path / "cache"))) == 1


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("LORAWGPU_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
