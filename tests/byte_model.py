"""The smallest golden model with a tokenizer of bytes, a chat template and its adapter: something to talk with."""

import json
import shutil

import tokenizers
from golden_case import GOLDEN

from lorawgpu.api.model import LoadedModel
from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.lora.peft_dir import read_adapter
from lorawgpu.tokenizer.hf import Tokenizer
from lorawgpu.weights.loader import open_checkpoint

CASE = GOLDEN / "llama_dense"
CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]


def byte_backend():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    control = [tokenizers.AddedToken(t, special=True, normalized=False) for t in CONTROL]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=261,
        special_tokens=control,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([], trainer)
    return backend


def byte_tokenizer(**special):
    return Tokenizer(byte_backend(), {"bos_token": "<s>", "eos_token": "</s>", **special}, None, "bytes")


def save_byte_model(path):
    """The golden model with a tokenizer, a ChatML template and room for 160 tokens."""
    shutil.copytree(CASE, path)
    byte_backend().save(str(path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": BUILT_IN["chatml"]}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 160}))
    return path


def load_byte_model(folder, device, kernels) -> LoadedModel:
    """That model on a device, with the golden adapter."""
    checkpoint = open_checkpoint(folder)
    return LoadedModel(device, checkpoint, read_adapter(CASE / "adapter_init", checkpoint.config), kernels=kernels)
