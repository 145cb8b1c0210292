"""The data set made from the standard library: parsed and not imported, split by module, the same each time."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from tiny_tokenizer import tiny_tokenizer

from lorawgpu.chat.template import resolve_template
from lorawgpu.data.dataset import DatasetSpec, LoadSettings, tokenize
from lorawgpu.data.encode import EncodeSettings

SCRIPT = Path(__file__).parent.parent / "scripts" / "make_docstring_data.py"


def make(out):
    spec = importlib.util.spec_from_file_location("make_docstring_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_docstring_data", "--out", str(out)])
        module.main()
    return out


def read(folder):
    return {part: (folder / f"{part}.jsonl").read_bytes() for part in ("train", "heldout")}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("docstrings"))


def test_docstring_data(made, tmp_path):
    first = read(made)
    assert read(make(tmp_path)) == first
    assert "antigravity" not in sys.modules  # importing it opens a browser
    parts = {part: [json.loads(line)["messages"] for line in data.splitlines()] for part, data in first.items()}
    modules = {part: {m[0]["content"].split("\n")[1].removeprefix("class ").split(".")[0] for m in chats}
               for part, chats in parts.items()}  # fmt: skip
    assert not modules["train"] & modules["heldout"]
    assert len(parts["train"]) > 1000 and 0.05 < len(parts["heldout"]) / len(parts["train"]) < 0.4
    answers = [m[1]["content"] for chats in parts.values() for m in chats]
    assert len(set(answers)) == len(answers)
    dedent = [m for m in parts["train"] + parts["heldout"] if "\ntextwrap.dedent(text)" in m[0]["content"]]
    assert dedent[0][1] == {
        "role": "assistant",
        "content": "Remove any common leading whitespace from every line in `text`.",
    }


def test_docstring_data_is_data_that_trains(made):
    tokenizer = tiny_tokenizer()
    template = resolve_template("chatml", None, None, tokenizer.special_tokens)
    settings = EncodeSettings(10_000, "raise", False, ("assistant",))
    store = tokenize(DatasetSpec(str(made / "heldout.jsonl")), LoadSettings(settings, tokenizer, template, workers=1))
    assert store.counts.samples > 50 and store.counts.missing_eos == 0
