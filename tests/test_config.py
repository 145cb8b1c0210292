"""The config file: how it is read, and that every mistake gives one message with key, line and remedy."""

import json
import os

import pytest
import yaml

from lorawgpu.cli import main_of
from lorawgpu.config.load import load_config, load_config_and_notes
from lorawgpu.config.schema import RESUME_KEYS, TrainConfig, json_schema
from lorawgpu.errors import UserError


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(text, *overrides) loads a config with `text` after the two required keys."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "chats.jsonl").write_text("{}\n")

    def load(text="", *overrides, head="base_model: model\ndatasets: [{path: chats.jsonl}]\n"):
        path = tmp_path / "run.yaml"
        path.write_text(head + text)
        return load_config(path, overrides)

    return load


def test_defaults_and_paths(write, tmp_path):
    config = write()
    assert config.base_model == str(tmp_path / "model") and config.datasets[0].path == str(tmp_path / "chats.jsonl")
    assert config.output_dir == str(tmp_path / "out")
    assert (config.lora_r, config.lora_target_modules, config.lr_scheduler, config.device) == (
        16, "all-linear", "cosine", None)  # fmt: skip


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "0.0001", "1.0e-4", ".1e-3", "'1e-4'", "+1e-4"])
def test_a_number_in_any_spelling_is_a_float(write, text):
    assert write(f"learning_rate: {text}\n").learning_rate == 1e-4


def test_whole_numbers_are_accepted_for_floats_and_indices_for_device(write):
    config = write("num_epochs: 3\nmax_grad_norm: 0\ndevice: 0\n")
    assert config.num_epochs == 3.0 and config.max_grad_norm == 0.0 and config.device == "0"


@pytest.mark.parametrize(("text", "value"), [("0.1", 0.1), ("1e-1", 0.1), ("20", 20), ("20.0", 20), ("0", 0)])
def test_val_set_size_is_a_count_or_a_fraction(write, text, value):
    got = write(f"val_set_size: {text}\n").val_set_size
    assert got == value and type(got) is type(value)


def test_a_single_name_stands_for_a_list_of_one(write):
    config = write("report_to: wandb\nsample_prompts: Who are you?\nroles_to_train: user\n")
    assert config.report_to == ["wandb"]
    assert config.sample_prompts == ["Who are you?"] and config.roles_to_train == ["user"]


def test_overrides(write, tmp_path):
    (tmp_path / "more.jsonl").touch()
    config = write(
        "lora_r: 4\n", "lora_r=8", "learning_rate=1e-3", "datasets.0.weight=2", "datasets.1.path=more.jsonl",
        "lora_target_modules=[q_proj, v_proj]", "test_datasets.0.path=chats.jsonl", "device=cpu", "max_steps=",
        "test_datasets.1.path=*.jsonl", "chat_template_jinja={{ messages }}", "lora_alpha=",
    )  # fmt: skip
    assert config.lora_alpha == TrainConfig.model_fields["lora_alpha"].default, "an empty value is the default"
    assert config.lora_r == 8 and config.learning_rate == 1e-3 and config.device == "cpu" and config.max_steps is None
    assert [(os.path.basename(d.path), d.weight) for d in config.datasets] == [("chats.jsonl", 2), ("more.jsonl", 1)]
    assert config.lora_target_modules == ["q_proj", "v_proj"] and len(config.test_datasets) == 2
    assert config.test_datasets[1].path.endswith("*.jsonl") and config.chat_template_jinja == "{{ messages }}"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lora_r", "wanted key=value"),
        ("=3", "wanted key=value"),
        ("lora_r.x=3", "lora_r is 4, which has no entry 'x'"),
        ("datasets.5.path=a", "datasets has no entry 5: it has 1, counted from 0; use 1 to add one"),
        ("test_datasets.1.path=a", "test_datasets has no entry 1: it is empty"),
        ("foo.bar=3", "--set: foo: unknown key"),
        ("Lora_R=3", "--set: Lora_R: unknown key; the nearest one is 'lora_r'"),
        ("datasets.path=a", "datasets is a list; wanted a number"),
        ("lora_target_modules=[q_proj", "got '[q_proj'; wanted a list of module names"),
        ("learning_rate=*", "--set: learning_rate: got '*'; input should be a valid number"),
        ("0=1", "the config has keys, not an entry 0"),
        ("lora_r=-1", "--set: lora_r: got -1; input should be greater than or equal to 1"),
        ("lora_rank=1", "--set: lora_rank: unknown key; here it is lora_r"),
    ],
)
def test_bad_overrides(write, override, words):
    with pytest.raises(UserError) as error:
        write("lora_r: 4\n", override)
    assert words in str(error.value)


def test_dump_reads_back_equal(write, tmp_path, monkeypatch):
    text = "learning_rate: 1e-5\nval_set_size: 7\nlora_target_modules: [q_proj]\nchat_template_jinja: |\n  {{ x }}\n"
    config = write(text)
    dump = tmp_path / "elsewhere" / "config.yaml"
    dump.parent.mkdir()
    dump.write_text(config.dump_yaml())
    monkeypatch.chdir("/")  # absolute paths: the resolved config works from anywhere
    assert load_config(dump) == config
    assert yaml.safe_load(dump.read_text()).keys() == TrainConfig.model_fields.keys()


def test_dump_omits_what_the_adapter_determines(write, tmp_path):
    (tmp_path / "start").mkdir()
    dumped = yaml.safe_load(write("adapter: start\nlora_r: 4\n").dump_yaml())
    assert dumped["lora_r"] == 4 and "lora_alpha" not in dumped and dumped["adapter"] == str(tmp_path / "start")


def test_an_alpha_that_other_tools_would_derive_is_told(tmp_path):
    """LLaMA-Factory's is twice the rank, which at r = 16 is ours too."""
    told = {}
    for text in ("lora_r: 8", "lora_r: 16", "lora_r: 8\nlora_alpha: 32", "seed: 1"):
        (tmp_path / "c.yaml").write_text(f"base_model: a/b\ndatasets: [{{path: a/b}}]\n{text}\n")
        told[text] = load_config_and_notes(tmp_path / "c.yaml")[1].texts
    (note,) = told.pop("lora_r: 8")
    assert note == "lora_alpha is not set: 32, our default (LLaMA-Factory: twice the rank, 16; Unsloth: 16; PEFT: 8)"
    assert set(told.values()) == {()}


def test_adapter_is_a_method_or_a_folder(write, tmp_path):
    """As in axolotl's configs, where lora_model_dir is the folder; `adapter` may also name one."""
    (tmp_path / "start").mkdir()
    assert write("adapter: lora\n").start_from is None
    for text in ("adapter: start\n", "lora_model_dir: start\n", "adapter: lora\nlora_model_dir: start\n"):
        assert write(text).start_from == str(tmp_path / "start")
    quantized = {
        "adapter: qlora\nload_in_4bit: true\n": ("q4_0", "load_in_4bit"),
        "adapter: qlora\nload_in_4bit: true\nbnb_4bit_quant_type: nf4\n": ("nf4", "load_in_4bit"),
        "load_in_8bit: true\n": ("q8_0", "load_in_8bit"),
        "load_in_8bit: false\n": None,
    }
    assert {text: write(text).quantize_to for text in quantized} == quantized


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lerning_rate: 1\n", "line 3: lerning_rate: unknown key; the nearest one is 'learning_rate'"),
        ("lr: 1\n", "line 3: lr: unknown key; here it is learning_rate"),
        ("flavor: 3\n", "line 3: flavor: unknown key; `lorawgpu train --keys` lists all"),
        ("max_seq_length: 1\n", "line 3: max_seq_length: unknown key; here it is sequence_len"),
        ("lora_rank: 8\nlora_target: all\n", "line 3: 2 keys of other tools: write instead: lora_rank -> lora_r a"),
        ("lora_rank: 8\n", "line 3: lora_rank: unknown key; here it is lora_r and lora_alpha: 16"),
        ("stage: sft\ndo_train: true\n", "line 3: 2 keys of other tools: not needed here, remove stage, do_train"),
        ("lora_r: -4\n", "line 3: lora_r: got -4; input should be greater than or equal to 1"),
        ("lora_r: 0\n", "lora_r: got 0"),
        ("lora_r: '8'\n", "lora_r: got '8'; input should be a valid integer"),
        ("lora_alpha: 2147483647\n", "lora_alpha: got 2147483647; input should be less than or equal to 1073741824"),
        ("lora_r: 8.5\n", "lora_r: got 8.5"),
        ("lora_r: true\n", "lora_r: got true; input should be a valid integer"),
        ("learning_rate: 1e-4x\n", "learning_rate: got '1e-4x'; input should be a valid number"),
        ("learning_rate: .nan\n", "learning_rate: got nan; input should be a finite number"),
        ("learning_rate: -1e-4\n", "learning_rate: got '-1e-4'; input should be greater than 0"),
        ("learning_rate: true\n", "learning_rate: got true"),
        ("lora_dropout: 1.0\n", "lora_dropout: got 1.0; input should be less than 1"),
        ("lora_dropout: -0.1\n", "lora_dropout: got -0.1"),
        ("lora_target_modules: q_proj\n", "got 'q_proj'; wanted a list of module names, or all-linear"),
        ("lora_target_modules: q_proj, v_proj\n", "wanted a list of module names, or all-linear"),
        ("lora_target_modules: .*(q_proj\n", "'.*(q_proj' is not a valid regular expression: missing )"),
        ("lora_target_modules: (?i).*Q_PROJ\n", "is not a valid regular expression: global flags"),
        ("lora_target_modules: []\n", "wanted a list of module names, or all-linear"),
        ("lora_target_modules: [q_proj, [v_proj]]\n", "wanted a list of module names, or all-linear"),
        ("lora_target_modules: [w_proj]\n", "unknown module 'w_proj'"),
        ("lr_scheduler: cosin\n", "got 'cosin'; input should be 'constant', 'constant_with_warmup', 'linear',"),
        ("cosine_min_lr_ratio: 1.5\n", "cosine_min_lr_ratio: got 1.5"),
        ("lr_scheduler: linear\ncosine_min_lr_ratio: 0.1\n", "is for lr_scheduler cosine and rex, not linear"),
        ("cosine_constant_lr_ratio: 0.5\n", "line 3: cosine_constant_lr_ratio needs cosine_min_lr_ratio"),
        ("lr_scheduler: warmup_stable_decay\n", "wanted lr_scheduler_kwargs: {num_decay_steps: ...}"),
        ("lr_scheduler_kwargs: {num_cycle: 2}\n", "no option 'num_cycle' in lr_scheduler_kwargs; the nearest one is"),
        ("lr_scheduler_kwargs: {num_cycles: -2}\n", "lr_scheduler_kwargs.num_cycles: got -2; Input should be greater"),
        ("lr_scheduler: polynomial\nlr_scheduler_kwargs: {lr_end: 1}\n", "lr_end 1 is above learning_rate 0.0002"),
        ("eval_steps: 1.5\n", "wanted a whole number of steps, or a fraction of all steps below 1"),
        ("save_steps: 0\n", "save_steps: got 0"),
        ("val_set_size: 3\neval_steps: 5\nevals_per_epoch: 2\n", "eval_steps and evals_per_epoch are both set"),
        ("special_tokens: {eos: a}\n", "special_tokens.eos: unknown key; the nearest one is 'eos_token'"),
        ("special_tokens: [a]\n", "special_tokens: got ['a']"),
        ("chat_template: vicuna\n", "chat_template: got 'vicuna'; input should be 'chatml'"),
        ("excess_length_strategy: cut\n", "input should be 'truncate', 'drop' or 'raise'"),
        ("val_set_size: 1.5\n", "wanted a whole number of samples, or a fraction below 1"),
        ("val_set_size: -1\n", "val_set_size: got -1"),
        ("use_rslora: 1\n", "use_rslora: got 1; wanted true or false"),
        ("use_rslora: 'yes'\n", "use_rslora: got 'yes'; wanted true or false"),
        ("LEARNING_RATE: 1\n", "unknown key; the nearest one is 'learning_rate'"),
        ("roles_to_train: []\n", "roles_to_train: got []; wanted at least one"),
        ("seed: 4294967296\n", "seed: got 4294967296"),
        ("sequence_len: 1\n", "sequence_len: got 1"),
        ("report_to: [mlflow]\n", "report_to.0: got 'mlflow'"),
        ("seed: 1\nseed: 2\n", "line 4: seed: set twice, here and on line 3"),
        ("adapter: nowhere\n", "line 3: adapter: 'nowhere' does not exist in "),
        ("chat_template_jinja: no.jinja\n", "chat_template_jinja: 'no.jinja' does not exist"),
        ("output_dir: chats.jsonl\n", "is a file; wanted a folder"),
        ("test_datasets: [{path: gone.jsonl}]\n", "line 3: test_datasets.0.path: 'gone.jsonl' does not exist"),
        ("test_datasets: [{path: no/*.jsonl}]\n", "'no/*.jsonl' does not exist"),
        ("test_datasets: [{path: chats.jsonl, pth: a}]\n", "test_datasets.0.pth: unknown key; the nearest"),
        ("test_datasets: [{path: chats.jsonl, weight: 0}]\n", "test_datasets.0.weight: got 0"),
        ("test_datasets: [{path: chats.jsonl, weight: 1e9}]\n", "input should be less than or equal to 1000"),
        ("test_datasets: [{path: chats.jsonl, weight: 1e-9}]\n", "should be greater than or equal to 0.001"),
        ("test_datasets: [{path: chats.jsonl, type: chatt}]\n", "data set type `chatt`"),
        ("roles_to_train: [asistant]\n", "roles_to_train.0: got 'asistant'; input should be 'system'"),
        ("test_datasets: [chats.jsonl]\n", "test_datasets.0: got 'chats.jsonl'; wanted `- path: chats.jsonl`"),
        ("test_datasets: chats.jsonl\n", "test_datasets: got 'chats.jsonl'; wanted a list, such as `- path: chats"),
        ("warmup_steps: 3\nwarmup_ratio: 0.1\n", "line 4: warmup_steps and warmup_ratio are both set"),
        ("warmup_steps: 30\nmax_steps: 10\n", "warmup_steps 30 is more than max_steps 10"),
        ("val_set_size: 3\ntest_datasets: [{path: chats.jsonl}]\n", "val_set_size and test_datasets are both set"),
        ("chat_template: chatml\nchat_template_jinja: '{{ a }}'\n", "chat_template and chat_template_jinja are both"),
        ("eval_steps: 5\n", "eval_steps has nothing to evaluate"),
        ("load_in_4bit: true\nload_in_8bit: true\n", "line 4: load_in_4bit and load_in_8bit are both set"),
        ("bnb_4bit_quant_type: nf4\n", "line 3: bnb_4bit_quant_type is for load_in_4bit"),
        ("load_in_4bit: true\nbnb_4bit_quant_type: fp4\n", "bnb_4bit_quant_type: got 'fp4'; input should be 'nf4'"),
        ("adapter: qlora\n", "line 3: adapter: qlora needs load_in_4bit: true"),
        ("adapter: .\nlora_model_dir: .\n", "line 4: adapter and lora_model_dir are both folders"),
        ("lora_model_dir: gone\n", "line 3: lora_model_dir: 'gone' does not exist"),
        ("early_stopping_patience: 5\n", "line 3: early_stopping_patience needs held-out data: set val_set_size or"),
        ("1: 2\n", "line 3: 1: unknown key; YAML reads it as int"),
        ("on: 2\n", "line 3: on: unknown key; YAML reads it as bool"),
        ("<<: {on: 1, seed: 7}\n", "on: unknown key; YAML reads it as bool"),
        ("<<: [{seed: 7}, {1.5: 3}]\n", "1.5: unknown key; YAML reads it as float"),
        ("test_datasets: [{path: chats.jsonl, on: 3}]\n", "test_datasets.0: the key true is not a string"),
        ("=: 2\n", "=: unknown key"),
        ("~: 2\n", "~: unknown key; YAML reads it as null"),
        ("1.5: 2\n", "1.5: unknown key; YAML reads it as float"),
        ("2020-01-01: 2\n", "2020-01-01: unknown key; YAML reads it as timestamp"),
    ],
)
def test_bad_values(write, text, words):
    with pytest.raises(UserError) as error:
        write(text)
    assert words in str(error.value) and "run.yaml" in str(error.value)
    assert "problems" not in str(error.value), "one mistake must not be reported as several"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "contains nothing; wanted `key: value` lines"),
        ("- a\n", "contains a list"),
        ("5\n", "contains an int; wanted `key: value` lines"),
        ("a: [1\nb: 2\n", "run.yaml, line 1, column 4: not valid YAML: what begins here does not end"),
        ("a: !!python/object/apply:os.system [ls]\n", "not valid YAML: could not determine a constructor"),
        ("a: 2024-99-99\n", "not valid YAML"),
        ('a: !!bool "maybe"\n', "not valid YAML: a value does not fit its tag"),
        ("a: !!timestamp x\n", "not valid YAML: a value does not fit its tag"),
        ("a: !!int ''\n", "not valid YAML"),
        ("a: !!float x\n", "not valid YAML"),
        ("a: !!set [1]\n", "not valid YAML"),
        ("a: !!binary é\n", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("seed: 1\n", "2 problems\n  base_model: missing"),
        ("base_model: model\ndatasets: []\n", "datasets: got []; wanted at least one"),
        ("a: 1\n---\nb: 2\n", "run.yaml, line 2, column 1: a second YAML document starts here"),
        ("base_model: ''\ndatasets: [{path: chats.jsonl}]\n", "base_model: got ''"),
        ("base_model: gone.gguf\ndatasets: [{path: chats.jsonl}]\n", "'gone.gguf' does not exist in"),
        ("base_model: /gone\ndatasets: [{path: chats.jsonl}]\n", "'/gone' does not exist; a hub name is owner/name"),
        ("base_model: 5\ndatasets: [{path: chats.jsonl}]\n", "base_model: got 5; input should be a valid string"),
        ("a: &a [x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nbase_model: *c\n", "base_model: got [["),
        ("a: &a [*a]\n", "a: unknown key"),
    ],
)
def test_bad_files(write, content, words):
    with pytest.raises(UserError) as error:
        write(head=content)
    assert words in str(error.value) and "run.yaml" in str(error.value)


def test_billion_laughs_give_a_short_message(write):
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(UserError) as error:
        write("\n".join([*levels, "sample_prompts: *a11"]) + "\n")
    assert len(str(error.value)) < 5000


def test_unreadable_files(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"base_model: \xff\n")
    with pytest.raises(UserError, match="bad.yaml: not UTF-8 at byte 12"):
        load_config(bad)
    bad.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(UserError, match="larger than 1,048,576 bytes"):
        load_config(bad)
    with pytest.raises(UserError, match="gone.yaml: cannot read the config: No such file"):
        load_config(tmp_path / "gone.yaml")
    with pytest.raises(UserError, match="cannot read the config: Is a directory"):
        load_config(tmp_path)


def test_byte_order_mark_and_crlf(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").touch()
    text = b"\xef\xbb\xbfbase_model: owner/name\r\ndatasets:\r\n- path: d.jsonl\r\nseed: 7\r\n"
    (tmp_path / "c.yaml").write_bytes(text)
    assert load_config("c.yaml").seed == 7


def test_all_problems_in_one_message_by_line(write):
    with pytest.raises(UserError) as error:
        write("lora_r: 0\nlearnin_rate: 1\nadapter: gone\nwarmup_steps: 3\nwarmup_ratio: 0.1\n", "seed=-1")
    message = str(error.value)
    assert message.startswith("run.yaml: 5 problems") or "run.yaml: 5 problems\n" in message
    marks = ["line 3: lora_r", "line 4: learnin_rate", "line 5: adapter", "line 7: warmup_steps and", "--set: seed"]
    places = [message.index(mark) for mark in marks]
    assert places == sorted(places)


def test_a_wrong_key_is_not_blamed_for_a_combination_it_belongs_to(write):
    with pytest.raises(UserError) as error:
        write("val_set_size: -3\neval_steps: 5\n")
    assert "nothing to evaluate" not in str(error.value)


def test_paths_from_the_current_directory_then_beside_the_config(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    (here / "a.jsonl").touch()
    (there / "a.jsonl").touch()
    (there / "b.jsonl").touch()
    (there / "t.jinja").touch()
    (there / "c.yaml").write_text(
        "base_model: owner/name-1.5B\ndatasets: [{path: a.jsonl}, {path: b.jsonl}, {path: '*.jsonl'}, "
        "{path: 'builtin:docstrings'}, {path: owner/data}]\nchat_template_jinja: t.jinja\noutput_dir: o\n"
    )
    monkeypatch.chdir(here)
    config = load_config(there / "c.yaml")
    assert [d.path for d in config.datasets] == [
        str(here / "a.jsonl"), str(there / "b.jsonl"), str(here / "*.jsonl"), "builtin:docstrings", "owner/data",
    ]  # fmt: skip
    assert config.base_model == "owner/name-1.5B" and config.chat_template_jinja == str(there / "t.jinja")
    assert config.output_dir == str(here / "o")


def test_a_config_built_in_code_is_checked_too():
    with pytest.raises(ValueError, match="warmup_steps and warmup_ratio"):
        TrainConfig(base_model="m", datasets=[{"path": "d"}], warmup_steps=1, warmup_ratio=0.1)
    with pytest.raises(ValueError, match="frozen"):
        TrainConfig(base_model="m", datasets=[{"path": "d"}]).seed = 3


def test_schema_names_every_key_and_forbids_others():
    schema = json.loads(json.dumps(json_schema()))
    assert schema["properties"].keys() == TrainConfig.model_fields.keys()
    assert schema["additionalProperties"] is False and set(schema["required"]) == {"base_model", "datasets"}
    undescribed = [k for k, v in schema["properties"].items() if "description" not in v and not k.startswith("adam_")]
    assert undescribed == []


def test_resume_identity_is_made_of_keys_that_exist(write):
    assert RESUME_KEYS <= TrainConfig.model_fields.keys()
    assert write("lora_r: 4\n").resume_identity()["lora_r"] == 4
    assert write("logging_steps: 1\n").resume_identity() == write("logging_steps: 2\n").resume_identity()


def test_exit_code_and_message_of_a_command(write, capsys):
    code = main_of(lambda argv: write("lora_r: -1\n") and 0)([])
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.startswith("error: ") and "lora_r" in err and "Traceback" not in err


@pytest.mark.parametrize("key", ["datasets." + "9" * 5000 + ".path", "lora_r", "x" * 5000])
def test_overrides_with_thousands_of_digits(tmp_path, key):
    path = tmp_path / "run.yaml"
    path.write_text(f"base_model: {tmp_path}\ndatasets: [{{path: {tmp_path}}}]\n")
    for value in ("9" * 5000, '!!bool "maybe"', "!!timestamp x"):
        with pytest.raises(UserError):
            load_config(path, [f"{key}={value}"])


def test_an_empty_value_of_another_tool_asks_for_nothing(tmp_path):
    """An Unsloth notebook's `loftq_config = None` is no wish for 4 bits."""
    text = "base_model: m\ndatasets: [{path: d.jsonl}]\nloftq_config: null\nuse_cache: null\nrank: null\n"
    (tmp_path / "m").mkdir()
    (tmp_path / "d.jsonl").touch()
    (tmp_path / "c.yaml").write_text(text)
    assert load_config(tmp_path / "c.yaml").load_in_4bit is False
