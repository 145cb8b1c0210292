"""Exports of adapters and merged models of every family, with the names and row orders of each runtime."""

import json
import shutil

import gguf as gguf_library
import numpy as np
import pytest
import safetensors.numpy
from exports import export, wanted
from family_gguf import converted, write_case
from golden_case import FAMILY_CASES, GOLDEN
from tiny_model import random_adapter

from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.export import gguf, merged, mlx, peft
from lorawgpu.export.effect import WeightChange
from lorawgpu.export.separate import fuse, separate
from lorawgpu.export.source import ExportSource, open_source
from lorawgpu.export.weights_file import Raw, read_weights, write_weights
from lorawgpu.families.modules import PER_LAYER_MODULES
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import read_adapter, write_adapter
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.tensors import Dense

# Case -> architecture in llama.cpp.
ARCH = {case: case for case in FAMILY_CASES} | {
    "gemma4_dense": "gemma4",
    "mistral_window": "llama",
    "olmo3": "olmo2",
    "granite4": "granite",
    "granite4_nope": "granite",
    "qwen2_yarn": "qwen2",
    "qwen2_window": "qwen2",
    "gemma3_multimodal": "gemma3",
    "ministral3": "mistral3",
    "smollm3_window": "smollm3",
    "phi3_plain": "phi3",
    "phi3_mixed": "phi3",
}
TO_FOLDER = (
    "qwen2",
    "qwen2_yarn",
    "qwen3",
    "gemma2",
    "gemma3",
    "smollm3",
    "granite",
    "granite4",
    "phi3",
    "olmo2",
    "olmo3",
)


def adapter_of(folder, model, seed=0, strength=1.0):
    """A random adapter of every linear layer, with scales and ranks of its own for some modules."""
    config = open_checkpoint(model).config
    names = config.all_linear() + (PER_LAYER_MODULES if config.per_layer_input else ())
    ranks = {name: 6 for name in names if name in ("k_proj", "down_proj")} | {"layers.1.self_attn.o_proj": 2}
    lora = LoraConfig(4, 8, names, True, 0.0, ranks, {"o_proj": 3, "gate_up_proj": 0.5})
    tensors = {name: tensor * np.float32(strength) for name, tensor in random_adapter(lora, config, seed).items()}
    write_adapter(folder, lora, tensors, str(model))
    return folder


def source_of(folder, model, seed=0, strength=1.0):
    adapter = adapter_of(folder, model, seed, strength)
    checkpoint = open_checkpoint(model)
    return ExportSource(adapter, *read_adapter(adapter, checkpoint.config), "base", checkpoint)


def text_of(case):
    config = json.loads((GOLDEN / case / "config.json").read_text())
    return config.get("text_config", config)


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, change in want.items():
        np.testing.assert_allclose(got[name], change, rtol=0, atol=2e-6 * np.abs(change).max(), err_msg=name)


def written(tmp_path, form, source):
    folder = tmp_path / form.RUNTIME
    folder.mkdir()
    form.write(folder, source)
    return folder


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_a_peft_folder_holds_the_same_adapter(tmp_path, case):
    source = source_of(tmp_path / "a", GOLDEN / case)
    folder = written(tmp_path, peft, source)
    assert_equal(wanted(folder), wanted(tmp_path / "a"))
    assert read_adapter(folder, source.config)[0] == source.lora


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_a_gguf_adapter_changes_the_tensors_of_the_base_gguf(tmp_path, case):
    """alpha / rank * B A is the change of the tensor of that name, in the row order of llama.cpp's converters."""
    source = source_of(tmp_path / "a", GOLDEN / case)
    file = written(tmp_path, gguf, source) / "adapter.gguf"
    reader = gguf_library.GGUFReader(file)
    assert reader.fields["general.architecture"].contents() == ARCH[case]
    alpha, got = float(reader.fields["adapter.lora.alpha"].contents()), {}
    tensors = {t.name: t.data.astype(np.float64) for t in reader.tensors}
    for name in tensors:
        if name.endswith(".lora_a"):
            a, b = tensors[name], tensors[name.removesuffix("a") + "b"]
            got[name.removesuffix(".lora_a")] = alpha / len(a) * b @ a
    want = {}
    for module, change in wanted(tmp_path / "a").items():
        short = module.removeprefix("model.").removeprefix("language_model.") + ".weight"
        want |= dict(converted(short, change, ARCH[case], text_of(case)))
    assert_equal(got, want)


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_an_mlx_adapter_has_the_names_of_its_classes(tmp_path, case):
    source = source_of(tmp_path / "a", GOLDEN / case)
    folder = written(tmp_path, mlx, source)
    parameters = json.loads((folder / "adapter_config.json").read_text())["lora_parameters"]
    tensors, got = safetensors.numpy.load_file(folder / "adapters.safetensors"), {}
    before = "model." if source.config.prefix == "model." else "language_model.model."
    for name in tensors:
        if name.endswith(".lora_a"):
            module = name.removesuffix(".lora_a")
            a, b = tensors[name].astype(np.float64), tensors[f"{module}.lora_b"].astype(np.float64)
            assert module.split("layers.")[1].split(".", 1)[1] in parameters["keys"]
            assert module.startswith(f"{before}layers.") and a.shape[1] == len(b) == parameters["rank"]
            got[module] = parameters["scale"] * b.T @ a.T
    want = {}
    for module, change in wanted(tmp_path / "a").items():
        module = module.replace("model.language_model.", "language_model.model.")
        if module.endswith("shared_mlp.input_linear"):
            for part, half in zip(("gate", "up"), np.split(change, 2), strict=True):
                want[module.replace("shared_mlp.input_linear", f"mlp.{part}_proj")] = half
        else:
            want[module.replace("shared_mlp.output_linear", "mlp.down_proj")] = change
    assert_equal(got, want)


@pytest.mark.parametrize("form", [gguf, mlx], ids=lambda form: form.RUNTIME)
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_what_is_written_is_read_back(tmp_path, case, form):
    source = source_of(tmp_path / "a", GOLDEN / case)
    effect = form.read(written(tmp_path, form, source), source)
    assert_equal({m: c.delta() for m, c in effect.items()}, {m: c.delta() for m, c in source.effect.items()})


def test_a_fused_layer_that_comes_back_in_other_parts_is_found():
    random = np.random.default_rng(0)
    change = WeightChange(random.standard_normal((2, 6)), random.standard_normal((8, 2)), 0.5)
    effect = {"model.layers.0.shared_mlp.input_linear": change}
    parts = separate(effect)
    assert [len(part.b) for part in parts.values()] == [4, 4] and list(fuse(parts, effect)) == list(effect)
    up = "model.layers.0.mlp.up_proj"
    with pytest.raises(CheckFailed, match="input_linear have different lora_a"):
        fuse(parts | {up: WeightChange(2 * change.a, parts[up].b, 0.5)}, effect)
    del parts[up]
    assert list(fuse(parts, effect)) == ["model.layers.0.mlp.gate_proj"]  # so the comparison of modules fails


# What the runtimes do otherwise


@pytest.mark.parametrize(
    ("case", "form", "words"),
    [
        ("mistral_window", gguf, "sliding window of 7 tokens is lost"),
        ("mistral_window", mlx, "sliding window of 7 tokens is ignored"),
        ("gemma2", mlx, "sliding window of 7 tokens is ignored"),
        ("phi3", gguf, "a context of at most 24 tokens"),
        ("phi3", mlx, "long factors at every length"),
        ("gemma4", gguf, None),
        ("gemma3", mlx, None),
    ],
)
def test_remarks_on_windows_and_longrope(tmp_path, case, form, words):
    source = source_of(tmp_path / "a", GOLDEN / case)
    remarks = " ".join(form.remarks(source))
    assert words in remarks if words else "window" not in remarks and "longrope" not in remarks


# Merged folders


def merged_folder(folder, source):
    merged.check_mergeable(source, False)
    folder.mkdir()
    merged.write(folder, source)
    merged.check(folder, source)
    return folder


def values(tensor):
    return tensor.data if isinstance(tensor, Raw) else tensor.float32()


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_a_merged_folder_has_every_tensor_of_the_base(tmp_path, case):
    """Those of other towers, of unused keys and values, and the norms as they are stored."""
    source = source_of(tmp_path / "a", GOLDEN / case)
    got, base = read_weights(merged_folder(tmp_path / "m", source)), read_weights(GOLDEN / case)
    changes = wanted(tmp_path / "a")
    assert got.keys() == base.keys()
    for name, before in base.items():
        module = name.replace("language_model.model.", "model.language_model.").removesuffix(".weight")
        if module in changes:  # older files put language_model first
            exact = before.float32() + changes.pop(module)
            assert (np.abs(got[name].float32() - exact) <= 2.0**-8 * np.abs(exact) + 1e-6).all()
        else:
            np.testing.assert_array_equal(values(got[name]), values(before), err_msg=name)
    assert not changes
    assert merged.reopen(tmp_path / "m", source).config == source.config


def test_older_names_shards_and_other_dtypes_are_kept(tmp_path):
    """Multimodal files once put language_model first, and towers hold buffers of whole numbers."""
    model = tmp_path / "model"
    shutil.copytree(GOLDEN / "gemma4_dense", model)
    (model / "model.safetensors").unlink()
    tensors = {}
    for name, tensor in read_weights(GOLDEN / "gemma4_dense").items():
        name = name.replace("model.language_model.", "language_model.model.")
        tensors[name.replace("model.vision_tower", "vision_tower")] = tensor
    ids = np.arange(5, dtype=np.int64).view(np.uint8)
    tensors["vision_tower.position_ids"] = Raw(ids, "I64", (1, 5))
    tensors["vision_tower.none"] = Raw(ids[:0], "BOOL", (0, 3))
    write_weights(model, iter(tensors.items()), shard=20_000)
    source = source_of(tmp_path / "a", model)
    got = read_weights(merged_folder(tmp_path / "m", source))
    assert got.keys() == tensors.keys() and len(list(model.glob("*.safetensors"))) > 1
    assert got["vision_tower.position_ids"].shape == (1, 5) and got["vision_tower.none"].dtype == "BOOL"
    np.testing.assert_array_equal(got["vision_tower.position_ids"].data, ids)
    changed = "language_model.model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(got[changed].data, tensors[changed].data)
    assert merged.reopen(tmp_path / "m", source).config == source.config


def test_a_lost_or_added_tensor_is_found(tmp_path):
    source = source_of(tmp_path / "a", GOLDEN / "gemma4")
    folder = merged_folder(tmp_path / "m", source)
    tensors, tower = read_weights(folder), "model.embed_vision.embedding_projection.weight"
    kept = {name: tensor for name, tensor in tensors.items() if name != tower}
    flipped = {name: Dense(tensor.data ^ 1, tensor.dtype) for name, tensor in tensors.items() if name == tower}
    for change, words in (
        (kept, f"{tower} is missing"),
        (kept | flipped, f"{tower} is not the base model's"),
        (tensors | {"more": tensors[tower]}, "more is not a tensor of the base model"),
    ):
        copy = tmp_path / words.split()[-1]
        copy.mkdir()
        write_weights(copy, iter(change.items()))
        with pytest.raises(CheckFailed, match=words):
            merged.check(copy, source)


# A base that came as GGUF


def gguf_base(tmp_path, case):
    return write_case(GOLDEN / case, tmp_path / "base.gguf", ARCH[case], tokenizer=True)


@pytest.mark.parametrize("case", TO_FOLDER)
def test_a_gguf_base_becomes_a_folder_of_the_same_model(tmp_path, case):
    """With the names, row orders and norms of the family's own Hugging Face folder."""
    path = gguf_base(tmp_path, case)
    source = source_of(tmp_path / "a", path)
    folder = merged_folder(tmp_path / "m", source)
    ours, original, changes = merged.reopen(folder, source), open_checkpoint(GOLDEN / case), wanted(tmp_path / "a")
    if case == "granite4":  # as GGUF it is Granite 3, whose gate and up are apart
        assert ours.config.family == "granite"
        return
    assert ours.keys() == original.keys()
    for name in original.keys():
        exact = original.dense(name).float32() + changes.pop(name.removesuffix(".weight"), 0)
        np.testing.assert_allclose(ours.dense(name).float32(), exact, rtol=0, atol=2e-6, err_msg=name)
    assert not changes


def variant(folder, case, **keys):
    """A copy of a golden case with other keys in its config.json."""
    shutil.copytree(GOLDEN / case, folder)
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("factor", [None, 1.5])
def test_yarn_of_a_gguf_base_goes_into_its_folder(tmp_path, factor):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    yarn |= {} if factor is None else {"attention_factor": factor}
    original = variant(tmp_path / "case", "qwen3", rope_scaling=yarn)
    path = write_case(original, tmp_path / "base.gguf", "qwen3", tokenizer=True)
    source = source_of(tmp_path / "a", path)
    rope = merged.reopen(merged_folder(tmp_path / "m", source), source).config.layers[0].attention.rope
    want = open_checkpoint(original).config.layers[0].attention.rope
    assert rope.kind == "yarn" and rope.attention_factor == pytest.approx(factor or 0.1 * np.log(4) + 1)
    np.testing.assert_allclose(rope.inv_freq(16), want.inv_freq(16))


def test_a_multimodal_gguf_base_becomes_a_text_model(tmp_path, monkeypatch):
    """Its file has no vision tower, so the folder is that of the family's text class."""
    monkeypatch.setattr("lorawgpu.families.gemma.MULTIMODAL_VOCAB", text_of("gemma3")["vocab_size"])
    path = gguf_base(tmp_path, "gemma3")
    source = source_of(tmp_path / "a", path)
    assert source.config.prefix == "model.language_model."
    folder = merged_folder(tmp_path / "m", source)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]
    assert merged.reopen(folder, source).keys() == open_checkpoint(GOLDEN / "gemma3").keys()


@pytest.mark.parametrize("case", ["gemma4", "gemma4_dense"])
def test_a_gguf_base_without_a_folder_of_its_own_is_refused_at_once(tmp_path, case, capsys):
    path = gguf_base(tmp_path, case)
    adapter = adapter_of(tmp_path / "a", path)
    assert export("--adapter", adapter, "--to", "merged", "--model", path, "--out", tmp_path / "m") == 2
    assert "a Gemma 4 base that came as GGUF cannot be written" in capsys.readouterr().err
    with pytest.raises(UserError, match="a Gemma 4 base"):
        merged.check_mergeable(open_source(str(adapter), str(path), True), False)


def test_a_folder_of_another_model_is_found(tmp_path):
    path = gguf_base(tmp_path, "phi3")
    source = source_of(tmp_path / "a", path)
    folder = merged_folder(tmp_path / "m", source)
    config = json.loads((folder / "config.json").read_text())
    short = [2.0] * len(config["rope_scaling"]["short_factor"])
    for change in (
        {"sliding_window": 8},
        {"original_max_position_embeddings": 25},
        {"rope_scaling": config["rope_scaling"] | {"short_factor": short}},
        {"rope_scaling": config["rope_scaling"] | {"attention_factor": 1.5}},
        {"rms_norm_eps": 0.003},
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckFailed, match="does not describe the same model"):
            merged.reopen(folder, source)


# On the device: the command reads the export back and compares logits


@pytest.mark.long
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_every_export_of_a_family_keeps_the_logits(tmp_path, case, capsys):
    adapter = adapter_of(tmp_path / "a", GOLDEN / case)
    for to in ("peft", "gguf", "mlx", "merged"):
        argv = ["--adapter", adapter, "--to", to, "--model", GOLDEN / case, "--out", tmp_path / to]
        assert export(*argv) == 0, capsys.readouterr().err
        assert "logits of 32 tokens" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("case", TO_FOLDER)
def test_a_merged_gguf_base_keeps_the_logits(tmp_path, case, capsys):
    path = gguf_base(tmp_path, case)
    adapter = adapter_of(tmp_path / "a", path)
    assert export("--adapter", adapter, "--to", "merged", "--model", path, "--out", tmp_path / "m") == 0
    assert "logits of 32 tokens" in capsys.readouterr().out
    assert isinstance(open_checkpoint(path), GgufCheckpoint)


def test_an_export_with_logits(tmp_path, capsys):
    """One family quickly: split layers, permuted rows, and the device."""
    adapter = adapter_of(tmp_path / "a", GOLDEN / "granite4")
    argv = ["--adapter", adapter, "--to", "gguf", "--model", GOLDEN / "granite4", "--out", tmp_path / "g"]
    assert export(*argv) == 0
    assert "logits of 32 tokens" in capsys.readouterr().out
