"""Random tiny models of any shape: as a checkpoint, on the GPU, and before the float64 reference."""

from dataclasses import replace

import numpy as np
from golden_case import reference_model

from lorawgpu.data.batching import Sample, flatten
from lorawgpu.engine import Engine, Options
from lorawgpu.model.adapter import adapter_shapes
from lorawgpu.model.adapter_layout import AdapterLayout
from lorawgpu.model.config import ModelConfig, Rope
from lorawgpu.model.layers import load_model
from lorawgpu.model.peft_config import LINEAR_MODULES, LoraConfig
from lorawgpu.model.tensors import Checkpoint, Dense, Ternary, expected_tensors, is_linear
from lorawgpu.optim.adamw import AdamW
from lorawgpu.reference.ternary import ternary_pack


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


ALL = LoraConfig(4, 8, LINEAR_MODULES)


class Tiny:
    """A checkpoint with an adapter; `engine` puts it on the GPU, `reference` before float64."""

    def __init__(self, device, kernels, config=None, lora=ALL, *, checkpoint=None, tensors=None, seed=0):
        self.device, self.kernels, self.lora = device, kernels, lora
        self.checkpoint = checkpoint or TinyCheckpoint(config or tiny_config(), seed)
        self.config = self.checkpoint.config
        self.tensors = tensors or random_adapter(lora, self.config, seed)
        self.model = load_model(device, self.checkpoint)

    def engine(self, capacity=64, positions=64, optimizer=None, tensors=None, **options) -> Engine:
        return Engine(
            self.device,
            self.model,
            Options(capacity, positions, **options),
            AdapterLayout(self.lora, self.config),
            tensors or self.tensors,
            optimizer or AdamW(),
            self.kernels,
        )

    def reference(self, **changes):
        model = reference_model(self.checkpoint, self.tensors, 1.0)
        scale = {linear: self.lora.scale(linear) for linear in model.scale}
        return replace(model, scale=scale, **changes)

    def gradients(self, samples, capacity=64, **options):
        """Loss and gradients of one micro-batch, summed over its targets, from a fresh engine."""
        return gradients(self.engine(capacity, **options), [flatten(samples, capacity)])


def gradients(engine, batches, step=1):
    """Loss and gradients of a window, summed over its targets."""
    engine.begin()
    for index, batch in enumerate(batches):
        engine.train(batch, step, index)
    return engine.loss_sum(), engine.tensors("grads")
