"""Which files of a folder are meant: `name` of a configuration, as its card has it, and `data_files`."""

import pytest

from lorawgpu.data.configurations import Within, matches
from lorawgpu.data.find_files import files_to_evaluate, files_to_train
from lorawgpu.errors import UserError

CARD = """---
license: mit
configs:
- config_name: one
  data_files: one/*.jsonl
- config_name: two
  data_dir: two
- config_name: three
  data_files:
  - split: train
    path: [three/a.jsonl, three/b*.jsonl]
  - split: test
    path: three/c.jsonl
---
# A data set
"""
NAMES = ("one/train.jsonl", "one/test.jsonl", "one/x/z.jsonl", "two/x/train-0.csv", "two/test-0.csv", "three/a.jsonl",
         "three/b1.jsonl", "three/b2.jsonl", "three/c.jsonl", "four/d.jsonl")  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "README.md").write_text(CARD)
    return tmp_path


def used(find, folder, split=None, *data_files, name=None):
    files = find(str(folder), split, Within(name, None, data_files)).used
    return [file.relative_to(folder).as_posix() for file in files]


@pytest.mark.parametrize(
    ("name", "split", "wanted"),
    [
        ("one", None, ["one/train.jsonl"]),
        ("one", "test", ["one/test.jsonl"]),
        ("two", None, ["two/x/train-0.csv"]),
        ("three", None, ["three/a.jsonl", "three/b1.jsonl", "three/b2.jsonl"]),
        ("three", "test[:1]+train", ["three/c.jsonl", "three/a.jsonl", "three/b1.jsonl", "three/b2.jsonl"]),
        ("four", None, ["four/d.jsonl"]),
    ],
)
def test_a_configuration_is_that_of_the_card_or_the_folder_of_its_name(folder, name, split, wanted):
    assert used(files_to_train, folder, split, name=name) == wanted


def test_a_configuration_is_evaluated_on_its_validation_or_test_split(folder):
    assert used(files_to_evaluate, folder, name="three") == ["three/c.jsonl"]


def test_files_are_named_or_match_a_glob(folder):
    assert used(files_to_train, folder, None, "three/c.jsonl", "one/*.jsonl") == [
        "one/test.jsonl", "one/train.jsonl", "three/c.jsonl"
    ]  # fmt: skip
    assert used(files_to_train, folder, "test", "one/*.jsonl") == ["one/test.jsonl"]
    assert used(files_to_train, folder, "train[:3]", "three/*") == [f"three/{n}.jsonl" for n in ("a", "b1", "b2", "c")]
    assert used(files_to_train, folder, None, "**/*0.csv", name="two") == ["two/test-0.csv", "two/x/train-0.csv"]


def test_a_glob_stays_within_a_folder_unless_it_has_two_stars():
    yes = [("a/b.csv", "a/*.csv"), ("a/x/b.csv", "**/b.csv"), ("b.csv", "**/b.csv"), ("a/x/b.csv", "a/**"),
           ("a1.csv", "./a[0-9].csv"), ("a1.csv", "a?.csv")]  # fmt: skip
    no = [("a/x/b.csv", "a/*"), ("a/b.csv", "*.csv"), ("a/b.csv", "b.csv"), ("a.csv", "a[")]
    assert all(matches(*pair) for pair in yes) and not any(matches(*pair) for pair in no)


@pytest.mark.parametrize(
    ("within", "split", "words"),
    [
        (Within("five"), None, "no files of the configuration (name) five; it has one, three, two"),
        (Within("three"), "dev", "the configuration three has no split dev; it has test, train"),
        (Within(data_files=("one/none*",)), None, "no file is named one/none*; it has four/d.jsonl, one/test.jsonl"),
        (Within(revision="v1"), None, "revision: only for a data set of the hub; remove it"),
    ],
)
def test_what_is_not_there_is_named(folder, within, split, words):
    with pytest.raises(UserError) as error:
        files_to_train(str(folder), split, within)
    assert words in str(error.value)


def test_a_file_has_no_configuration(folder):
    with pytest.raises(UserError, match="name, data_files: only for a data set that is a folder or of the hub"):
        files_to_train(str(folder / "one" / "train.jsonl"), None, Within("one", None, ("a",)))


def test_without_a_name_the_configuration_is_the_default_of_the_card(folder):
    """As in Hugging Face's library `datasets`, which asks for a name if there are several and no default."""
    card = folder / "README.md"
    with pytest.raises(UserError, match="it has the configurations one, three, two, and no default: choose with `n"):
        files_to_train(str(folder))
    assert used(files_to_train, folder, None, "four/*") == ["four/d.jsonl"]
    card.write_text(CARD.replace("config_name: three", "config_name: three\n  default: true"))
    assert used(files_to_train, folder) == ["three/a.jsonl", "three/b1.jsonl", "three/b2.jsonl"]
    assert used(files_to_evaluate, folder) == ["three/c.jsonl"]
    card.write_text(CARD.replace("config_name: two", "config_name: default"))
    assert used(files_to_train, folder) == ["two/x/train-0.csv"]
    card.write_text("---\nconfigs:\n- config_name: any\n  data_files: four/*\n---\n")
    assert used(files_to_train, folder) == ["four/d.jsonl"]
    for none in ("---\nlicense: mit\n---\n", "---\n[\n---\n", ""):
        card.write_text(none)
        assert used(files_to_train, folder) == ["one/train.jsonl", "two/x/train-0.csv"]


def test_the_kind_of_files_that_is_asked_for(folder):
    (folder / "README.md").unlink()
    for kind, wanted in (("csv", ["two/x/train-0.csv"]), ("json", ["one/train.jsonl"])):
        found = files_to_train(str(folder), None, Within(ds_type=kind)).used
        assert [file.relative_to(folder).as_posix() for file in found] == wanted
        (file,) = found
        assert files_to_train(str(file), None, Within(ds_type=kind)).used == [file]
        assert files_to_train(f"{folder}/*/**/train*", None, Within(ds_type=kind)).used == [file]
    with pytest.raises(UserError, match="ds_type csv: wanted a name ending in .csv; remove ds_type, or rename it"):
        files_to_train(str(folder / "one" / "train.jsonl"), None, Within(ds_type="csv"))
    with pytest.raises(UserError, match="the folder contains no files ending in .parquet"):
        files_to_train(str(folder), None, Within(ds_type="parquet"))


def test_a_broken_card_is_named(folder):
    (folder / "README.md").write_text("---\n[\n---\n")
    with pytest.raises(UserError, match="the YAML of README.md cannot be read .*; name its files as data_files"):
        files_to_train(str(folder), None, Within("one"))
