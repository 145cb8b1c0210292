"""What the tests of exports share: a golden adapter, a model that chats, the change of weights as PEFT defines it."""

import json
from pathlib import Path

import numpy as np
import safetensors.numpy
from golden_case import GOLDEN
from test_gguf import write_gguf
from tiny_model import TinyCheckpoint, random_adapter, tiny_config
from tiny_tokenizer import backend

from lorawgpu.chat.builtin import CHATML
from lorawgpu.export import __main__ as command
from lorawgpu.export.weights_file import write_weights
from lorawgpu.families.hf import to_hf
from lorawgpu.families.modules import LINEAR_MODULES
from lorawgpu.families.registry import FAMILIES
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import write_adapter
from lorawgpu.weights.loader import open_checkpoint

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
    sizes = {"vocab_size": backend().get_vocab_size(), "max_position_embeddings": 256}  # room for a sample transcript
    config = tiny_config(bos_token_id=0, eos_token_ids=(1,), **sizes)
    checkpoint = TinyCheckpoint(config)
    folder.mkdir()
    write_weights(folder, ((name, checkpoint.dense(name)) for name in checkpoint.keys()))
    (folder / "config.json").write_text(json.dumps(to_hf(config, FAMILIES["llama"], "float32")))
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


TOKENIZER = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": CHATML,
}  # fmt: skip


def gguf_with_tokenizer(path, blocks=None, **metadata):
    """The dense golden model as GGUF, its vocabulary one token for each byte and some control tokens.

    blocks: types of tensors, by Hugging Face's name.
    """
    alphabet = sorted(backend().get_vocab(), key=lambda t: (len(t), t))
    tokens = ["<unk>", "<s>", "</s>", *[t for t in alphabet if len(t) == 1]]
    tokens += [f"<extra_{i}>" for i in range(320 - len(tokens))]
    types = [3, 3, 3] + [1] * 317
    lists = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": ["a b"]}
    tokens[-1] = "ab"
    return write_gguf(path, blocks, TOKENIZER | lists | metadata)
