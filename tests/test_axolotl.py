"""Configs in axolotl's words: every key of its published examples has a verdict, and what a run says about them."""

import csv
import json
import re
from pathlib import Path

import pytest
import yaml
from tiny_run import byte_model

from lorawgpu.cli import main
from lorawgpu.config.axolotl import DATA_MISSING, DATA_WITHOUT_EFFECT, HARMLESS, MISSING, WITHOUT_EFFECT
from lorawgpu.config.load import load_config_and_notes
from lorawgpu.config.schema import TrainConfig
from lorawgpu.config.translate import CONVERT
from lorawgpu.config.types import DataSet
from lorawgpu.errors import UserError

KEYS = Path(__file__).parent / "data" / "axolotl_keys.tsv"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(text) loads a config of a model, data and `text`; returns it and its notes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "chats.jsonl").write_text("{}\n")

    def load(text):
        path = tmp_path / "run.yaml"
        path.write_text(f"base_model: model\ndatasets: [{{path: chats.jsonl}}]\n{text}")
        config, notes = load_config_and_notes(path)
        return config, notes.lines(parameters=1 << 20)

    return load


def published():
    with open(KEYS) as file:
        return [row for row in csv.reader(file, delimiter="\t") if not row[0].startswith("#")]


def test_every_key_of_the_published_examples_has_one_verdict():
    verdicts = {"used": {*TrainConfig.model_fields, *CONVERT}, "no effect": {*WITHOUT_EFFECT}, "missing": {*MISSING}}
    for where, key, *_, verdict in published():
        if where == "top":
            assert [name for name, keys in verdicts.items() if key in keys] == [verdict], key
    assert len(published()) > 200


def test_every_key_of_a_published_data_set_has_one_verdict():
    used = {*DataSet.model_fields, "message_field_role", "message_field_content"}
    verdicts = {"used": used, "no effect": {*DATA_WITHOUT_EFFECT}, "missing": {*DATA_MISSING}}
    for where, key, *_, verdict in published():
        if where == "datasets[]":
            assert [name for name, keys in verdicts.items() if key in keys] == [verdict], key


def test_the_tables_do_not_overlap_and_no_key_of_ours_is_in_them():
    ours = {*TrainConfig.model_fields, *CONVERT}
    assert not {*WITHOUT_EFFECT} & {*MISSING} and not ours & {*WITHOUT_EFFECT, *MISSING}
    assert HARMLESS.keys() <= MISSING.keys()


def test_empty_values_are_never_a_problem(write):
    """Neither of our keys nor of axolotl's, whatever the verdict."""
    optional = [key for key in TrainConfig.model_fields if key not in ("base_model", "datasets")]
    config, notes = write("".join(f"{key}:\n" for key in [*optional, *WITHOUT_EFFECT, *MISSING, *CONVERT] if key not in
                                  [k for k in optional if k in CONVERT]))  # fmt: skip
    assert (config, notes) == write("")


def test_false_asks_for_nothing(write):
    config, notes = write("".join(f"{key}: false\n" for key in [*WITHOUT_EFFECT, *MISSING]))
    assert config == write("")[0] and not any("without effect" in note for note in notes)


def test_keys_without_effect_are_one_note(write):
    config, notes = write("bf16: auto\ntf32: false\nflash_attention: true\nlora_r: 8\nstrict: false\n")
    assert notes[0] == "without effect here: bf16, flash_attention"
    assert config == write("lora_r: 8\n")[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "fsdp: [full_shard]\nfsdp_config: {a: 1}\nfsdp_version: 2\n",
            "line 3: fsdp, fsdp_config: missing here: training",
        ),
        ("deepspeed: zero3.json\n", "remove it to train on one GPU"),
        ("rl: dpo\n", "only supervised fine-tuning is here"),
        ("qat: {a: b}\n", "this quantization; set load_in_4bit"),
        ("processor_type: AutoProcessor\n", "images and sound"),
        ("unfrozen_parameters: [lm_head]\n", "training these weights of the model"),
        ("resume_from_checkpoint: out/checkpoint-3\n", "lorawgpu train CONFIG --resume"),
        ("optimizer: muon\n", "line 3: optimizer: got 'muon'; missing here: other optimizers than AdamW"),
        ("optimizer: [a]\n", "optimizer: got ['a']"),
        ("plugins: [axolotl.integrations.kd.KDPlugin]\n", "plugins: missing here: axolotl.integrations.kd.KDPlugin"),
        ("tensor_parallel_size: 2\n", "tensor_parallel_size: missing here"),
        ("eval_strategy: sometimes\n", "eval_strategy: got 'sometimes'; wanted no, epoch, steps or best"),
        ("peft_use_rslora: 3\n", "line 3: use_rslora: got 3; wanted true or false"),
        ("peft_use_rslora: true\nuse_rslora: false\n", "line 3: peft_use_rslora: use_rslora says otherwise"),
        ("shuffle_merged_datasets: false\n", "data in its own order"),
        ("bnb_config_kwargs: 3\n", "bnb_config_kwargs: got 3; wanted options"),
    ],
)
def test_what_is_missing_is_refused_with_what_to_do(write, text, words):
    with pytest.raises(UserError) as error:
        write(text)
    assert words in str(error.value) and "problems" not in str(error.value)


def test_values_that_ask_for_nothing_more(write):
    text = "tensor_parallel_size: 1\npeft_init_lora_weights: true\ntokenizer_config: model\nrelora: false\n"
    assert write(text)[0] == write("")[0]


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("optimizer: adamw_torch_fused\n", ""),
        ("lora_target_linear: true\nlora_target_modules:\n", "lora_target_modules: all-linear\n"),
        ("lora_target_linear: false\nlora_target_modules: [q_proj]\n", "lora_target_modules: [q_proj]\n"),
        ("gradient_checkpointing: offload\n", "gradient_checkpointing: true\n"),
        ("gradient_checkpointing: 'true'\n", "gradient_checkpointing: true\n"),
        ("attn_implementation: flash_attention_2\n", ""),
        ("eval_strategy: epoch\nval_set_size: 2\n", "evals_per_epoch: 1\nval_set_size: 2\n"),
        ("eval_strategy: 'no'\neval_steps: 5\nval_set_size: 2\n", "val_set_size: 2\n"),
        ("eval_strategy: no\nevals_per_epoch: 5\nval_set_size: 2\n", "val_set_size: 2\n"),
        ("evaluation_strategy: steps\neval_steps: 0.2\nval_set_size: 2\n", "eval_steps: 0.2\nval_set_size: 2\n"),
        ("evals_per_epoch: 4\nval_set_size: 0.0\n", ""),
        ("evals_per_epoch: 0\nval_set_size: 0.1\n", "val_set_size: 0.1\n"),
        ("save_strategy: epoch\n", "saves_per_epoch: 1\n"),
        ("saves_per_epoch: 0\nmax_steps: -1\n", ""),
        ("wandb_project: p\nwandb_name: n\n", "wandb_project: p\nwandb_name: n\nreport_to: wandb\n"),
        ("wandb_project: p\nuse_wandb: false\n", "wandb_project: p\nreport_to: []\n"),
        ("wandb_project: ''\nuse_tensorboard: true\n", "report_to: tensorboard\n"),
        ("report_to: none\n", ""),
        ("peft_use_rslora: true\nadam_eps: 1e-6\ndataset_processes: 2\n",
         "use_rslora: true\nadam_epsilon: 1e-6\ndataset_num_proc: 2\n"),
        ("special_tokens: {pad_token: '<pad>', eos_token: e, bos_token: }\n", "special_tokens: {eos_token: e}\n"),
        ("bnb_config_kwargs: {bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: true}\nload_in_4bit: true\n",
         "bnb_4bit_quant_type: nf4\nload_in_4bit: true\n"),
        ("chat_template: llama3\n", "chat_template: llama-3\n"),
        ("chat_template: tokenizer_default\n", ""),
        ("chat_template: jinja\nchat_template_jinja: '{{ a }}'\n", "chat_template_jinja: '{{ a }}'\n"),
        ("chat_template: tokenizer_default_fallback_llama3\n", "chat_template: tokenizer_default_fallback_llama-3\n"),
        ("chat_template: qwen_25\n", "chat_template: tokenizer_default_fallback_chatml\n"),
        ("chat_template: phi_4\n", ""),
        ("plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rope: true\n", ""),
    ],
)  # fmt: skip
def test_axolotls_words_give_the_same_config_as_ours(write, text, ours):
    assert write(text)[0] == write(ours)[0]


def test_notes_say_what_a_value_became(write):
    text = "adapter: lora\noptimizer: adamw_bnb_8bit\ngradient_checkpointing: unsloth\nload_in_4bit: true\n"
    _, notes = write(f"{text}lora_mlp_kernel: true\nsaves_per_epoch: 1\nwarmup_steps: 5\nlr_scheduler: rex\n")
    assert notes == [
        "without effect here: lora_mlp_kernel",
        "gradient_checkpointing unsloth: true, nothing is moved off the GPU",
        "our defaults hold: load_in_4bit makes Q4_0, with a smaller error (axolotl: `bnb_4bit_quant_type: nf4`); "
        "rex as published (axolotl: `lr_scheduler_kwargs: {rex_beta: 0.9}`)",
        "optimizer adamw_bnb_8bit: AdamW with float32 state, 8.0 MiB",  # two numbers of 4 bytes for 2**20 parameters
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bf16: true\n", True),
        ("bf16: true\nlora_r:\nadapter:\nlora_o_kernel: false\n", True),
        ("full_finetune: true\nlora_r: 8\n", True),
        ("bf16: true\nlora_alpha: 8\n", False),
        ("bf16: true\nadapter: lora\n", False),
        ("seed: 1\n", False),  # no key that only axolotl has
    ],
)
def test_full_fine_tuning_becomes_lora_with_a_note(write, text, said):
    assert any("full fine-tuning; a LoRA adapter is trained instead" in note for note in write(text)[1]) == said


LORA_1B = """
load_in_8bit: false
load_in_4bit: false
strict: false
val_set_size: 0.1
dataset_prepared_path: last_run_prepared
adapter: lora
lora_model_dir:
sequence_len: 256
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true
lora_r: 4
lora_alpha: 8
lora_dropout: 0.05
lora_fan_in_fan_out:
lora_target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj]
wandb_project:
wandb_entity:
wandb_watch:
wandb_name:
wandb_log_model:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
group_by_length: false
bf16: auto
fp16:
tf32: false
gradient_checkpointing: true
early_stopping_patience:
resume_from_checkpoint:
local_rank:
logging_steps: 1
xformers_attention:
flash_attention: true
loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3
warmup_steps: 1
evals_per_epoch: 4
saves_per_epoch: 1
debug:
deepspeed:
weight_decay: 0.0
fsdp:
fsdp_config:
special_tokens: {pad_token: "<|end_of_text|>"}
"""


@pytest.mark.parametrize(
    ("more", "stores"),
    [("", "dense"), ("\nadapter: qlora\nload_in_4bit: true\nload_in_8bit: false\n", "Q4_0")],
    ids=["lora-1b", "qlora"],
)
def test_a_config_as_axolotl_publishes_them_plans_with_one_note(tmp_path, monkeypatch, capsys, more, stores):
    """The keys of its examples/llama-3/lora-1b.yml over data of ours; the model has no chat template."""
    monkeypatch.chdir(tmp_path)
    byte_model(tmp_path / "model")
    config = tmp_path / "model" / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "a"}))
    records = [{"instruction": f"Count to {i}.", "input": "", "output": "1 2 3"} for i in range(40)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    keys = yaml.safe_load(LORA_1B) | (yaml.safe_load(more) or {})
    keys |= {"base_model": "model", "datasets": [{"path": "d.jsonl", "type": "alpaca"}], "output_dir": "outputs/lora"}
    (tmp_path / "lora-1b.yml").write_text(yaml.safe_dump(keys))
    assert main(["train", "lora-1b.yml", "--dry-run", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count("\nnote ") == 1 and stores in out
    note = out[out.index("\nnote ") :]
    for words in (
        "without effect here: ", "bf16", "flash_attention", "loss_watchdog_threshold", "pad_token", "adamw_8bit",
        "Stanford's prompt",
    ):  # fmt: skip
        assert words in note


def test_keys_are_a_table_for_people(capsys):
    assert main(["train", "--keys", "warmup"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^warmup_steps +0 +Steps over which", out, re.MULTILINE) and "micro_batch_size" not in out
    assert main(["train", "--keys"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^{key}\b", out, re.MULTILINE) for key in TrainConfig.model_fields)
    assert "datasets.field_messages" in out and max(map(len, out.splitlines())) <= 120
    assert main(["train", "--keys", "deepspeed"]) == 0
    assert "deepspeed (axolotl)  missing  training across GPUs" in capsys.readouterr().out
    assert main(["train", "--keys", "nosuchword"]) == 2
    assert "no key has this word" in capsys.readouterr().err
