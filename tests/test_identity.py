"""What a resume compares: every key that shapes a run, its model, its data and the adapter that it continues from."""

import os
from pathlib import Path

import pytest
from byte_model import save_byte_model
from tiny_run import MODEL, write_config

from lorawgpu.config.load import load_config
from lorawgpu.config.schema import RESUME_KEYS, TrainConfig
from lorawgpu.files import digest
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import init_adapter, write_adapter
from lorawgpu.train.resume import MUTABLE_ON_RESUME
from lorawgpu.train.setup import prepare
from lorawgpu.weights.loader import open_checkpoint


def chats(folder: Path, text="a") -> list[dict]:
    path = folder / f"chats-{text}.jsonl"
    turns = f'{{"role": "user", "content": "{text}"}}, {{"role": "assistant", "content": "bc"}}'
    path.write_text(f'{{"messages": [{turns}]}}\n' * 8)
    return [{"path": str(path)}]


def adapter(folder: Path, alpha: int) -> str:
    """An adapter of the shapes that the config asks for, with another alpha."""
    lora = LoraConfig(4, alpha, ("q_proj",))
    write_adapter(folder, lora, init_adapter(lora, open_checkpoint(MODEL).config, 0), "base")
    return str(folder)


def other_model(folder: Path) -> str:
    """The model with one bit of one weight flipped, size and times kept."""
    save_byte_model(folder / "other")
    weights = folder / "other" / "model.safetensors"
    before, content = weights.stat(), bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    return str(folder / "other")


# Another value for every key that shapes the run.
SHAPING = {
    "lora_r": 5, "lora_alpha": 5, "lora_target_modules": ["k_proj"], "use_rslora": True, "lora_dropout": 0.5,
    "val_set_size": 2, "sequence_len": 33, "excess_length_strategy": "truncate", "sample_packing": True,
    "micro_batch_size": 1, "gradient_accumulation_steps": 2, "seed": 1, "chat_template": "llama-3",
    "chat_template_jinja": "{{ messages[0].content }}{{ messages[1].content }}", "chat_template_kwargs": {"x": 1},
    "train_on_inputs": True, "roles_to_train": ["user", "assistant"], "load_in_8bit": True, "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4", "base_model": other_model, "datasets": lambda folder: chats(folder, "d"),
    "test_datasets": lambda folder: chats(folder, "d"), "lora_model_dir": lambda folder: adapter(folder / "a", 8),
    "adapter": lambda folder: adapter(folder / "a", 8), "special_tokens": {"eos_token": "<|im_end|>"},
    "overrides_of_model_config": {"hidden_act": "relu2"}, "lora_modules_to_save": ["lm_head"],
    "peft_trainable_token_indices": [5, 6], "tokens": ["<new>"], "added_tokens_overrides": {4: "<other>"},
}  # fmt: skip
# Keys that say where, when and how fast. Nothing about them is compared.
SURROUNDINGS = {
    "dataset_prepared_path", "dataset_num_proc", "device", "max_dispatch_ms", "output_dir", "logging_steps",
    "matrix_cores",
    "eval_steps", "save_steps", "save_total_limit", "early_stopping_patience", "max_bad_steps", "sample_prompts",
    "report_to", "evals_per_epoch", "saves_per_epoch", "exchange_timeout_s", "micro_batches_per_rank", "wandb_entity",
    "wandb_mode", "wandb_name", "wandb_project", "wandb_run_id",
}  # fmt: skip


def test_every_key_of_the_config_is_one_of_the_three_kinds():
    kinds = (set(SHAPING), set(MUTABLE_ON_RESUME), SURROUNDINGS)
    assert set.union(*kinds) == set(TrainConfig.model_fields) and sum(map(len, kinds)) == len(TrainConfig.model_fields)
    assert RESUME_KEYS <= set(SHAPING)


@pytest.fixture(scope="module")
def identity_of(tmp_path_factory):
    """The identity of a run with other values for some keys."""
    folder = tmp_path_factory.mktemp("identity")
    model = str(save_byte_model(folder / "model"))

    def identity(**keys):
        fixed = {"base_model": model, "datasets": chats(folder), "lora_target_modules": ["q_proj"]}
        fixed |= {"sequence_len": 160, "roles_to_train": ["assistant"]}
        return prepare(load_config(write_config(folder, **(fixed | keys)))).identity

    return identity


@pytest.mark.parametrize("key", SHAPING)
def test_each_key_that_shapes_the_run_changes_its_identity(tmp_path, identity_of, key):
    value = SHAPING[key](tmp_path) if callable(SHAPING[key]) else SHAPING[key]
    needed = {
        "bnb_4bit_quant_type": {"load_in_4bit": True},
        "tokens": {"lora_modules_to_save": ["embed_tokens"]},
        "chat_template_kwargs": {"chat_template_jinja": "{{ x }}{% for m in messages %}{{ m.content }}{% endfor %}"},
    }
    with_it = needed.get(key, {})
    assert identity_of(**with_it | {key: value}) != identity_of(**with_it)


@pytest.mark.parametrize("place", ["adapter", "lora_model_dir"])
def test_adapters_of_the_same_shapes_are_told_apart(tmp_path, identity_of, place):
    """By alpha, which scales what they compute, and by their values; not by where they lie."""
    one = identity_of(lora_r=None, lora_alpha=None, **{place: adapter(tmp_path / "one", 8)})
    moved = identity_of(lora_r=None, lora_alpha=None, **{place: adapter(tmp_path / "moved", 8)})
    other = identity_of(lora_r=None, lora_alpha=None, **{place: adapter(tmp_path / "other", 9)})
    new = identity_of()
    assert one == moved
    assert {key for key in one if one[key] != other[key]} == {"lora_alpha"}
    assert {key for key in one if one[key] != new[key]} == {"adapter"}


def test_a_digest_is_remembered_until_the_file_changes(tmp_path, monkeypatch):
    """Also if its size and its modification time stay the same."""
    file, cache = tmp_path / "weights", tmp_path / "cache"
    monkeypatch.setattr(digest, "PIECE", 7)
    file.write_bytes(bytes(range(20)))
    first = digest.remembered_digest(file, cache)
    assert first == digest.whole_digest(file)
    with monkeypatch.context() as patch:
        patch.setattr(digest, "whole_digest", None)  # not called
        assert digest.remembered_digest(file, cache) == first
    for place in range(20):  # every byte counts
        content, before = bytearray(range(20)), file.stat()
        content[place] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert digest.remembered_digest(file, cache) != first
    (cache / digest.MEMORY_FILE).write_text("damaged")
    file.write_bytes(bytes(range(20)))
    assert digest.remembered_digest(file, cache) == first
    assert digest.remembered_digest(file, Path(os.devnull) / "no") == first  # a cache that cannot be written
