"""Exports of an adapter that was trained with a template whose turns end in another token than the base model's eos.

The right value is by hand: a server stops at the token that closes a turn in the template, `<|im_end|>` of ChatML.
"""

import json

import gguf
import pytest
from exports import DENSE as DENSE_CASE
from exports import adapter_of, chat_model, export, gguf_with_tokenizer
from tiny_tokenizer import CONTROL, backend

from lorawgpu.chat.builtin import BUILT_IN, CHATML
from lorawgpu.export import gguf as gguf_adapter
from lorawgpu.export import mlx, peft
from lorawgpu.export.hf_files import write_hf_files
from lorawgpu.export.merged import reopen
from lorawgpu.export.merged import write as write_merged
from lorawgpu.export.source import open_source
from lorawgpu.export.turn_end import name_turn_end, unnamed_turn_end
from lorawgpu.files.gguf import GgufFile
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.tokenizer.hf import Tokenizer
from lorawgpu.weights.loader import open_checkpoint

END = CONTROL.index("<|im_end|>")
EOS = 1
SMALL = LoraConfig(2, 4, ("q_proj",))


def read(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A base model and an adapter of a run."""
    folder = tmp_path_factory.mktemp("turn_end")
    base = chat_model(folder / "base")
    return base, adapter_of(folder / "a", base, SMALL)


def source_of(trained):
    base, adapter = trained
    return open_source(str(adapter), str(base), True)


@pytest.fixture(scope="module")
def merged(trained, tmp_path_factory):
    base, adapter = trained
    out = tmp_path_factory.mktemp("merged") / "m"
    assert export("--adapter", adapter, "--model", base, "--to", "merged", "--out", out) == 0
    return out


def test_a_merged_model_stops_where_a_turn_ends(merged):
    assert read(merged / "config.json")["eos_token_id"] == [END, EOS]
    assert read(merged / "generation_config.json") == {"bos_token_id": 0, "eos_token_id": [END, EOS]}
    assert read(merged / "tokenizer_config.json")["eos_token"] == "<|im_end|>"
    assert Tokenizer.from_hf_folder(merged).eos_id == END
    assert open_checkpoint(merged).config.eos_token_ids == (END, EOS)
    assert read(merged / "sample_transcript.json")["stop_ids"] == [EOS, END]


def test_so_does_a_gguf_that_is_made_of_it(merged):
    """llama.cpp's converter writes the keys that this class finds."""
    assert gguf.SpecialVocab(merged, load_merges=False).special_token_ids["eos"] == END


@pytest.mark.reference
def test_transformers_stops_there(merged):
    transformers = pytest.importorskip("transformers")
    assert transformers.PreTrainedTokenizerFast.from_pretrained(merged).eos_token_id == END
    assert transformers.GenerationConfig.from_pretrained(merged).eos_token_id == [END, EOS]


@pytest.mark.parametrize(("form", "words"), [(peft, "`eos_token_id`"), (mlx, "--extra-eos-token")])
def test_other_exports_say_so(trained, form, words):
    (remark,) = (line for line in form.remarks(source_of(trained)) if "a turn ends" in line)
    assert f"a turn ends with <|im_end|> (id {END})" in remark and words in remark


def test_a_gguf_adapter_names_it(trained, tmp_path):
    source = source_of(trained)
    gguf_adapter.write(tmp_path, source)
    metadata = GgufFile(tmp_path / "adapter.gguf").metadata
    assert metadata["tokenizer.ggml.eot_token_id"] == metadata["tokenizer.ggml.eos_token_id"] == END
    assert any(f"tokenizer.ggml.eot_token_id=int:{END}" in line for line in gguf_adapter.remarks(source))


def test_a_base_in_gguf(tmp_path):
    words = GgufFile(gguf_with_tokenizer(tmp_path / "m.gguf")).metadata["tokenizer.ggml.tokens"]
    end = words.index("<extra_9>")
    changes = {
        "tokenizer.chat_template": CHATML.replace("<|im_end|>", "<extra_9>"),
        "tokenizer.ggml.token_type": [3 if i in (0, 1, 2, end) else 1 for i in range(len(words))],
    }
    base = gguf_with_tokenizer(tmp_path / "n.gguf", None, **changes)
    source = source_of((base, adapter_of(tmp_path / "a", DENSE_CASE, SMALL)))
    write_hf_files(tmp_path, source.checkpoint)
    name_turn_end(tmp_path, source)
    assert read(tmp_path / "generation_config.json")["eos_token_id"] == [end, 2]
    assert read(tmp_path / "config.json")["eos_token_id"] == [end, 2]
    assert Tokenizer.from_hf_folder(tmp_path).eos_id == end


def case(folder, template=CHATML, generation=None, added=None):
    base = chat_model(folder / "base", template)
    if generation:
        (base / "generation_config.json").write_text(json.dumps(generation))
    if added is not None:
        data = json.loads(backend().to_str())
        data["added_tokens"] = [entry | added for entry in data["added_tokens"]]
        (base / "tokenizer.json").write_text(json.dumps(data))
    return source_of((base, adapter_of(folder / "a", base, SMALL)))


def test_what_is_named_already_stays(tmp_path):
    assert unnamed_turn_end(case(tmp_path, generation={"eos_token_id": [EOS, END]})) is None


@pytest.mark.parametrize(
    ("template", "end"),
    [(BUILT_IN["llama-3"], "<|eot_id|>"), (BUILT_IN["gemma"], "<end_of_turn>"), (BUILT_IN["alpaca"], None)],
)
def test_any_template(tmp_path, template, end):
    source = case(tmp_path, template)
    assert unnamed_turn_end(source) == (None if end is None else CONTROL.index(end))


def test_an_end_that_is_no_control_token(tmp_path):
    assert unnamed_turn_end(case(tmp_path, added={"special": False})) == END


def test_the_eos_of_a_template_that_shows_it_stays(tmp_path):
    source = case(tmp_path, CHATML + "{{ eos_token }}")
    (out := tmp_path / "x").mkdir()
    write_merged(out, source)
    assert reopen(out, source).config.eos_token_ids == (END, EOS)
    assert read(out / "tokenizer_config.json")["eos_token"] == "</s>"
    assert read(out / "generation_config.json")["eos_token_id"] == [END, EOS]
