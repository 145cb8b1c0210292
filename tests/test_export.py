"""Exports to other runtimes: the right bytes, a wrong one found before it is announced, nothing left by a failure."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf as gguf_library
import numpy as np
import pytest
import safetensors.numpy
from golden_case import GOLDEN, read_case
from test_gguf import write_gguf
from tiny_model import TinyCheckpoint, random_adapter, tiny_config
from tiny_run import write_config
from tiny_tokenizer import backend

from lorawgpu import export as command
from lorawgpu.data.templates import BITNET, CHATML
from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.exporting import gguf, merged, mlx, peft
from lorawgpu.exporting.effect import LowRank, check_effect, difference, effect_of
from lorawgpu.exporting.hf_files import config_json, rope_settings
from lorawgpu.exporting.source import Source
from lorawgpu.exporting.staging import staged
from lorawgpu.exporting.weights_file import write_weights
from lorawgpu.model.adapter import read_adapter, write_adapter
from lorawgpu.model.config import Rope
from lorawgpu.model.loader import open_checkpoint
from lorawgpu.model.peft_config import LINEAR_MODULES, LoraConfig
from lorawgpu.model.tensors import Dense

DENSE, BITNET_CASE = GOLDEN / "llama_dense", GOLDEN / "bitnet_packed"
PECULIAR = LoraConfig(
    4, 8, LINEAR_MODULES, True, 0.0, {"layers.1.mlp.down_proj": 2, "k_proj": 6}, {"q_proj": 3, "o_proj": 0.5}
)


def export(*argv) -> int:
    return command.main(list(map(str, argv)))


def adapter_of(folder, model, lora=PECULIAR, seed=0):
    """An adapter of a golden model, written as a PEFT directory."""
    tensors = random_adapter(lora, open_checkpoint(model).config, seed)
    write_adapter(folder, lora, tensors, str(model))
    return folder


def chat_model(folder, template=CHATML) -> Path:
    """A tiny dense model that has a tokenizer and a chat template."""
    config = tiny_config(vocab_size=backend().get_vocab_size(), bos_token_id=0, eos_token_ids=(1,))
    checkpoint = TinyCheckpoint(config)
    folder.mkdir()
    write_weights(folder, ((name, checkpoint.dense(name)) for name in checkpoint.keys()))
    (folder / "config.json").write_text(json.dumps(config_json(config, "float32")))
    (folder / "tokenizer.json").write_text(backend().to_str())
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def wanted(adapter) -> dict:
    """scale * B @ A of every module in float64, by the formula of PEFT's documentation."""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    changes = {}
    for name in tensors:
        if not name.endswith("lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = tensors[name].astype(np.float64), tensors[name.replace("lora_A", "lora_B")].astype(np.float64)
        alpha = next((v for k, v in settings.get("alpha_pattern", {}).items() if module.endswith(k)), None)
        alpha = settings["lora_alpha"] if alpha is None else alpha
        changes[module] = alpha / (np.sqrt(len(a)) if settings.get("use_rslora") else len(a)) * b @ a
    return changes


def assert_same(got: dict, want: dict):
    assert got.keys() == want.keys() and len(want) == 14
    for module, change in want.items():
        np.testing.assert_allclose(got[module], change, rtol=0, atol=2e-6 * np.abs(change).max())  # float32, folded


# Each runtime's own arithmetic, written here anew from its documentation


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
    source = Source(adapter, *read_adapter(adapter), "base", open_checkpoint(GOLDEN / case))
    for form in (peft, mlx, gguf):
        (folder := tmp_path / form.RUNTIME).mkdir()
        form.write(folder, source)
    config = source.config
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads} if config.family == "llama" else None
    want = wanted(adapter)
    assert_same(as_peft(tmp_path / "PEFT"), want)
    assert_same(as_mlx(tmp_path / "mlx-lm"), want)
    assert_same(as_llama_cpp(tmp_path / "llama.cpp", heads), want)


def test_what_a_gguf_adapter_says_of_itself(tmp_path):
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
    assert "--arch llama: for a base of the family bitnet wanted bitnet or bitnet-b1.58" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_a_gguf_by_its_file_name_has_its_companions_beside_it(tmp_path, capsys):
    model = chat_model(tmp_path / "m")
    adapter, out = adapter_of(tmp_path / "a", model), tmp_path / "new" / "bot.gguf"
    assert export("--adapter", adapter, "--to", "gguf", "--model", model, "--out", out) == 0
    names = {"bot.gguf", "bot.chat_template.jinja", "bot.sample_transcript.json"}
    assert {path.name for path in out.parent.iterdir()} == names
    said = capsys.readouterr().out
    assert all(str(out.parent / name) in said for name in names)
    before = out.read_bytes()
    assert export("--adapter", adapter, "--to", "gguf", "--model", model, "--out", out) == 2
    assert f"{out}: exists already" in capsys.readouterr().err and out.read_bytes() == before
    out.unlink()
    assert export("--adapter", adapter, "--to", "gguf", "--model", model, "--out", out) == 2  # its companions exist
    assert {path.name for path in out.parent.iterdir()} == names - {"bot.gguf"}


def test_the_folder_holds_the_template_and_a_transcript(tmp_path, device, kernels):
    model = chat_model(tmp_path / "m")
    adapter = adapter_of(tmp_path / "a", model)
    assert export("--adapter", adapter, "--to", "peft", "--model", model, "--out", tmp_path / "p") == 0
    assert (tmp_path / "p" / "chat_template.jinja").read_text() == CHATML
    said = json.loads((tmp_path / "p" / "sample_transcript.json").read_text())
    assert said["prompt"] == f"<|im_start|>user\n{said['messages'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert said["prompt_ids"] == backend().encode(said["prompt"], add_special_tokens=False).ids
    assert 0 < len(said["answer_ids"]) <= 48 and said["answer"] == backend().decode(said["answer_ids"])
    from lorawgpu.api import LoadedModel

    llm = LoadedModel(device, open_checkpoint(model), read_adapter(adapter), kernels)
    logits = llm.logits(said["prompt_ids"] + said["answer_ids"])[len(said["prompt_ids"]) - 1 : -1]
    assert logits.argmax(1).tolist() == said["answer_ids"]  # with the adapter ...
    llm = LoadedModel(device, open_checkpoint(model), None, kernels)
    logits = llm.logits(said["prompt_ids"] + said["answer_ids"])[len(said["prompt_ids"]) - 1 : -1]
    assert logits.argmax(1).tolist() != said["answer_ids"]  # ... and not without


def test_the_template_is_the_one_that_the_run_trained_with(tmp_path):
    model = chat_model(tmp_path / "m")
    run = write_config(tmp_path / "run", base_model=str(model), chat_template="bitnet").parent
    adapter = adapter_of(run / "checkpoint-3", model)
    assert export("--adapter", adapter, "--to", "peft", "--model", model, "--out", tmp_path / "p") == 0
    assert (tmp_path / "p" / "chat_template.jinja").read_text() == BITNET
    said = json.loads((tmp_path / "p" / "sample_transcript.json").read_text())
    assert said["prompt"].startswith("<s>User: ") and said["prompt"].endswith("Assistant:")


def test_without_a_model_nothing_of_it_is_needed(tmp_path, capsys):
    adapter = adapter_of(tmp_path / "a", DENSE)
    for to in ("peft", "mlx"):
        assert export("--adapter", adapter, "--to", to, "--out", tmp_path / to) == 0
        assert "without --model: logits not compared" in capsys.readouterr().out
    settings = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": None}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    assert export("--adapter", adapter, "--to", "gguf", "--out", tmp_path / "g") == 2
    assert "names no base model, and this export needs one; give it with --model" in capsys.readouterr().err
    code = "import sys, lorawgpu.export; sys.exit('wgpu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_peft_copy_is_our_own_format(tmp_path):
    adapter = adapter_of(tmp_path / "a", DENSE)
    assert export("--adapter", adapter, "--to", "peft", "--model", DENSE, "--out", tmp_path / "p") == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "p" / name).read_bytes() == (adapter / name).read_bytes()


# Merged weights


def test_merged_weights_are_base_and_change_rounded_once(tmp_path, capsys):
    adapter = adapter_of(tmp_path / "a", DENSE)
    assert export("--adapter", adapter, "--to", "merged", "--model", DENSE, "--out", tmp_path / "m") == 0
    assert "rounding moves them by" in (out := capsys.readouterr().out) and "logits of 32 tokens" in out
    assert out.startswith("wrote merged: ") and "every weight, in bf16, is" in out
    base, ours, changes = open_checkpoint(DENSE), open_checkpoint(tmp_path / "m"), wanted(adapter)
    assert (
        ours.config == base.config
        and (tmp_path / "m" / "config.json").read_bytes() == (DENSE / "config.json").read_bytes()
    )
    assert not (tmp_path / "m" / "expected.npz").exists()
    for name in base.keys():
        before, after = base.dense(name), ours.dense(name)
        assert after.dtype == before.dtype == "bf16"
        if change := name.removesuffix(".weight") in changes:
            exact = before.float32() + changes[name.removesuffix(".weight")]
            # half a unit of the last of 8 bits; the sum was float32 before
            assert (np.abs(after.float32() - exact) <= 2.0**-8 * np.abs(exact) + 1e-7).all()
        assert change != np.array_equal(before.data, after.data)


def test_bf16_rounds_to_nearest_even():
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.4e38], np.float32)
    assert merged.narrow(values, "bf16").float32().tolist() == [1, 1, 1 + 2**-6, 1 + 2**-7, -1, np.inf]


def test_a_ternary_base_is_not_merged(tmp_path, capsys):
    for case in ("bitnet_packed", "bitnet_master", "llama_bitlinear"):
        argv = ["--adapter", GOLDEN / case / "adapter_init", "--model", GOLDEN / case, "--to", "merged"]
        assert export(*argv, "--out", tmp_path / case) == 2
        assert "is ternary, so an adapter cannot be merged into it" in capsys.readouterr().err
        assert export(*argv, "--out", tmp_path / case, "--dequantise") == 0
        first, *said = capsys.readouterr().out.splitlines()
        assert first.startswith("wrote merged, ternary linears dequantised to bf16, FOR EVALUATION ONLY: ")
        assert "every weight, in bf16, is" in said[0] and "not to serve" in said[-1]
        model, changes = read_case(case).model, wanted(GOLDEN / case / "adapter_init")
        stored = merged.read_weights(tmp_path / case)
        for module, change in changes.items():
            codes, scale = model.weights[f"{module}.weight"]
            tensor = stored[f"{module}.weight"]
            exact = codes * scale + change
            assert tensor.dtype == "bf16"
            # w * T is rounded to bf16 first, as a base in bf16 would be
            assert (np.abs(tensor.float32() - exact) <= 2.0**-7 * (np.abs(exact) + scale)).all()
        assert "quantization_config" not in json.loads((tmp_path / case / "config.json").read_text())
    argv = ["--adapter", DENSE / "adapter_init", "--model", DENSE, "--out", tmp_path / "d"]
    assert export(*argv, "--to", "merged", "--dequantise") == 2 and "leave it out" in capsys.readouterr().err
    assert export(*argv, "--to", "peft", "--dequantise") == 2 and "only --to merged" in capsys.readouterr().err
    assert export(*argv, "--to", "mlx", "--arch", "llama") == 2 and "only --to gguf" in capsys.readouterr().err


TOKENIZER = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": CHATML,
}  # fmt: skip


def gguf_with_tokenizer(path, **metadata):
    """The dense golden model as GGUF, its vocabulary one token for each byte and some control tokens."""
    alphabet = sorted(backend().get_vocab(), key=lambda t: (len(t), t))
    tokens = ["<unk>", "<s>", "</s>", *[t for t in alphabet if len(t) == 1]]
    tokens += [f"<extra_{i}>" for i in range(320 - len(tokens))]
    types = [3, 3, 3] + [1] * 317
    lists = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": ["a b"]}
    tokens[-1] = "ab"
    return write_gguf(path, metadata=TOKENIZER | lists | metadata)


def test_merging_a_gguf_makes_a_folder_of_its_own(tmp_path, capsys):
    model = gguf_with_tokenizer(tmp_path / "m.gguf")
    adapter = adapter_of(tmp_path / "a", DENSE)
    assert export("--adapter", adapter, "--to", "merged", "--model", model, "--out", tmp_path / "m") == 0
    capsys.readouterr()
    base, ours, changes = open_checkpoint(model), open_checkpoint(tmp_path / "m"), wanted(adapter)
    assert replace(ours.config, rope=base.config.rope) == base.config and ours.config.rope.theta == 10000
    assert ours.config.bos_token_id == 1 and ours.config.eos_token_ids == (2,)
    for name in base.keys():
        exact = base.dense(name).float32() + changes.get(name.removesuffix(".weight"), 0)
        np.testing.assert_allclose(ours.dense(name).float32(), exact, rtol=0, atol=1e-6)
    for text in ("abcab", "<s>ab</s> naïve"):
        assert ours.tokenizer().encode(text, add_special=True) == base.tokenizer().encode(text, add_special=True)
    assert ours.tokenizer().chat_template == CHATML and ours.tokenizer().add_bos


def test_rope_scaling_of_a_gguf_becomes_llama3s_again():
    llama3 = Rope(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    config = tiny_config(head_dim=64, max_position_embeddings=131072)
    plain = Rope(500000.0).inv_freq(64)
    factors = tuple((plain / llama3.inv_freq(64)).astype(np.float32).astype(float).tolist())
    theta, scaling = rope_settings(replace(config, rope=Rope(500000.0, freq_factors=factors)))
    assert theta == 500000.0 and scaling == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert rope_settings(replace(config, rope=Rope(1e4, freq_factors=(1.0,) * 32))) == (1e4, None)
    with pytest.raises(UserError, match="no Llama 3 scaling"):
        rope_settings(replace(config, rope=Rope(1e4, freq_factors=(1.0, 2.5) * 16)))


def test_weights_in_shards(tmp_path):
    checkpoint = TinyCheckpoint(tiny_config())
    write_weights(tmp_path, ((name, checkpoint.dense(name)) for name in checkpoint.keys()), shard=20_000)
    (tmp_path / "config.json").write_text(json.dumps(config_json(checkpoint.config, "float32")))
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    again = open_checkpoint(tmp_path)
    assert all(np.array_equal(again.dense(n).data, checkpoint.dense(n).data) for n in checkpoint.keys())


def test_an_adapter_that_rounding_takes_away_is_not_merged(tmp_path, capsys):
    """Changes far under half a unit of bf16: the merged model would be the base."""
    lora = LoraConfig(4, 8, LINEAR_MODULES)
    tensors = {n: t * 0.01 for n, t in random_adapter(lora, open_checkpoint(DENSE).config).items()}
    write_adapter(tmp_path / "a", lora, tensors, "base")
    assert export("--adapter", tmp_path / "a", "--to", "merged", "--model", DENSE, "--out", tmp_path / "m") == 1
    assert (
        "rounding takes the adapter away: serve it unmerged" in capsys.readouterr().err
        and not (tmp_path / "m").exists()
    )


# What is wrong is found, and nothing is left


@pytest.mark.parametrize("form", [peft, mlx, gguf], ids=lambda form: form.RUNTIME)
@pytest.mark.parametrize("fault", ["negated", "scale", "swapped", "missing", "rows"])
def test_a_wrong_export_is_found(tmp_path, capsys, monkeypatch, form, fault):
    read = form.read

    def wrong(folder, source):
        effect = dict(read(folder, source))
        q, k = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
        change = effect[q]
        if fault == "negated":
            effect[q] = replace(change, b=-change.b)
        if fault == "scale":
            effect[q] = replace(change, scale=change.scale * (1 + 1e-5))
        if fault == "swapped":
            effect[q], effect[k] = effect[k], effect[q]
        if fault == "missing":
            del effect[q]
        if fault == "rows":
            effect[q] = replace(change, b=gguf.permute(change.b, 4))
        return effect

    monkeypatch.setattr(form, "read", wrong)
    to = next(name for name, module in command.FORMATS.items() if module is form)
    adapter, out = adapter_of(tmp_path / "a", DENSE), tmp_path / "new" / "deep" / "out"
    assert export("--adapter", adapter, "--to", to, "--model", DENSE, "--out", out) == 1
    assert "self_attn.q_proj" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_wrong_merge_is_found(tmp_path, capsys, monkeypatch):
    adapter = adapter_of(tmp_path / "a", DENSE)
    right = merged.merged_tensors

    def wrong(source):
        for name, tensor in right(source):
            data = tensor.data.copy()
            if name == where:
                data[-1, -1] ^= 1 << 3  # one bit of one weight
            yield name, Dense(data, tensor.dtype)

    monkeypatch.setattr(merged, "merged_tensors", wrong)
    for where in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"):
        assert export("--adapter", adapter, "--to", "merged", "--model", DENSE, "--out", tmp_path / "m") == 1
        assert f"read back: {where} is not" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_and_an_interrupt_leave_nothing(tmp_path, monkeypatch, capsys):
    adapter = adapter_of(tmp_path / "a", DENSE)
    for error, code in ((OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130)):

        def failing(handle, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", failing)
            assert export("--adapter", adapter, "--to", "mlx", "--out", tmp_path / "new" / "m") == code
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_names_the_path(tmp_path, monkeypatch, capsys):
    """Neither numpy's short write nor Python's failed one names the file."""
    adapter = adapter_of(tmp_path / "a", DENSE)
    for error in (OSError("2048 requested and 32 written"), OSError(28, "No space left on device")):

        def failing(self, error=error):
            raise error

        monkeypatch.setattr("gguf.GGUFWriter.write_tensors_to_file", failing)
        assert export("--adapter", adapter, "--to", "gguf", "--out", tmp_path / "g") == 2
        assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'g'}: No space left on ")
        assert not (tmp_path / "g").exists()


@pytest.mark.parametrize("size", [1000, 4096])
def test_a_file_that_may_not_grow_on(tmp_path, capsys, size):
    """As on a full disk, at two places: where Python writes, and where numpy does, which does not notice at the end."""
    resource = pytest.importorskip("resource")
    adapter = adapter_of(tmp_path / "a", DENSE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        code = export("--adapter", adapter, "--to", "gguf", "--out", tmp_path / "g")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    err = capsys.readouterr().err
    assert code == 2 and err.startswith(f"error: {tmp_path / 'g'}: ") and ("No space" in err or "too large" in err), err


def test_nothing_is_overwritten(tmp_path, capsys):
    adapter, out = adapter_of(tmp_path / "a", DENSE), tmp_path / "out"
    out.mkdir()
    assert export("--adapter", adapter, "--to", "peft", "--out", out) == 0  # an empty folder is no loss
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert export("--adapter", adapter, "--to", "mlx", "--out", out) == 2
    assert f"{out}: exists already; remove it" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    with pytest.raises(UserError, match="exists already"), staged(adapter / "adapter_config.json"):
        pass


def test_an_adapter_on_the_head_is_refused(tmp_path, capsys):
    write_adapter(tmp_path / "a", LoraConfig(2, 4, ("lm_head",)), {
        "base_model.model.lm_head.lora_A.weight": np.ones((2, 64), np.float32),
        "base_model.model.lm_head.lora_B.weight": np.ones((320, 2), np.float32),
    }, "base")  # fmt: skip
    for more in ([], ["--model", DENSE]):
        assert export("--adapter", tmp_path / "a", "--to", "mlx", "--out", tmp_path / "m", *more) == 2
        assert "lm_head" in capsys.readouterr().err and not (tmp_path / "m").exists()


def test_mlx_cannot_adapt_bitnet_and_peft_is_warned_of_peculiar_settings(tmp_path, capsys):
    argv = ["--adapter", BITNET_CASE / "adapter_init", "--model", BITNET_CASE]
    assert export(*argv, "--to", "mlx", "--out", tmp_path / "m") == 0
    assert "Can't convert layer of type BitLinear to LoRA" in capsys.readouterr().out
    adapter = adapter_of(tmp_path / "a", DENSE)
    assert export("--adapter", adapter, "--to", "peft", "--out", tmp_path / "p") == 0
    assert "use_rslora, rank_pattern, alpha_pattern: PEFT applies them" in capsys.readouterr().out


def test_difference_equals_the_difference_of_whole_matrices():
    rng = np.random.default_rng(0)
    ours, theirs = (
        LowRank(rng.standard_normal((r, 33)).astype(np.float32), rng.standard_normal((57, r)).astype(np.float32), s)
        for r, s in ((4, 2.0), (7, 0.5))
    )
    want = np.linalg.norm(theirs.delta() - ours.delta()) / np.linalg.norm(ours.delta())
    assert difference(ours, theirs) == pytest.approx(want, rel=1e-5)  # float32 products
    assert difference(ours, replace(ours, b=ours.b * 4, scale=0.5)) < 1e-15
    assert difference(ours, replace(theirs, b=theirs.b * np.nan)) == np.inf
    zero = replace(ours, b=ours.b * 0)
    assert difference(zero, zero) == 0 and difference(zero, ours) > 1
    with pytest.raises(CheckFailed, match="m is in one of"):
        check_effect({"m": ours}, {}, "x")


def test_modules_with_names_that_are_no_linears():
    with pytest.raises(UserError, match="model.layers.0.self_attn.rotary"):
        effect_of(LoraConfig(1, 1, ("x",)), {"base_model.model.model.layers.0.self_attn.rotary.lora_A.weight": None})
