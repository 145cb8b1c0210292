"""New tokens: their ids, the rows that the model gets for them, and a run with them from its data to its answers."""

import json

import numpy as np
import pytest
from byte_model import byte_tokenizer, save_byte_model
from tiny_run import Runs, write_config

from lorawgpu.api.model import load
from lorawgpu.config.load import load_config
from lorawgpu.errors import UserError
from lorawgpu.train.setup import prepare
from lorawgpu.weights.extended import Extended, extended_for, new_rows
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.tensors import Dense, narrow

NEW = ["<think>", "</think>"]


def test_new_tokens_get_the_next_ids_and_are_matched_whole():
    tokenizer = byte_tokenizer()
    more = tokenizer.with_added([*NEW, "</s>"], {})
    assert [more.token_id(token) for token in NEW] == [261, 262] and more.token_id("</s>") == tokenizer.token_id("</s>")
    assert more.encode("a<think>b") == [*tokenizer.encode("a"), 261, *tokenizer.encode("b")]
    assert more.decode([261]) == "<think>" and tokenizer.token_id("<think>") is None
    assert more.digest != tokenizer.digest


def test_an_added_token_is_spelled_in_another_way():
    tokenizer = byte_tokenizer(eos_token="<|eot_id|>")
    other = tokenizer.with_added([], {4: "<|stop|>"})
    assert other.token(4) == "<|stop|>" and other.encode("a<|stop|>")[-1] == 4 and other.token_id("<|eot_id|>") is None
    assert other.eos_id == 4 and other.special_tokens["eos_token"] == "<|stop|>"
    assert other.vocab_size == tokenizer.vocab_size


@pytest.mark.parametrize(
    ("overrides", "words"),
    [({200: "x"}, "200 is not the id of an added token"), ({4: "</s>"}, "'</s>' is token 1 of bytes already")],
)
def test_spellings_that_cannot_be(overrides, words):
    with pytest.raises(UserError, match=words):
        byte_tokenizer().with_added([], overrides)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_new_rows_are_around_the_mean(dtype):
    """With transformers' spread: 1e-9 of the covariance, so differences of 3e-5 deviations, which 16 bits round off."""
    values = np.random.default_rng(0).normal(2, 1, (512, 48)).astype(np.float32)
    stored = narrow(values, dtype)
    rows = Dense(new_rows(stored, 300), dtype).float32()
    mean = stored.float32().astype(np.float64).mean(0)
    assert rows.shape == (300, 48) and np.abs(rows - mean).max() < {"f32": 3e-4, "f16": 2e-3, "bf16": 1e-2}[dtype]
    if dtype == "f32":
        spread = np.cov((rows - mean).T) / 1e-9
        np.testing.assert_allclose(np.diag(spread).mean(), np.cov(values.T).trace() / 48, rtol=0.1)
        np.testing.assert_array_equal(new_rows(stored, 2), rows[:2])  # a row does not depend on how many there are


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_byte_model(tmp_path_factory.mktemp("tokens") / "model")


def config(folder, model, **keys):
    path = folder / "chats.jsonl"
    folder.mkdir(exist_ok=True)
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "<think>c</think>d"}]
    path.write_text((json.dumps({"messages": turns}) + "\n") * 8)
    keys = {"datasets": [{"path": str(path)}], "tokens": NEW, "sequence_len": 160, "max_steps": 4} | keys
    return write_config(folder, base_model=str(model), **keys)


def beyond(model) -> list[str]:
    """Tokens that fill the spare rows of the model, and the new ones after them."""
    spare = open_checkpoint(model).config.vocab_size - 261
    return [*(f"<spare {i}>" for i in range(spare)), *NEW]


def test_spare_rows_are_used_as_they_are(tmp_path, model):
    run = prepare(load_config(config(tmp_path, model, peft_trainable_token_indices=[261, 262])))
    base = open_checkpoint(model)
    assert run.checkpoint.config.vocab_size == base.config.vocab_size
    (rows,) = [value for name, value in run.start.items() if "token_adapter" in name]
    np.testing.assert_array_equal(rows, base.rows("embed_tokens")[[261, 262]])
    assert {261, 262} <= set(run.data.train[0][0].input_ids.tolist())


@pytest.mark.parametrize("keys", [{}, {"peft_trainable_token_indices": [261]}, {"lora_modules_to_save": ["lm_head"]}])
def test_new_tokens_that_nothing_trains_are_refused(tmp_path, model, keys):
    with pytest.raises(
        UserError, match=r"is new, with id 26., and nothing trains .*indices: \[261, 262\], or lora_mod"
    ):
        prepare(load_config(config(tmp_path, model, **keys)))


WHOLE = {"lora_modules_to_save": ["embed_tokens", "lm_head"]}


@pytest.mark.parametrize("keys", ["rows", WHOLE], ids=["rows", "whole"])
def test_a_table_grows_and_the_adapter_brings_what_it_needs(tmp_path, device, kernels, model, keys):
    """Trained, resumed, loaded: the same logits, the tokenizer that the adapter was trained with, and its answers."""
    base, tokens = open_checkpoint(model), beyond(model)
    ids = list(range(261, base.config.vocab_size + 2))
    keys = {"peft_trainable_token_indices": ids} if keys == "rows" else keys
    runs = Runs(device, kernels)
    trainer = runs.trainer(config(tmp_path, model, tokens=tokens, save_steps=2, **keys))
    assert trainer.train() == 0
    folder, last = tmp_path / "out", base.config.vocab_size + 1
    for adapter in (folder, folder / "checkpoint-4"):
        llm = load(model, adapter, device)
        assert llm.encode("<think></think>", raw=True) == [last - 1, last] and llm.config.vocab_size == last + 1
    ours = trainer.engine.logits(batch_of([5, last, 7, last - 1]), np.arange(4))
    np.testing.assert_allclose(llm.logits([5, last, 7, last - 1]), ours, rtol=1e-4, atol=1e-4)
    assert np.isfinite(llm.loss([{"prompt": "a", "completion": "<think>"}]))
    assert isinstance(llm.generate("a<think>", max_new_tokens=3), str)
    assert isinstance(llm.generate("a<think>", max_new_tokens=3, use_adapter=False), str)


def batch_of(ids):
    from lorawgpu.data.batching import Sample, flatten

    return flatten([Sample(np.array(ids, np.int32), np.full(len(ids), -100, np.int32))], 16)


def test_an_adapter_of_another_model_does_not_grow_this_one(tmp_path, model):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"trainable_token_indices": [10**8]}))
    (tmp_path / "adapter_model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="has 100,000,001 rows of the embedding, this base model"):
        extended_for(open_checkpoint(model), tmp_path)


def test_a_matrix_in_blocks_becomes_float32(model):
    from golden_case import GOLDEN

    base = open_checkpoint(GOLDEN / "llama_q8_0" / "model.gguf")
    more = Extended(base, base.config.vocab_size + 3, None)
    assert (base.store(base.embedding_name), more.store(base.embedding_name)) == ("q8_0", "f32")
    np.testing.assert_array_equal(more.rows("embed_tokens")[:-3], base.rows("embed_tokens"))
