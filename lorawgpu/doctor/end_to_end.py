"""Tiny models end to end against the float64 reference: loss, logits, gradients, optimizer steps, decoding."""

import time
from collections.abc import Iterator

import numpy as np

from lorawgpu.data.batching import flatten
from lorawgpu.doctor.check import Outcome
from lorawgpu.doctor.tiny_models import TinyCheckpoint, random_adapter, random_samples, reference_model, tiny_config
from lorawgpu.errors import DeviceError
from lorawgpu.families.modules import LINEAR_MODULES
from lorawgpu.generate.decoder import Decoder
from lorawgpu.gpu import GPUError, KernelCache
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.model.context import AdapterBuffers
from lorawgpu.reference.model import model_forward, step_gradients, train
from lorawgpu.verify import cases as golden
from lorawgpu.verify import compare
from lorawgpu.verify.run import run_case
from lorawgpu.weights.device_model import load_model

LORA = LoraConfig(4, 8, LINEAR_MODULES)
LENGTHS = 17, 9
FAMILIES = "llama", "bitnet"
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0}


class Tiny:
    """A tiny model of a family with an adapter, and the reference's results for a batch."""

    def __init__(self, family: str):
        self.checkpoint = TinyCheckpoint(tiny_config(family, head_dim=8))
        self.config = self.checkpoint.config
        self.tensors = random_adapter(LORA, self.config)
        self.samples = random_samples(LENGTHS, self.config.vocab_size)
        self.batch = flatten(self.samples, sum(LENGTHS))
        self.reference = reference_model(self.checkpoint, self.tensors, LORA.alpha / LORA.r)

    def case(self) -> golden.GoldenCase:
        """A golden case computed by the reference. BitNet's roundings may flip on some GPUs."""
        mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
        margin = {phase: 0.0 for phase in ("loss", "steps")} if self.config.ternary else None
        settings = {"adamw": ADAMW, "rounding_margin": margin}
        names = self.config.family, self.checkpoint, LORA, self.tensors, self.samples, mask, settings
        return golden.GoldenCase(*names, self.expected(mask))

    def expected(self, mask) -> dict:
        logits = np.zeros((*mask.shape, self.config.vocab_size))
        logits[mask] = model_forward(self.reference, self.batch)[0]
        loss, grads = step_gradients(self.reference, [self.batch])
        losses, norms, after = train(self.reference, [self.batch], golden.STEPS, **ADAMW)
        values = {"loss": loss, "logits": logits, "step_losses": np.array(losses), "grad_norms": np.array(norms)}
        values |= {f"grad.{name}": g for name, g in grads.items()}
        return values | {f"after3.{name}": p for name, p in after.items()}

    def decoded(self, device, kernels: KernelCache) -> tuple[np.ndarray, np.ndarray]:
        """Logits after the last token of each sample, computed in a decode step, and the reference's."""
        layout = AdapterLayout(LORA, self.config)
        params = device.upload(layout.flatten(self.tensors), label="adapter params", kind="adapter")
        model, adapter = load_model(device, self.checkpoint), AdapterBuffers(layout, params)
        count = len(self.samples)
        decoder = Decoder(device, model, adapter, context=32, sequences=count, prefill_rows=32, kernels=kernels)
        decoder.start([s.input_ids[:-1] for s in self.samples])
        decoder.extend([s.input_ids[-1:] for s in self.samples])
        return decoder.read_logits(count), model_forward(self.reference, self.batch)[0][np.cumsum(LENGTHS) - 1]


def check_training(device, kernels: KernelCache, family: str) -> Iterator[Outcome]:
    """Loss, logits, gradients and three optimizer steps of a tiny model; one outcome per quantity."""
    name, began = f"tiny {family} model", time.perf_counter()
    try:
        case = Tiny(family).case()
        checks = compare.compare(case, run_case(device, case, kernels))
    except (DeviceError, GPUError, ValueError) as found:
        yield Outcome(name, "training", None, 0.0, fault=str(found))
        return
    for check in checks:
        yield Outcome(name, check.key, check.error, check.tolerance, check.where, "", time.perf_counter() - began)
        began = time.perf_counter()


def check_decoding(device, kernels: KernelCache, family: str) -> Outcome:
    """Decode one token of each of two sequences with the KV cache."""
    name, tiny, began = f"tiny {family} model", Tiny(family), time.perf_counter()
    tolerance = golden.FLIP_TOLERANCE if tiny.config.ternary else golden.TOLERANCE
    try:
        error = compare.relative_error(*tiny.decoded(device, kernels))
    except (DeviceError, GPUError, ValueError) as found:
        return Outcome(name, "decoding", None, tolerance, fault=str(found))
    return Outcome(name, "decoding", error, tolerance, seconds=time.perf_counter() - began)
