"""Tiny models on the GPU and in the float64 reference, with the weights of `lorawgpu doctor`."""

from dataclasses import replace

from lorawgpu.data.batching import flatten
from lorawgpu.doctor.tiny_models import TinyCheckpoint, random_adapter, random_samples, reference_model, tiny_config
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.engine.objective import CausalLM
from lorawgpu.families.modules import LINEAR_MODULES
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.optim.adamw import AdamW
from lorawgpu.weights.device_model import load_model

__all__ = ["ALL", "Tiny", "TinyCheckpoint", "gradients", "random_adapter", "random_samples", "tiny_config"]

ALL = LoraConfig(4, 8, LINEAR_MODULES)


class Tiny:
    """A checkpoint with an adapter, as an `engine` on the GPU and as a float64 `reference`."""

    def __init__(self, device, kernels, config=None, lora=ALL, *, checkpoint=None, tensors=None, seed=0):
        self.device, self.kernels, self.lora = device, kernels, lora
        self.checkpoint = checkpoint or TinyCheckpoint(config or tiny_config(), seed)
        self.config = self.checkpoint.config
        self.tensors = tensors or random_adapter(lora, self.config, seed)
        self.model = load_model(device, self.checkpoint)

    def engine(
        self, capacity=64, positions=64, optimizer=None, tensors=None, objective=CausalLM, exchange=None, **options
    ) -> Engine:
        return Engine(
            self.device,
            self.model,
            Options(capacity, positions, **options),
            AdapterLayout(self.lora, self.config),
            tensors or self.tensors,
            optimizer or AdamW(),
            self.kernels,
            objective,
            exchange,
        )

    def reference(self, **changes):
        model = reference_model(self.checkpoint, self.tensors, 1.0)
        scale = {linear: self.lora.scale(linear) for linear in model.scale}
        return replace(model, scale=scale, **changes)

    def gradients(self, samples, capacity=64, **options):
        """Loss and gradients of one micro-batch, summed over its targets, from a fresh engine."""
        return gradients(self.engine(capacity, **options), [flatten(samples, capacity)])


def gradients(engine, batches, step=1):
    """Loss and gradients of a step, summed over its targets."""
    engine.begin()
    for index, batch in enumerate(batches):
        engine.accumulate(batch, step, index)
    return engine.loss_sum(), engine.tensors("grads")
