"""Computes the results of a golden case on a device."""

import numpy as np

from lorawgpu.data.batching import bucket, flatten
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.engine.readings import settled
from lorawgpu.generate.decoder import Decoder
from lorawgpu.gpu import KernelCache
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.optim.adamw import AdamW
from lorawgpu.verify.cases import STEPS, GoldenCase, Result
from lorawgpu.weights.device_model import load_model


def optimizer_of(settings: dict) -> AdamW:
    """AdamW with the settings of case.json's `adamw`; defaults for a case without optimizer steps."""
    if not settings:
        return AdamW()
    beta1, beta2 = settings["betas"]
    return AdamW(beta1, beta2, settings["eps"], settings["weight_decay"], settings["max_grad_norm"] or 0.0)


def tokens_to_decode(case: GoldenCase, kind: str) -> tuple[np.ndarray, int]:
    """Prompt and expected continuation of `kind` as ids, and the length of the prompt."""
    prompt, text = case.expected[f"{kind}_prompt"], case.expected[kind]
    return np.concatenate([prompt, text]).astype(np.int32), len(prompt)


def logits_before(device, model, adapter, ids: np.ndarray, start: int, kernels: KernelCache) -> np.ndarray:
    """Logits [len(ids) - start, V] before each token from `start` on, decoded as in `generate` with `ids` as input.

    adapter: the buffers of an engine, or None for the base model.
    """
    decoder = Decoder(device, model, adapter, context=len(ids), kernels=kernels)
    decoder.start([ids[:start].tolist()])
    rows = [decoder.read_logits(1)[0]]
    for token in ids[start:-1].tolist():
        decoder.extend([[token]])
        rows.append(decoder.read_logits(1)[0])
    return np.array(rows)


def run_case(device, case: GoldenCase, kernels: KernelCache | None = None, **options) -> Result:
    """Compute on `device` everything that a case expects; `options` are passed to engine.Options."""
    model = load_model(device, settled(device, case.checkpoint))
    greedy = {kind: tokens_to_decode(case, kind) for kind in ("greedy", "base_greedy") if kind in case.expected}
    tokens, longest = sum(len(s) for s in case.samples), max(len(s) for s in case.samples)
    options = Options(bucket(tokens), longest, **options)
    layout = AdapterLayout(case.lora, case.checkpoint.config)
    adamw = case.settings.get("adamw") or {}
    engine = Engine(device, model, options, layout, case.tensors, optimizer_of(adamw), kernels)
    batch, result = flatten(case.samples, bucket(tokens)), Result()
    if case.has("loss", "grad.", "grad_norm."):
        engine.begin()
        engine.accumulate(batch)
        result.loss = engine.loss_sum() / batch.targets
        result.grads = {name: g / batch.targets for name, g in engine.tensors("grads").items()}
    if case.has("logits"):
        result.logits = engine.logits(batch, np.arange(tokens))
    if case.has("step_losses", "grad_norms", "after3.", "greedy"):
        result.step_losses, result.grad_norms = take_steps(engine, batch, adamw["lr"])
        result.after3 = engine.tensors()
    for kind, (ids, start) in greedy.items():
        adapter = engine.adapter if kind == "greedy" else None
        setattr(result, kind, logits_before(device, model, adapter, ids, start, engine.kernels))
    return result


def take_steps(engine: Engine, batch, lr: float) -> tuple[list, list]:
    """Take STEPS optimizer steps on one batch; returns their losses and gradient norms."""
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        engine.step([batch], step, lr)
        losses.append(engine.loss_sum() / batch.targets)
        norms.append(engine.grad_norm())
    return losses, norms
