"""Merged weights: base and change rounded once, in the base's dtype; ternary bases are refused or dequantized."""

import json
import shutil

import numpy as np
import pytest
from exports import DENSE, adapter_of, export, gguf_with_tokenizer, wanted
from gguf import GGMLQuantizationType
from golden_case import GOLDEN, reference_case
from tiny_model import TinyCheckpoint, random_adapter, tiny_config

from lorawgpu.chat.builtin import CHATML
from lorawgpu.errors import UserError
from lorawgpu.export import merged
from lorawgpu.export.source import open_source
from lorawgpu.export.weights_file import write_weights
from lorawgpu.families.hf import to_hf
from lorawgpu.families.modules import LINEAR_MODULES
from lorawgpu.families.registry import FAMILIES
from lorawgpu.families.rope import Rope, rope_settings
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import write_adapter
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.tensors import Dense


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


def test_a_head_of_its_own_stays_untied(tmp_path):
    base = shutil.copytree(DENSE, tmp_path / "base")
    stored = {name: (t.data, t.dtype) for name, t in merged.read_weights(base).items()}
    stored["lm_head.weight"] = (stored["model.embed_tokens.weight"][0][::-1].copy(), "bf16")
    write_weights(base, ((name, Dense(*value)) for name, value in stored.items()))
    source = open_source(str(adapter_of(tmp_path / "a", base)), str(base), True)
    (out := tmp_path / "m").mkdir()
    merged.write(out, source)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    head, embedding = (open_checkpoint(out).dense(n).data for n in ("lm_head.weight", "model.embed_tokens.weight"))
    np.testing.assert_array_equal(head, embedding[::-1])


def test_bf16_rounds_to_nearest_even():
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.4e38], np.float32)
    assert merged.narrow(values, "bf16").float32().tolist() == [1, 1, 1 + 2**-6, 1 + 2**-7, -1, np.inf]


def test_a_ternary_base_is_not_merged(tmp_path, capsys):
    for case in ("bitnet_packed", "bitnet_master", "llama_bitlinear"):
        argv = ["--adapter", GOLDEN / case / "adapter_init", "--model", GOLDEN / case, "--to", "merged"]
        assert export(*argv, "--out", tmp_path / case) == 2
        assert "is ternary, so an adapter cannot be merged into it" in capsys.readouterr().err
        assert export(*argv, "--out", tmp_path / case, "--dequantize") == 0
        first, *notes = capsys.readouterr().out.splitlines()
        assert first.startswith("wrote merged, ternary layers dequantized to bf16, FOR EVALUATION ONLY: ")
        assert "every weight, in bf16, is" in notes[0] and "not to serve it" in " ".join(notes)
        model, changes = reference_case(case).model, wanted(GOLDEN / case / "adapter_init")
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
    assert export(*argv, "--to", "merged", "--dequantize") == 2 and "remove it" in capsys.readouterr().err
    assert export(*argv, "--to", "peft", "--dequantize") == 2 and "only --to merged" in capsys.readouterr().err
    assert export(*argv, "--to", "mlx", "--arch", "llama") == 2 and "only --to gguf" in capsys.readouterr().err


def test_merging_a_gguf_writes_a_hugging_face_folder(tmp_path, capsys):
    model = gguf_with_tokenizer(tmp_path / "m.gguf")
    adapter = adapter_of(tmp_path / "a", DENSE)
    assert export("--adapter", adapter, "--to", "merged", "--model", model, "--out", tmp_path / "m") == 0
    capsys.readouterr()
    base, ours, changes = open_checkpoint(model), open_checkpoint(tmp_path / "m"), wanted(adapter)
    assert ours.config == base.config and ours.config.layers[0].attention.rope.theta == 10000
    assert ours.config.bos_token_id == 1 and ours.config.eos_token_ids == (2,)
    for name in base.keys():
        exact = base.dense(name).float32() + changes.get(name.removesuffix(".weight"), 0)
        np.testing.assert_allclose(ours.dense(name).float32(), exact, rtol=0, atol=1e-6)
    for text in ("abcab", "<s>ab</s> naïve"):
        assert ours.tokenizer().encode(text, add_special=True) == base.tokenizer().encode(text, add_special=True)
    assert ours.tokenizer().chat_template == CHATML and ours.tokenizer().add_bos


def test_a_quantized_gguf_is_merged_only_as_float32(tmp_path, capsys):
    name = "model.layers.0.mlp.up_proj.weight"
    model = gguf_with_tokenizer(tmp_path / "m.gguf", {name: GGMLQuantizationType.Q4_0})
    argv = ["--adapter", adapter_of(tmp_path / "a", DENSE), "--to", "merged", "--model", model, "--out", tmp_path / "m"]
    assert export(*argv) == 2 and "add --dequantize" in capsys.readouterr().err
    assert export(*argv, "--dequantize") == 0 and "the base model was quantized" in capsys.readouterr().out
    exact = open_checkpoint(model).dense(name).float32() + wanted(tmp_path / "a").get(name.removesuffix(".weight"), 0)
    np.testing.assert_allclose(open_checkpoint(tmp_path / "m").dense(name).float32(), exact, rtol=0, atol=1e-6)


def test_rope_scaling_of_a_gguf_becomes_llama3s_again():
    llama3 = Rope(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    plain = Rope(500000.0).inv_freq(64)
    factors = tuple((plain / llama3.inv_freq(64)).astype(np.float32).astype(float).tolist())
    theta, scaling = rope_settings(Rope(500000.0, freq_factors=factors), 64, 131072)
    assert theta == 500000.0 and scaling == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert rope_settings(Rope(1e4, freq_factors=(1.0,) * 32), 64, 131072) == (1e4, None)
    with pytest.raises(UserError, match="not a Llama 3 scaling"):
        rope_settings(Rope(1e4, freq_factors=(1.0, 2.5) * 16), 64, 131072)


def test_weights_in_shards(tmp_path):
    checkpoint = TinyCheckpoint(tiny_config())
    write_weights(tmp_path, ((name, checkpoint.dense(name)) for name in checkpoint.keys()), shard=20_000)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(checkpoint.config, FAMILIES["llama"], "float32")))
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    again = open_checkpoint(tmp_path)
    assert all(np.array_equal(again.dense(n).data, checkpoint.dense(n).data) for n in checkpoint.keys())


def test_an_adapter_that_rounding_removes_is_not_merged(tmp_path, capsys):
    """The changes are far below half a unit of bf16, so the merged model would be the base."""
    lora = LoraConfig(4, 8, LINEAR_MODULES)
    tensors = {n: t * 0.01 for n, t in random_adapter(lora, open_checkpoint(DENSE).config).items()}
    write_adapter(tmp_path / "a", lora, tensors, "base")
    assert export("--adapter", tmp_path / "a", "--to", "merged", "--model", DENSE, "--out", tmp_path / "m") == 1
    assert "removes the adapter: serve it unmerged" in capsys.readouterr().err and not (tmp_path / "m").exists()


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
