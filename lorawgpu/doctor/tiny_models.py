"""Tiny models of any shape with seeded random weights: as a checkpoint, and for the float64 reference."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from lorawgpu.data.batching import Sample
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import equal_layers
from lorawgpu.families.registry import FAMILIES
from lorawgpu.families.rope import Rope
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import adapter_shapes
from lorawgpu.reference.model import ReferenceModel
from lorawgpu.reference.ternary import ternary_pack, ternary_unpack
from lorawgpu.weights.tensors import Checkpoint, Dense, Ternary, expected_tensors, is_linear

SIZES = {"count": 2, "hidden": 40, "heads": 3, "kv_heads": 1, "head_dim": 10, "width": 72, "rope": Rope(1000.0)}


def tiny_config(family="llama", **changes) -> ModelConfig:
    """Two layers. No width is a multiple of 16, HD is not C/NH, three query heads share a key head.

    `changes` replace fields of ModelConfig, and sizes and options of the layers (the keys of `SIZES`, act, norms).
    """
    bitnet = family == "bitnet"
    act, norms = FAMILIES[family].gguf.act, FAMILIES[family].norms
    sizes = SIZES | {"act": act, "norms": norms} | {k: v for k, v in changes.items() if k in (*SIZES, "act", "norms")}
    config = ModelConfig(
        family=family,
        vocab_size=101,
        hidden_size=sizes["hidden"],
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=bitnet,
        ternary="multiply" if bitnet else None,
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
        layers=equal_layers(**sizes),
    )
    return replace(config, **{k: v for k, v in changes.items() if k not in sizes})


class TinyCheckpoint(Checkpoint):
    """Random weights, scaled so that activations stay near 1 and every part of the network matters."""

    def __init__(self, config: ModelConfig, seed=0):
        self.config, self.name, self.path = config, "tiny", Path("tiny")  # the path is for messages alone
        rng, self.weights = np.random.default_rng(seed), {}
        for name, shape in expected_tensors(config).items():
            if len(shape) == 1:
                weight = Dense(rng.uniform(0.5, 1.5, shape).astype(np.float32), "f32")
            elif config.ternary and is_linear(name):
                codes = rng.integers(-1, 2, shape)
                weight = Ternary(ternary_pack(codes), shape[0], float(rng.uniform(1, 2) / np.sqrt(shape[1])))
            else:
                scale = 1.0 if "embed" in name else 1.5 / np.sqrt(shape[1])
                weight = Dense((scale * rng.standard_normal(shape)).astype(np.float32), "f32")
            self.weights[name] = weight

    def settings(self):
        return b"tiny"

    def dense(self, name):
        return self.weights[name]

    ternary = dense

    def tokenizer(self):
        raise NotImplementedError


def random_adapter(lora: LoraConfig, config: ModelConfig, seed=0) -> dict:
    """A random adapter with nonzero A and B, so that no gradient is zero."""
    rng = np.random.default_rng((seed, 1))
    return {
        name: (rng.standard_normal(shape) * (0.5 / np.sqrt(shape[1]))).astype(np.float32)
        for name, shape in adapter_shapes(lora, config).items()
    }


def random_samples(lengths, vocab=101, seed=0) -> list:
    """Random sequences of these lengths; about every third token carries no loss."""
    rng, samples = np.random.default_rng((seed, 2)), []
    for n in lengths:
        ids = rng.integers(0, vocab, n).astype(np.int32)
        samples.append(Sample(ids, np.where(rng.random(n) < 0.7, ids, -100).astype(np.int32)))
    return samples


def reference_model(checkpoint: Checkpoint, adapter: dict, scale: float) -> ReferenceModel:
    """The reference model of a checkpoint with an adapter (PEFT name -> array); all modules have the same `scale`."""

    def weight(name):
        if checkpoint.config.ternary and is_linear(name):
            stored = checkpoint.ternary(name)
            return ternary_unpack(stored.packed, stored.out), stored.scale
        values = checkpoint.norm(name) if name.endswith("norm.weight") else checkpoint.dense(name).float32()
        return values.astype(np.float64)

    scales = {name.removeprefix("base_model.model.").split(".lora_")[0]: scale for name in adapter}
    return ReferenceModel(
        checkpoint.config,
        {name: weight(name) for name in checkpoint.keys()},
        {name: a.astype(np.float64) for name, a in adapter.items()},
        scales,
    )
