"""Users without a home, folders whose names are no text, full disks, little memory, links in shared folders."""

import errno
import os
import sys

import pytest
from tiny_run import write_config

from lorawgpu.cli import main_of
from lorawgpu.config.load import load_config
from lorawgpu.data import token_store
from lorawgpu.errors import UserError
from lorawgpu.export.staging import staged
from lorawgpu.files.lock import only_run_in
from lorawgpu.files.paths import absolute, default_cache_dir, expand
from lorawgpu.train.setup import prepare


def test_a_user_without_a_home(tmp_path, monkeypatch):
    """As in a container with a bare user id: no passwd entry, no HOME."""
    for name in ("HOME", "USERPROFILE", "XDG_CACHE_HOME", "LORAWGPU_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert default_cache_dir() is None
    run = prepare(load_config(write_config(tmp_path, dataset_prepared_path=None)))
    assert len(run.identity["model"]) == 64 and len(run.data.train) == 1
    assert str(expand("~/x")) == "~/x"


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "a", "~"])
def test_names_of_files_are_expanded_or_left(name):
    assert str(expand(name)) == os.path.expanduser(name)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
@pytest.mark.parametrize("key", ["base_model", "output_dir", "dataset_prepared_path", "lora_model_dir"])
def test_names_that_no_file_can_have_are_refused(tmp_path, name, key):
    with pytest.raises(UserError) as error:
        load_config(write_config(tmp_path, **{key: name}))
    assert key in str(error.value) and "\0" not in str(error.value)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_working_directory_that_is_no_utf8(tmp_path, monkeypatch):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    monkeypatch.chdir(os.fsdecode(folder))
    with pytest.raises(UserError, match=r"output_dir: .*caf\\udce9/out': the name is not UTF-8"):
        load_config(write_config(tmp_path, output_dir="out"))
    assert absolute("/x") == os.path.abspath("/x")


def test_a_full_disk_names_the_token_cache(tmp_path):
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
        with token_store.StoreWriter(tmp_path / "store"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("error", "words"), [(MemoryError(), "Python could not"), (MemoryError("2 GiB"), ": 2 GiB")])
def test_too_little_memory_is_one_message(capsys, error, words):
    def run(argv):
        raise error

    assert main_of(run)([]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: not enough memory") and words in err and err.count("\n") == 1


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "victim")
    with (
        pytest.raises(UserError, match=r"\.lock is a link, which a lock file never is: remove it"),
        only_run_in(tmp_path),
    ):
        pass
    assert not (tmp_path / "victim").exists()


def test_two_exports_to_one_name(tmp_path):
    """The second is refused while the first one goes on; what a killed one left is swept."""
    left = tmp_path / f".out.{'0' * 16}.partial"
    left.mkdir()
    (tmp_path / ".out.mine.partial").mkdir()
    with staged(tmp_path / "out") as folder:
        assert not left.exists()
        (folder / "file").write_text("first")
        with pytest.raises(UserError, match="out: another export is writing it"), staged(tmp_path / "out"):
            pass
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.mine.partial"}
