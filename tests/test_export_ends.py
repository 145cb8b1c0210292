"""Exports of adapters that train embedding or head: merged models have their rows, adapter formats refuse them."""

import json

import numpy as np
import pytest
import tokenizers
from byte_model import CONTROL, byte_backend, save_byte_model
from golden_case import GOLDEN
from gradcheck import relative_error

from lorawgpu.cli import main
from lorawgpu.data.batching import Sample, flatten
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.export import gguf_merged, merged, peft
from lorawgpu.export.source import open_source
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import adapter_shapes, write_adapter
from lorawgpu.tokenizer.save import save_tokenizer
from lorawgpu.verify.cases import read_case
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.extended import Extended, extended_for
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint
from lorawgpu.weights.loader import open_checkpoint

CASES = ["tokens_gemma2", "lora_ends", "saved_tied", "tokens_untied"]


def logits_of(device, kernels, checkpoint, ids, adapter=None):
    layout, tensors = (AdapterLayout(adapter[0], checkpoint.config), adapter[1]) if adapter else (None, None)
    engine = Engine(device, load_model(device, checkpoint), Options(32, 32), layout, tensors, kernels=kernels)
    sample = Sample(np.asarray(ids, np.int32), np.asarray(ids, np.int32))
    return engine.logits(flatten([sample], 32), np.arange(len(ids)))


@pytest.mark.parametrize("name", CASES)
def test_a_merged_folder_computes_what_peft_does(tmp_path, device, kernels, name):
    """The logits of the golden case, but for the rounding to the base's bf16."""
    case = read_case(GOLDEN / name)
    source = open_source(str(GOLDEN / name / "adapter_init"), str(GOLDEN / name), True)
    merged.write(tmp_path, source)
    assert "every weight" in merged.check(tmp_path, source)
    again = merged.reopen(tmp_path, source)
    assert again.config.tie_word_embeddings == (name == "tokens_gemma2")
    want = case.expected["logits"][0][case.mask[0]]
    got = logits_of(device, kernels, again, case.samples[0].input_ids)
    base = logits_of(device, kernels, case.checkpoint, case.samples[0].input_ids)
    assert relative_error(got, want) < 0.02 < 0.1 < relative_error(base, want)


@pytest.mark.parametrize("to", ["gguf", "mlx"])
def test_an_adapter_format_says_what_it_cannot_hold(tmp_path, capsys, to):
    argv = ["export", "--adapter", GOLDEN / "tokens_untied" / "adapter_init", "--model", GOLDEN / "tokens_untied"]
    assert main([*map(str, argv), "--to", to, "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "trains 4 rows of embed_tokens and 3 rows of lm_head, which an adapter for" in message
    assert "--merged" in message or "--to merged" in message
    assert not (tmp_path / "out").exists()


def with_merges():
    """The tokenizer of bytes with a few merges, without which no GGUF describes one."""
    backend = byte_backend()
    control = [tokenizers.AddedToken(t, special=True, normalized=False) for t in CONTROL]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 270, "initial_alphabet": alphabet, "special_tokens": control, "show_progress": False}
    backend.train_from_iterator(["hello there, hello thinker"] * 4, tokenizers.trainers.BpeTrainer(**options))
    return backend


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A model with a tokenizer, and an adapter with two tokens beyond its rows: (model, adapter, base)."""
    folder = tmp_path_factory.mktemp("grown")
    model = save_byte_model(folder / "model")
    with_merges().save(str(model / "tokenizer.json"))
    base = open_checkpoint(model)
    rows, tokenizer = base.config.vocab_size, base.tokenizer()
    tokens = [*(f"<spare {i}>" for i in range(rows - tokenizer.vocab_size)), "<think>", "</think>"]
    more = Extended(base, rows + 2, tokenizer.with_added(tokens, {}, rows))
    lora = LoraConfig(4, 8, ("q_proj",), trainable_token_indices={"embed_tokens": (rows, rows + 1, 7)})
    random = np.random.default_rng(0)
    shapes = adapter_shapes(lora, more.config)
    tensors = {n: 0.3 * random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    write_adapter(folder / "adapter", lora, tensors, str(model))
    save_tokenizer(folder / "adapter", more.tokenizer(), 160)
    return model, folder / "adapter", (lora, tensors)


def test_merged_files_have_the_new_tokens_and_their_rows(tmp_path, device, kernels, grown):
    model, adapter, trained = grown
    source, base = open_source(str(adapter), str(model), True), extended_for(open_checkpoint(model), adapter)
    last = base.config.vocab_size - 1
    ids = [5, last, 7, last - 1]
    want = logits_of(device, kernels, base, ids, trained)
    (tmp_path / "folder").mkdir()
    merged.write(tmp_path / "folder", source)
    merged.check(tmp_path / "folder", source)
    folder = merged.reopen(tmp_path / "folder", source)
    gguf_merged.write(tmp_path, source, "f32")
    _, file = gguf_merged.check_file(tmp_path, source, "f32")
    for checkpoint, tolerance in ((folder, 0.02), (file, 1e-4)):
        assert checkpoint.config.vocab_size == last + 1
        assert checkpoint.tokenizer().encode("<think>a</think>")[0] == last - 1
        assert relative_error(logits_of(device, kernels, checkpoint, ids), want) < tolerance


def test_a_merged_gguf_of_a_gguf_has_them_too(tmp_path, device, kernels, grown):
    """The base as a GGUF: its own metadata with more tokens, its embedding with more rows."""
    model, adapter, trained = grown
    plain = LoraConfig(4, 8, ("q_proj",))
    base = open_checkpoint(model)
    idle = {n: np.zeros(s, np.float32) for n, s in adapter_shapes(plain, base.config).items()}
    write_adapter(tmp_path / "idle", plain, idle, str(model))
    gguf_merged.write(tmp_path, open_source(str(tmp_path / "idle"), str(model), True), "f32")
    (tmp_path / "model.gguf").rename(tmp_path / "base.gguf")
    assert isinstance(open_checkpoint(tmp_path / "base.gguf"), GgufCheckpoint)
    source = open_source(str(adapter), str(tmp_path / "base.gguf"), True)
    (tmp_path / "out").mkdir()
    gguf_merged.write(tmp_path / "out", source, None)
    _, file = gguf_merged.check_file(tmp_path / "out", source, None)
    last = file.config.vocab_size - 1
    assert last == base.config.vocab_size + 1 and file.tokenizer().encode("<think>")[0] == last - 1
    want = logits_of(device, kernels, extended_for(base, adapter), [5, last, 7], trained)
    assert relative_error(logits_of(device, kernels, file, [5, last, 7]), want) < 1e-4


def test_a_peft_folder_keeps_rows_and_tokenizer(tmp_path, grown):
    model, adapter, (lora, tensors) = grown
    source = open_source(str(adapter), str(model), True)
    peft.write(tmp_path, source)
    assert list(peft.read(tmp_path, source)) == list(source.effect)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["trainable_token_indices"][-1] == 7
    assert (tmp_path / "tokenizer.json").read_bytes() == (adapter / "tokenizer.json").read_bytes()
