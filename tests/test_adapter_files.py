"""PEFT directories: written and read bit for bit, matched as PEFT matches, and rejected by name where unsupported."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from adapters import LORA, MODEL, alive, edit

from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.families.modules import LINEAR_MODULES
from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE, WEIGHTS_FILE
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import read_adapter, tensor_names, write_adapter

GOLDEN = Path(__file__).parent / "golden"
CASES = ["bitnet_master", "bitnet_packed", "bitnet_q_only", "llama_bitlinear", "llama_dense"]


@pytest.fixture
def folder(tmp_path):
    write_adapter(tmp_path, LORA, alive(), "base")
    return tmp_path


def test_round_trip_is_exact(tmp_path):
    tensors = alive()
    tensors[next(iter(tensors))][0, :3] = [np.float32(1e-45), -0.0, np.finfo(np.float32).max]
    write_adapter(tmp_path / "new" / "folder", LORA, tensors, "owner/base")
    lora, back = read_adapter(tmp_path / "new" / "folder", MODEL)
    assert lora == LORA and list(back) == list(tensors)
    assert all(back[n].dtype == np.float32 and back[n].tobytes() == tensors[n].tobytes() for n in tensors)
    assert {p.name for p in (tmp_path / "new" / "folder").iterdir()} == {WEIGHTS_FILE, ADAPTER_CONFIG_FILE}


def test_written_config_has_the_long_standing_keys_only(folder):
    config = json.loads((folder / ADAPTER_CONFIG_FILE).read_text())
    assert set(config) == {
        "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights", "lora_alpha",
        "lora_dropout", "modules_to_save", "peft_type", "r", "target_modules", "task_type",
    }  # fmt: skip
    assert config["lora_alpha"] == 8 and type(config["lora_alpha"]) is int and config["r"] == 4
    assert config["base_model_name_or_path"] == "base" and config["target_modules"] == ["q_proj", "down_proj"]
    header = safetensors.numpy.load((folder / WEIGHTS_FILE).read_bytes())
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in header


def test_keys_that_say_something_are_written_and_read(tmp_path):
    lora = replace(LORA, use_rslora=True, dropout=0.1, rank_pattern={"layers.1.mlp.down_proj": 2}, alpha=8.0,
                   alpha_pattern={"q_proj": 3.0, "down_proj": 0.5})  # fmt: skip
    write_adapter(tmp_path, lora, alive(lora), "base")
    text = (tmp_path / ADAPTER_CONFIG_FILE).read_text()
    assert '"lora_alpha": 8,' in text and '"q_proj": 3\n' in text and "0.5" in text
    assert read_adapter(tmp_path, MODEL)[0] == lora


def test_two_writes_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_adapter(tmp_path / name, LORA, alive(), "base")
    for file in (WEIGHTS_FILE, ADAPTER_CONFIG_FILE):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_non_finite_adapter_is_never_written(tmp_path):
    write_adapter(tmp_path, LORA, alive(), "base")
    before = (tmp_path / WEIGHTS_FILE).read_bytes()
    for bad in (math.nan, math.inf):
        tensors = alive(seed=1)
        name = list(tensors)[3]
        tensors[name][1, 1] = bad
        with pytest.raises(CheckFailed, match=f"not saved: {name} has non-finite values"):
            write_adapter(tmp_path, LORA, tensors, "base")
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == before


def test_a_failing_disk_leaves_the_old_file(folder, monkeypatch):
    before = (folder / WEIGHTS_FILE).read_bytes()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        write_adapter(folder, LORA, alive(seed=1), "base")
    assert WEIGHTS_FILE in error.value.filename
    assert (folder / WEIGHTS_FILE).read_bytes() == before and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("case", CASES)
def test_adapters_that_peft_wrote(case):
    lora, tensors = read_adapter(GOLDEN / case / "adapter_init")
    said = json.loads((GOLDEN / case / "case.json").read_text())["lora"]
    assert (lora.r, lora.alpha, lora.use_rslora) == (said["r"], said["alpha"], said["rslora"])
    assert set(lora.target_modules) == set(said["targets"])
    theirs = safetensors.numpy.load((GOLDEN / case / "adapter_init" / WEIGHTS_FILE).read_bytes())
    assert tensors.keys() == theirs.keys()
    assert all(np.array_equal(tensors[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_all_three_dtypes_are_widened_exactly(folder, dtype):
    numbers = {name: np.float32(np.arange(1, t.size + 1).reshape(t.shape) % 64 / 8) for name, t in alive().items()}
    if dtype == "BF16":
        stored = {n: (np.ascontiguousarray(t).view(np.uint32) >> 16).astype(np.uint16) for n, t in numbers.items()}
    else:
        stored = {n: t.astype(np.float16 if dtype == "F16" else np.float32) for n, t in numbers.items()}
    header, data = {}, b""
    for name, t in stored.items():
        header[name] = {"dtype": dtype, "shape": t.shape, "data_offsets": [len(data), len(data) + t.nbytes]}
        data += t.tobytes()
    text = json.dumps(header).encode()
    (folder / WEIGHTS_FILE).write_bytes(len(text).to_bytes(8, "little") + text + data)
    tensors = read_adapter(folder, MODEL)[1]
    assert all(t.dtype == np.float32 and np.array_equal(t, numbers[n]) for n, t in tensors.items())


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
        ({"peft_type": "DELETED"}, "peft_type is None"),
        ({"use_dora": True}, "use_dora: DoRA adapters are not supported"),
        ({"modules_to_save": ["score"]}, "modules_to_save is ['score']: wanted a list of embed_tokens and lm_head"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "'lora_bias' is True; this setting is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights 'loftq' is not supported"),
        ({"fan_in_fan_out": True}, "'fan_in_fan_out' is True"),
        ({"layer_replication": [[0, 2]]}, "'layer_replication' is [[0, 2]]"),
        ({"trainable_token_indices": [-1]}, "trainable_token_indices is [-1]: wanted a list of token ids"),
        ({"target_parameters": ["x"]}, "'target_parameters' is ['x']"),
        ({"use_qalora": True}, "'use_qalora' is True"),
        ({"some_new_thing": 0.5}, "'some_new_thing' is 0.5"),
        ({"some_new_thing": 0}, "'some_new_thing' is 0"),
        ({"r": 0}, "r is 0; wanted a positive whole number"),
        ({"r": -4}, "r is -4"),
        ({"r": "4"}, "r is '4'"),
        ({"r": 4.0}, "r is 4.0"),
        ({"r": True}, "r is True"),
        ({"r": "DELETED"}, "r is None"),
        ({"lora_alpha": 0}, "lora_alpha is 0; wanted a positive number"),
        ({"lora_alpha": math.inf}, "lora_alpha is inf"),
        ({"lora_alpha": math.nan}, "lora_alpha is nan"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0; wanted a number from 0 to below 1"),
        ({"use_rslora": 1}, "use_rslora is 1; wanted true or false"),
        ({"target_modules": None}, "target_modules is None; wanted a list"),
        ({"target_modules": [3]}, "target_modules is [3]"),
        ({"target_modules": ["q_proj"]}, "mlp.down_proj.lora_A.weight' does not belong to a target module"),
        ({"target_modules": ["q_proj", "down_proj", "v_proj"]}, "v_proj.lora_A.weight (and 5 more) is missing"),
        ({"rank_pattern": [1]}, "rank_pattern is [1]; wanted an object"),
        ({"rank_pattern": {f"layers.{n}.q_proj": 2 for n in range(3000)}}, "rank_pattern has 3,000 patterns; at most"),
        ({"rank_pattern": {"(?i)Q_PROJ": 2}}, "is not a valid regular expression: global flags"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj is 0; wanted a positive whole number"),
        ({"rank_pattern": {"q_proj": 3}}, "wanted [3, 24] for this base model"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "'(a+)+b' is too complex"),
        ({"alpha_pattern": {".*.*.*.*.*x": 1}}, "is too complex"),
        ({"alpha_pattern": {"a" * 201: 1}}, "is too complex"),
        ({"alpha_pattern": {"(": 1}}, "'(' is not a valid regular expression"),
        ({"r": 5}, "q_proj.lora_A.weight has shape [4, 24]; wanted"),
    ],
)  # fmt: skip
def test_rejected_by_name(folder, keys, words):
    edit(folder, **keys)
    with pytest.raises(UserError) as error:
        read_adapter(folder, MODEL)
    assert words in str(error.value) and str(folder) in str(error.value)


def test_settings_without_effect_are_ignored(folder):
    edit(folder, some_new_thing=None, another=False, third=[], fourth={}, fifth="", peft_version="9.9", revision="main",
         megatron_core="megatron.core", qalora_group_size=16, init_lora_weights="gaussian", task_type=None,
         auto_mapping={"base_model_class": "X"}, layers_pattern="layers", loftq_config={})  # fmt: skip
    assert read_adapter(folder, MODEL)[0] == LORA


def test_targets_given_as_a_regex_or_by_layer_become_modules(folder):
    edit(folder, target_modules=r".*(q_proj|down_proj)$")
    assert set(read_adapter(folder)[0].target_modules) == {
        f"model.layers.{n}.{m}" for n in range(3) for m in ("self_attn.q_proj", "mlp.down_proj")}  # fmt: skip
    lora, tensors = read_adapter(folder, MODEL)
    assert lora == LORA  # with the model, the names that select these modules
    only = {name: t for name, t in tensors.items() if "layers.1." in name}
    write_adapter(folder, LORA, only, "base")
    edit(folder, layers_to_transform=[1])
    lora, tensors = read_adapter(folder, MODEL)
    assert tensors.keys() == only.keys()
    assert set(lora.target_modules) == {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"}


def test_a_listed_target_that_no_model_has_is_dropped(folder):
    edit(folder, target_modules=["q_proj", "down_proj", "c_attn", "qkv_proj"])  # the last one is Phi-3's
    assert read_adapter(folder, MODEL)[0] == LORA


def test_damaged_folders(folder):
    weights = folder / WEIGHTS_FILE
    whole = weights.read_bytes()

    def message(error=UserError):
        with pytest.raises(error) as caught:
            read_adapter(folder, MODEL)
        return str(caught.value)

    weights.write_bytes(whole[:-100])
    assert WEIGHTS_FILE in message() and "truncated" in message()
    tensors = alive()
    name = next(iter(tensors))
    for extra, words in (
        ({"base_model.model.lm_head.lora_embedding_A": np.ones((2, 2), np.float32)}, "is not a LoRA tensor"),
        ({name: np.ones((4, 24), np.int32)}, "is I32 [4, 24]; wanted an F32, F16 or BF16 matrix"),
        ({name: np.ones(24, np.float32)}, "is F32 [24]; wanted an F32"),
        ({name: np.full((4, 24), np.nan, np.float32)}, f"{name}' has non-finite values"),
        ({tensor_names("model.layers.9.self_attn.q_proj")[0]: np.ones((4, 24), np.float32)}, "layers.9.self_attn"),
    ):
        weights.write_bytes(safetensors.numpy.save(tensors | extra))
        assert words in message() and WEIGHTS_FILE in message()
    weights.write_bytes(safetensors.numpy.save({}))
    assert "contains no tensors" in message()
    weights.rename(folder / "adapter_model.bin")
    assert "adapter_model.bin is a pickle" in message()
    (folder / "adapter_model.bin").unlink()
    assert f"{folder}: no {WEIGHTS_FILE}" in message()
    weights.write_bytes(whole)
    (folder / ADAPTER_CONFIG_FILE).write_text("{")
    assert f"{ADAPTER_CONFIG_FILE}: not valid JSON" in message()
    (folder / ADAPTER_CONFIG_FILE).unlink()
    assert f"{ADAPTER_CONFIG_FILE}: no such file" in message()
    with pytest.raises(UserError, match="no such folder; wanted a PEFT adapter directory"):
        read_adapter(folder / "gone")


def test_an_adapter_of_another_model_is_rejected(folder):
    wider = replace(MODEL, hidden_size=32, layers=tuple(replace(layer, hidden=32) for layer in MODEL.layers))
    with pytest.raises(UserError, match=r"q_proj.lora_A.weight has shape \[4, 24\]; wanted \[4, 32\]"):
        read_adapter(folder, wider)
    with pytest.raises(UserError, match="layers.2.mlp.down_proj.lora_A.weight' does not belong to a target module"):
        read_adapter(folder, replace(MODEL, layers=MODEL.layers[:2]))
    with pytest.raises(UserError, match=r"layers.3.self_attn.q_proj.lora_A.weight \(and 3 more\) is missing"):
        read_adapter(folder, replace(MODEL, layers=MODEL.layers[:1] * 4))


@pytest.mark.reference
def test_peft_loads_what_we_write(tmp_path):
    """PEFT loads our folder with the same tensors and scales, rsLoRA and patterns included."""
    import torch
    from peft import PeftModel
    from transformers import LlamaConfig, LlamaForCausalLM

    lora = LoraConfig(4, 8, LINEAR_MODULES, True, 0.0, {"layers.1.mlp.down_proj": 2}, {"q_proj": 3})
    tensors = alive(lora)
    write_adapter(tmp_path, lora, tensors, "base")
    base = LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True))  # fmt: skip
    model = PeftModel.from_pretrained(base, tmp_path)
    loaded = {n.replace(".default", ""): p.detach() for n, p in model.named_parameters() if "lora_" in n}
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], torch.from_numpy(tensors[name])) for name in tensors)
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A"):
            assert module.scaling["default"] == pytest.approx(lora.scale(name), rel=1e-12)
