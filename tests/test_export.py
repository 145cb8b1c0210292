"""Exports to other runtimes: correct by each runtime's own arithmetic, and complete."""

import json
import subprocess
import sys
from dataclasses import replace

import gguf as gguf_library
import numpy as np
import pytest
import safetensors.numpy
from exports import BITNET_CASE, DENSE, PECULIAR, adapter_of, assert_same, chat_model, export, wanted
from golden_case import GOLDEN
from tiny_run import write_config
from tiny_tokenizer import backend

from lorawgpu.chat.builtin import BITNET, CHATML
from lorawgpu.export import gguf, mlx, peft
from lorawgpu.export.source import ExportSource
from lorawgpu.families.modules import LINEAR_MODULES
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import read_adapter
from lorawgpu.weights.loader import open_checkpoint

# Each runtime's own arithmetic, from its documentation


def as_peft(folder) -> dict:
    return wanted(folder)


def as_mlx(folder) -> dict:
    """mlx-lm's LoRALinear.fuse: (scale * lora_b^T) @ lora_a^T."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["fine_tune_type"] == "lora" and settings["num_layers"] == -1
    parameters, changes = settings["lora_parameters"], {}
    assert set(parameters) == {"rank", "scale", "dropout", "keys"}
    tensors = safetensors.numpy.load_file(folder / "adapters.safetensors")
    for name in tensors:
        module, matrix = name.rsplit(".", 1)
        assert module.split(".", 3)[3] in parameters["keys"]  # model.layers.N.<key>
        if matrix == "lora_a":
            a, b = tensors[name].astype(np.float64), tensors[f"{module}.lora_b"].astype(np.float64)
            assert a.shape[1] == b.shape[0] == parameters["rank"]  # mlx-lm refuses others
            changes[module] = parameters["scale"] * b.T @ a.T
    return changes


def as_llama_cpp(folder, heads=None) -> dict:
    """llama.cpp's build_lora_mm: alpha / rank * B (A x); `heads` {"q": n, "k": n}: these rows are interleaved."""
    reader = gguf_library.GGUFReader(folder / "adapter.gguf")
    tensors = {t.name: t.data.astype(np.float64) for t in reader.tensors}
    alpha, changes = float(reader.fields["adapter.lora.alpha"].contents()), {}
    names = {"attn_output": "self_attn.o_proj"} | {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}
    names |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    for name, a in tensors.items():
        if not name.endswith(".weight.lora_a"):
            continue
        _, layer, part, *_ = name.split(".")
        b = tensors[name.removesuffix("a") + "b"]
        change = alpha / b.shape[1] * b @ a
        if heads and part in ("attn_q", "attn_k"):
            half = len(b) // heads[part[-1]] // 2
            from_row = [h * 2 * half + j // 2 + j % 2 * half for h in range(heads[part[-1]]) for j in range(2 * half)]
            change[from_row] = change.copy()  # row r of the file is row from_row[r] of the model
        changes[f"model.layers.{layer}.{names[part]}"] = change
    return changes


@pytest.mark.parametrize("case", ["llama_dense", "bitnet_packed", "llama_bitlinear"])
@pytest.mark.parametrize("lora", [LoraConfig(4, 8, LINEAR_MODULES), PECULIAR], ids=["plain", "peculiar"])
def test_every_format_changes_the_weights_as_peft_says(tmp_path, case, lora):
    adapter = adapter_of(tmp_path / "a", GOLDEN / case, lora)
    source = ExportSource(adapter, *read_adapter(adapter), "base", open_checkpoint(GOLDEN / case))
    for form in (peft, mlx, gguf):
        (folder := tmp_path / form.RUNTIME).mkdir()
        form.write(folder, source)
    config, attention = source.config, source.config.layers[0].attention
    heads = {"q": attention.heads, "k": attention.kv_heads} if config.family == "llama" else None
    want = wanted(adapter)
    assert_same(as_peft(tmp_path / "PEFT"), want)
    assert_same(as_mlx(tmp_path / "mlx-lm"), want)
    assert_same(as_llama_cpp(tmp_path / "llama.cpp", heads), want)


def test_the_metadata_of_a_gguf_adapter(tmp_path):
    adapter = adapter_of(tmp_path / "a", DENSE, replace(PECULIAR, rank_pattern={}, alpha_pattern={}))
    assert export("--adapter", adapter, "--to", "gguf", "--out", tmp_path / "g") == 0  # the base: as the adapter says
    reader = gguf_library.GGUFReader(tmp_path / "g" / "adapter.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    kind = reader.fields["adapter.lora.alpha"].types
    assert kind == [gguf_library.GGUFValueType.FLOAT32]
    assert fields.pop("adapter.lora.alpha") == pytest.approx(8 * np.sqrt(4))  # rsLoRA: alpha' / r = alpha / sqrt(r)
    assert fields == {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    tensors = {t.name: t for t in reader.tensors}
    assert all(t.tensor_type == gguf_library.GGMLQuantizationType.F32 for t in tensors.values())
    assert tensors["blk.0.attn_q.weight.lora_a"].shape.tolist() == [64, 4]  # ggml's order: the row length first
    assert tensors["blk.1.ffn_down.weight.lora_b"].shape.tolist() == [4, 64]


def test_the_architecture_where_runtimes_disagree(tmp_path, capsys):
    argv = ["--adapter", BITNET_CASE / "adapter_init", "--model", BITNET_CASE, "--to", "gguf"]
    assert export(*argv, "--out", tmp_path / "a", "--arch", "bitnet-b1.58") == 0
    reader = gguf_library.GGUFReader(tmp_path / "a" / "adapter.gguf")
    assert reader.fields["general.architecture"].contents() == "bitnet-b1.58"
    out = capsys.readouterr().out
    assert "SiLU" in out and "wrong scale" in out and "bitnet-b1.58 in bitnet.cpp" in out
    assert export(*argv, "--out", tmp_path / "b", "--arch", "llama") == 2
    assert "--arch llama: wanted bitnet or bitnet-b1.58" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_a_gguf_named_by_file_has_its_companions_next_to_it(tmp_path, capsys):
    model = chat_model(tmp_path / "m")
    adapter, out = adapter_of(tmp_path / "a", model), tmp_path / "new" / "bot.gguf"
    assert export("--adapter", adapter, "--to", "gguf", "--model", model, "--out", out) == 0
    names = {"bot.gguf", "bot.chat_template.jinja", "bot.sample_transcript.json"}
    assert {path.name for path in out.parent.iterdir()} == names
    printed = capsys.readouterr().out
    assert all(str(out.parent / name) in printed for name in names)
    before = out.read_bytes()
    assert export("--adapter", adapter, "--to", "gguf", "--model", model, "--out", out) == 2
    assert f"{out}: already exists" in capsys.readouterr().err and out.read_bytes() == before
    out.unlink()
    assert export("--adapter", adapter, "--to", "gguf", "--model", model, "--out", out) == 2  # its companions exist
    assert {path.name for path in out.parent.iterdir()} == names - {"bot.gguf"}


def test_the_folder_holds_the_template_and_a_transcript(tmp_path, device, kernels):
    model = chat_model(tmp_path / "m")
    adapter = adapter_of(tmp_path / "a", model)
    assert export("--adapter", adapter, "--to", "peft", "--model", model, "--out", tmp_path / "p") == 0
    assert (tmp_path / "p" / "chat_template.jinja").read_text() == CHATML
    transcript = json.loads((tmp_path / "p" / "sample_transcript.json").read_text())
    assert (
        transcript["prompt"]
        == f"<|im_start|>user\n{transcript['messages'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert transcript["prompt_ids"] == backend().encode(transcript["prompt"], add_special_tokens=False).ids
    assert 0 < len(transcript["answer_ids"]) <= 48 and transcript["answer"] == backend().decode(
        transcript["answer_ids"]
    )
    from lorawgpu.api.model import LoadedModel

    llm = LoadedModel(device, open_checkpoint(model), read_adapter(adapter), kernels)
    logits = llm.logits(transcript["prompt_ids"] + transcript["answer_ids"])[len(transcript["prompt_ids"]) - 1 : -1]
    assert logits.argmax(1).tolist() == transcript["answer_ids"]  # with the adapter ...
    llm = LoadedModel(device, open_checkpoint(model), None, kernels)
    logits = llm.logits(transcript["prompt_ids"] + transcript["answer_ids"])[len(transcript["prompt_ids"]) - 1 : -1]
    assert logits.argmax(1).tolist() != transcript["answer_ids"]  # ... and not without


def test_a_transcript_stays_within_the_models_context(tmp_path, capsys):
    model = chat_model(tmp_path / "m")
    adapter, config = adapter_of(tmp_path / "a", model), json.loads((model / "config.json").read_text())

    def transcript(context):
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
        out = tmp_path / str(context)
        assert export("--adapter", adapter, "--to", "peft", "--model", model, "--out", out) == 0
        path = out / "sample_transcript.json"
        return json.loads(path.read_text()) if path.exists() else None

    whole = transcript(256)
    length = len(whole["prompt_ids"])
    cut = transcript(length + 3)
    # the last of the four tokens is generated but never processed
    assert cut["answer_ids"] == whole["answer_ids"][:4] and not cut["ended"]
    capsys.readouterr()
    assert transcript(length - 1) is None and (tmp_path / str(length - 1) / "chat_template.jinja").exists()
    note = f"no sample transcript: its prompt has {length} tokens, the model's context is {length - 1}"
    assert note in capsys.readouterr().out


def test_the_template_is_the_one_that_the_run_trained_with(tmp_path):
    model = chat_model(tmp_path / "m")
    run = write_config(tmp_path / "run", base_model=str(model), chat_template="bitnet").parent
    adapter = adapter_of(run / "checkpoint-3", model)
    assert export("--adapter", adapter, "--to", "peft", "--model", model, "--out", tmp_path / "p") == 0
    assert (tmp_path / "p" / "chat_template.jinja").read_text() == BITNET
    transcript = json.loads((tmp_path / "p" / "sample_transcript.json").read_text())
    assert transcript["prompt"].startswith("<s>User: ") and transcript["prompt"].endswith("Assistant:")


def test_a_model_is_optional(tmp_path, capsys):
    adapter = adapter_of(tmp_path / "a", DENSE)
    for to in ("peft", "mlx"):
        assert export("--adapter", adapter, "--to", to, "--out", tmp_path / to) == 0
        assert "without --model: logits not compared" in capsys.readouterr().out
    settings = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": None}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    assert export("--adapter", adapter, "--to", "gguf", "--out", tmp_path / "g") == 2
    assert "names no base model; pass it with --model" in capsys.readouterr().err
    code = "import sys, lorawgpu.export.__main__; sys.exit('wgpu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("base", "remark"),
    [
        (str(DENSE), ""),
        (str(BITNET_CASE), "BitNet models: mlx-lm supports"),
        ("builtin:tiny-bitnet", "BitNet models: mlx-lm supports"),
        ("microsoft/bitnet-b1.58-2B-4T", "BitNet models: mlx-lm supports"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", ""),
        ("/gone/since", "BitNet models: if this is one"),
        (None, "BitNet models: if this is one"),
    ],
)
def test_mlx_warns_if_the_base_is_or_may_be_a_bitnet(tmp_path, capsys, monkeypatch, base, remark):
    monkeypatch.setattr("lorawgpu.weights.loader.download", None)  # nothing is downloaded for a remark
    adapter = adapter_of(tmp_path / "a", DENSE)
    settings = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": base}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    assert export("--adapter", adapter, "--to", "mlx", "--out", tmp_path / "mlx") == 0
    out = capsys.readouterr().out
    assert remark in out and ("BitNet" in out) is bool(remark)


def test_a_peft_copy_is_our_own_format(tmp_path):
    adapter = adapter_of(tmp_path / "a", DENSE)
    assert export("--adapter", adapter, "--to", "peft", "--model", DENSE, "--out", tmp_path / "p") == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "p" / name).read_bytes() == (adapter / name).read_bytes()
