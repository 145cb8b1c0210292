"""Which files of a data set are trained on, held out, or not read; and what is said about it."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_dataset import ids_of, loading, tokens, write_lines
from tiny_run import write_config, write_data

from lorawgpu.config.load import load_config
from lorawgpu.data.dataset import DatasetSpec, load
from lorawgpu.data.splits import Files, evaluation_files, files_of_split, split_of, training_files
from lorawgpu.data.token_store import Counts
from lorawgpu.errors import UserError
from lorawgpu.train.setup import prepare

MLX = ("train.jsonl", "valid.jsonl", "test.jsonl")


def test_split_names():
    """The hub's rule: a split's name is a word of its own in the file's name, or in a folder's."""
    for path, split in {
        "train.jsonl": "train", "data/train-00000-of-00002.parquet": "train", "my_train_file.csv": "train",
        "TRAIN/a.jsonl": "train", "valid.jsonl": "validation", "dev.json.gz": "validation", "val-1.csv": "validation",
        "test/train.jsonl": "train", "data/validation-0.jsonl": "validation", "test.jsonl": "test",
        "constraints.jsonl": None, "trained.jsonl": None, "latest.csv": None, "devices.csv": None, "chats.jsonl": None,
    }.items():  # fmt: skip
        assert split_of(Path(path)) == split, path


@pytest.mark.parametrize(
    ("names", "used", "held_out", "unread"),
    [
        (MLX, "train.jsonl", "valid.jsonl", "test.jsonl"),
        (("train.csv", "validation.csv"), "train.csv", "validation.csv", ""),
        (("train.jsonl", "dev.jsonl", "more.jsonl"), "train.jsonl", "dev.jsonl", "more.jsonl"),
        (("chats.jsonl", "valid.jsonl", "test.jsonl"), "chats.jsonl", "valid.jsonl", "test.jsonl"),
        (("a.jsonl", "b.jsonl"), "a.jsonl b.jsonl", "", ""),
        (("a.jsonl", "dev-team.jsonl", "unit-test.jsonl"), "a.jsonl dev-team.jsonl unit-test.jsonl", "", ""),
        (("data/train-0.jsonl", "data/validation-0.jsonl", "data/test-0.jsonl"), "data/train-0.jsonl", "",
         "data/test-0.jsonl data/validation-0.jsonl"),
        (("a.jsonl", "data/validation-00000-of-00001.jsonl", "b/a.jsonl", "test/b.jsonl"), "a.jsonl b/a.jsonl", "",
         "data/validation-00000-of-00001.jsonl test/b.jsonl"),
        (("train/a.jsonl", "train/b.jsonl", "test/a.jsonl"), "train/a.jsonl train/b.jsonl", "", "test/a.jsonl"),
    ],
)  # fmt: skip
def test_a_folder_is_trained_on_by_its_splits(names, used, held_out, unread):
    folder = Path("set")
    found = training_files([folder / name for name in sorted(names)], folder)
    assert [[f.relative_to(folder).as_posix() for f in files] for files in (found.used, found.held_out, found.unread)]\
        == [used.split(), held_out.split(), unread.split()]  # fmt: skip


ULTRACHAT = [f"data/{name}-00000-of-00001.parquet" for name in ("test_gen", "test_sft", "train_gen", "train_sft")]


@pytest.mark.parametrize(
    ("names", "split", "used"),
    [
        (MLX, "valid", ["valid.jsonl"]),
        (MLX, "validation", ["valid.jsonl"]),
        (MLX, "test", ["test.jsonl"]),
        (ULTRACHAT, "train_sft", ULTRACHAT[3:]),
        (ULTRACHAT, "train", ULTRACHAT[2:]),
        (("train/a.csv", "dev/a.csv"), "dev", ["dev/a.csv"]),
        (("train/a.csv", "dev/a.csv"), "validation", ["dev/a.csv"]),
        (("easy.csv", "hard.csv"), "hard", ["hard.csv"]),
    ],
)
def test_a_split_is_taken_by_its_name(names, split, used):
    folder = Path("set")
    files = files_of_split([folder / name for name in names], folder, split)
    assert files == Files([folder / name for name in used])
    with pytest.raises(UserError, match="no file is of the split `other`; it has"):
        files_of_split(files.used, folder, "other")


def test_shards_of_other_splits_alone_are_not_trained_on():
    with pytest.raises(UserError, match="no file to train on"):
        training_files([Path("s/data/test-00000-of-00001.jsonl"), Path("s/data/validation-0.jsonl")], Path("s"))


def test_a_folder_of_the_hub_is_read_as_its_name_is(tmp_path):
    """`train` alone; what belongs to git, to an editor or to the hub is no data."""
    (tmp_path / "data").mkdir()
    (tmp_path / ".cache").mkdir()
    for number, name in enumerate(("train", "validation", "test"), 1):
        write_lines(tmp_path / "data" / f"{name}-00000-of-00001.jsonl", tokens(number, number))
    for name in (".cache/train.jsonl", "dataset_infos.json"):
        write_lines(tmp_path / name, tokens(9, 9))
    spec = DatasetSpec(str(tmp_path))
    data = load([spec], loading(), 0, seed=0)
    assert ids_of(data.train[0]) == [[1, 1]] and data.validation is None
    assert "data/test-00000-of-00001.jsonl, data/validation-00000-of-00001.jsonl not read" in data.notes[0]
    test = replace(spec, split="test")
    data = load([spec], loading(), 0, seed=0, val_specs=[test])
    assert ids_of(data.train[0]) == [[1, 1]] and ids_of(data.validation) == [[3, 3]]
    assert ids_of(load([test], loading(), 0, seed=0).train[0]) == [[3, 3]]
    config = write_config(tmp_path / "run", datasets=[{"path": str(tmp_path), "split": "test"}])
    assert load_config(config).datasets[0].split == "test"


def test_an_evaluation_takes_the_validation_files_of_a_folder_then_the_test_files():
    folder = Path("set")
    for names, used in ((MLX, "valid.jsonl"), (("train.jsonl", "test.jsonl"), "test.jsonl"), (("a.csv",), "a.csv")):
        assert evaluation_files([folder / n for n in names], folder).used == [folder / used]


def layout(folder: Path) -> DatasetSpec:
    """mlx-lm's layout: 3 samples to train on, 2 to evaluate on, 1 to test on."""
    folder.mkdir()
    write_lines(folder / "train.jsonl", tokens(1, 1, 1), tokens(2, 2), tokens(3, 3))
    write_lines(folder / "valid.jsonl", tokens(4, 4), tokens(5, 5))
    write_lines(folder / "test.jsonl", tokens(6, 6))
    return DatasetSpec(str(folder))


def test_a_folder_of_train_valid_and_test(tmp_path):
    spec = layout(tmp_path / "set")
    data = load([spec], loading(), 0, seed=0)
    assert ids_of(data.train[0]) == [[1, 1, 1], [2, 2], [3, 3]] and ids_of(data.validation) == [[4, 4], [5, 5]]
    assert data.counts == Counts(3, 7, 4)
    assert data.notes == [f"{spec.path}: test.jsonl not read; to use a file, set `split` or `path`"]
    assert [Path(name).name for name in data.files] == ["train.jsonl", "valid.jsonl"]
    both = load([spec], loading(), 1, seed=0)  # val_set_size says otherwise
    assert len(both.validation) == 1 and len(both.train[0]) == 2
    assert both.notes == [f"{spec.path}: test.jsonl, valid.jsonl not read; to use a file, set `split` or `path`"]
    other = write_lines(tmp_path / "other.jsonl", tokens(7, 7))
    assert ids_of(load([spec], loading(), 0, seed=0, val_specs=[other]).validation) == [[7, 7]]
    assert ids_of(load([spec], loading(), 0, seed=0, val_specs=[spec]).validation) == [[4, 4], [5, 5]]
    assert ids_of(load([spec], loading(purpose="evaluate"), 0, seed=0).train[0]) == [[4, 4], [5, 5]]


def test_a_folder_of_test_files_alone_is_not_trained_on(tmp_path):
    write_lines(tmp_path / "test.jsonl", tokens(1, 1))
    with pytest.raises(UserError, match="no file to train on, only test.jsonl: name one as `path`"):
        load([DatasetSpec(str(tmp_path))], loading(), 0, seed=0)


def test_counts_are_those_of_what_is_trained(tmp_path):
    """39 of 40 samples held out: one is trained on. Sample i has i + 2 tokens, all but the first targets."""
    spec = write_lines(tmp_path / "a.jsonl", *[tokens(*[i] * (i + 2)) for i in range(40)])
    data = load([spec], loading(), 39, seed=0)
    ((sample,),) = [ids_of(source) for source in data.train]
    assert data.counts == Counts(1, len(sample), len(sample) - 1)
    held = load([spec], loading(), 0.25, seed=1)
    left = {len(ids) for ids in ids_of(held.train[0])}
    assert len(left) == 30 and held.counts == Counts(30, sum(left), sum(left) - 30)


def test_the_same_file_on_both_sides_is_said(tmp_path):
    spec = write_lines(tmp_path / "a.jsonl", tokens(1, 1), tokens(2, 2))
    copy = write_lines(tmp_path / "b.jsonl", tokens(1, 1), tokens(2, 2))
    says = "trained on and held out: that loss says nothing about new data"
    assert load([spec], loading(), 0, seed=0, val_specs=[spec]).notes == [f"{spec.path} is {says}"]
    (note,) = load([spec], loading(), 0, seed=0, val_specs=[copy]).notes
    assert note == f"{spec.path} and {copy.path} have the same content, which is {says}"
    (note,) = load([spec, spec], loading(), 0, seed=0).notes
    assert note.startswith(f"{spec.path} is trained on twice an epoch")


def test_what_needs_held_out_data_may_find_it_in_a_folder(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    write_data(folder / "train.jsonl")
    config = write_config(tmp_path, datasets=[{"path": str(folder)}], eval_steps=2, early_stopping_patience=1)
    with pytest.raises(UserError, match="eval_steps has nothing .*; early_stopping_patience needs held-out data"):
        prepare(load_config(config))
    write_data(folder / "valid.jsonl", samples=3, seed=9)
    assert len(prepare(load_config(config)).data.validation) == 3


def test_what_was_recognized_by_other_names_is_said(tmp_path):
    spec = write_lines(tmp_path / "a.jsonl", {"question": "Hi", "answer": "Yes"})
    same = write_lines(tmp_path / "b.jsonl", {"instruction": "Hi", "output": "Yes"})
    data, plain = load([spec], loading(), 0, seed=0), load([same], loading(), 0, seed=0)
    assert data.notes == [f"{spec.path}: `question` is the user's turn, `answer` the assistant's"] and not plain.notes
    assert ids_of(data.train[0]) == ids_of(plain.train[0])
    spoken = write_lines(tmp_path / "c.jsonl", {"dialog": [{"role": "user", "content": "Hi"},
                                                           {"role": "assistant", "content": "Yes"}]})  # fmt: skip
    assert load([spoken], loading(), 0, seed=0).notes == [f"{spoken.path}: `dialog` is read as `conversations`"]


def test_held_out_samples_that_are_trained_on_are_counted(tmp_path):
    """Every line twice, or another file with some of them: a copy is trained on unless both are held out."""
    lines = write_data(tmp_path / "a.jsonl", samples=20, seed=3).read_text().splitlines(keepends=True)
    (tmp_path / "twice.jsonl").write_text("".join(2 * lines))
    (tmp_path / "more.jsonl").write_text("".join(lines[:10]) + '{"input_ids": [1, 2, 3]}\n')
    for names in (["twice.jsonl"], ["a.jsonl", "more.jsonl"]):
        data = load([DatasetSpec(str(tmp_path / name)) for name in names], loading(), 6, 1)
        kept = {source[i].input_ids.tobytes() for source in data.train for i in range(len(source))}
        shared = sum(data.validation[i].input_ids.tobytes() in kept for i in range(6))
        (note,) = data.notes
        assert shared and note.startswith(f"{shared} of the 6 held-out samples are trained on too, word for word")
    assert load([DatasetSpec(str(tmp_path / "a.jsonl"))], loading(), 6, 1).notes == []
