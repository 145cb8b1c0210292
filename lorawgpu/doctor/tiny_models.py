"""Tiny models of any shape with random weights from a seed: as a checkpoint, and before the float64 reference."""

from dataclasses import replace

import numpy as np

from lorawgpu.data.batching import Sample
from lorawgpu.families.config import ModelConfig, Rope
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import adapter_shapes
from lorawgpu.reference.model import Model
from lorawgpu.reference.ternary import ternary_pack, ternary_unpack
from lorawgpu.weights.tensors import Checkpoint, Dense, Ternary, expected_tensors, is_linear


def tiny_config(family="llama", **changes) -> ModelConfig:
    """Two layers; no width but the vocabulary's is a multiple of 16, HD is not C/NH, three query heads share a key."""
    bitnet = family == "bitnet"
    config = ModelConfig(
        family=family,
        vocab_size=101,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope=Rope(1000.0),
        act="relu2" if bitnet else "silu",
        sub_norms=bitnet,
        tie_word_embeddings=bitnet,
        ternary="multiply" if bitnet else None,
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
    )
    return replace(config, **changes)


class TinyCheckpoint(Checkpoint):
    """Random weights; the scales keep activations near one, so that no part of the network is asleep."""

    def __init__(self, config: ModelConfig, seed=0):
        self.config, self.name = config, "tiny"
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

    def dense(self, name):
        return self.weights[name]

    ternary = dense

    def tokenizer(self):
        raise NotImplementedError


def random_adapter(lora: LoraConfig, config: ModelConfig, seed=0) -> dict:
    """Neither A nor B is zero: every gradient is alive."""
    rng = np.random.default_rng((seed, 1))
    return {
        name: (rng.standard_normal(shape) * (0.5 / np.sqrt(shape[1]))).astype(np.float32)
        for name, shape in adapter_shapes(lora, config).items()
    }


def random_samples(lengths, vocab=101, seed=0) -> list:
    """Sequences of these lengths; every third token or so has no loss."""
    rng, samples = np.random.default_rng((seed, 2)), []
    for n in lengths:
        ids = rng.integers(0, vocab, n).astype(np.int32)
        samples.append(Sample(ids, np.where(rng.random(n) < 0.7, ids, -100).astype(np.int32)))
    return samples


def reference_model(checkpoint: Checkpoint, adapter: dict, scale: float) -> Model:
    """The reference's view of a checkpoint with an adapter, PEFT name -> array, of one scale."""

    def weight(name):
        if checkpoint.config.ternary and is_linear(name):
            stored = checkpoint.ternary(name)
            return ternary_unpack(stored.packed, stored.out), stored.scale
        return checkpoint.dense(name).float32().astype(np.float64)

    scales = {name.removeprefix("base_model.model.").split(".lora_")[0]: scale for name in adapter}
    return Model(
        checkpoint.config,
        {name: weight(name) for name in checkpoint.keys()},
        {name: a.astype(np.float64) for name, a in adapter.items()},
        scales,
    )
