"""The plan that a run prints before its first step: what it will do, and the memory it needs."""

from lorawgpu.chat.prompt_check import prompt_note
from lorawgpu.engine.engine import Engine
from lorawgpu.gpu.device import ADAPTER_LIMITS
from lorawgpu.gpu.submit_budget import first_rate
from lorawgpu.lora.ends import end_paths, saved_name
from lorawgpu.ops.stores import STORES
from lorawgpu.train.setup import Run
from lorawgpu.train.shares import exchange_seconds
from lorawgpu.util.duration import duration
from lorawgpu.weights.gguf_checkpoint import lost_window
from lorawgpu.weights.quantized import QuantizedAtLoad
from lorawgpu.weights.tensors import Checkpoint, is_linear


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def plan_of(run: Run, engine: Engine) -> dict[str, str]:
    """The plan of a run, item by item."""
    device, config = engine.device, run.config
    held = sorted(device.memory.held.items(), key=lambda item: -item[1])
    plan = {
        "device": f"{device.name}, {device.reason}; driver {device.driver}",
        "limits": ", ".join(f"{name} {mib(device.limits[name])}" for name in ADAPTER_LIMITS) + _splits(engine),
        "model": model_text(run.checkpoint),
        "adapter": _adapter(run),
        "data": _data(run),
        "batches": f"up to {run.capacity} tokens x {sum(run.shares)} per step"
        + (", packed" if config.sample_packing else f", {config.micro_batch_size} samples each"),
        "steps": f"{run.schedule.total_steps}, {config.lr_scheduler} from {config.learning_rate:g}"
        + (f" after {run.schedule.warmup_steps} of warmup" if run.schedule.warmup_steps else ""),
        "memory": f"{mib(device.memory.total)} on the device: " + ", ".join(f"{kind} {mib(n)}" for kind, n in held),
        "submits": _submits(run, engine),
    }
    return (
        plan
        | _products(device)
        | _ranks(run, engine)
        | ({"note": "; ".join(notes)} if (notes := notes_of(run)) else {})
    )


def notes_of(run: Run) -> list[str]:
    """What a user may not expect."""
    notes = list(run.data.notes)
    if differing := run.data.counts.other_prompt:
        notes.append(f"{differing:,} samples: {prompt_note(run.text.template).removeprefix('note: ')}")
    if window := lost_window(run.checkpoint, run.longest):
        notes.append(window)
    return notes


def _products(device) -> dict[str, str]:
    """What matrix cores do; nothing without them."""
    if not (cores := device.matrix):
        return {}
    accuracy = "one product of values rounded to f16: gradients are off by 2e-4" if cores.fast else "exact to float32"
    return {"products": f"matrix cores, {device.matrix_note}; {accuracy}"}


def _ranks(run: Run, engine: Engine) -> dict[str, str]:
    """Who computes what, and what the exchange costs; nothing for one process."""
    exchange = engine.exchange
    if exchange.size == 1:
        return {}
    shares = zip(exchange.names, run.shares, strict=True)
    who = [f"{name}: {share} of {sum(run.shares)} micro-batches" for name, share in shares]
    text = f"{mib(engine.shards.nbytes)} leave each rank in a step"
    if not engine.device.dry:
        text += f", {exchange_seconds(engine) * 1000:,.1f} ms if nothing were computed meanwhile"
    step = run.capacity * sum(run.shares)
    return {"ranks": f"{exchange.size}, up to {step:,} tokens a step; " + "; ".join(who), "exchange": text}


def plan_text(plan: dict[str, str]) -> str:
    """One line per item."""
    return "\n".join(f"{name:<8} {value}" for name, value in plan.items())


def _splits(engine: Engine) -> str:
    """Names the matrices that are too large for one binding."""
    weights = engine.model.matrices().items()
    split = [f"{name} in {len(weight.parts)} parts" for name, weight in weights if len(weight.parts) > 1]
    return "; split: " + ", ".join(split) if split else "; no matrix is split"


def model_text(checkpoint: Checkpoint) -> str:
    """A model's name, family and size."""
    c = checkpoint.config
    return (
        f"{checkpoint.name}: {c.family}, {_stores(checkpoint)}, {c.num_hidden_layers} layers of "
        f"{c.hidden_size}, vocabulary {c.vocab_size}"
    )


def _stores(checkpoint: Checkpoint) -> str:
    if isinstance(checkpoint, QuantizedAtLoad):
        return checkpoint.summary()
    stores = {STORES[checkpoint.store(name)] for name in checkpoint.keys() if is_linear(name)}
    blocks = sorted(store.name for store in stores if store.unit)
    return "blocks of " + ", ".join(blocks) if blocks else "ternary" if checkpoint.config.ternary else "dense"


def _adapter(run: Run) -> str:
    trained = sum(t.size for t in run.start.values())
    source = f", continued from {run.config.start_from}" if run.config.start_from else ""
    return f"r {run.lora.r}, alpha {run.lora.alpha:g}, {trained:,} trainable parameters{source}{_ends(run)}"


def _ends(run: Run) -> str:
    """What is trained of embedding and head without LoRA, and the memory of a whole matrix."""
    lora, text = run.lora, ""
    for end, ids in lora.trainable_token_indices.items():
        text += f"; {len(ids)} rows of {end}"
    if lora.modules_to_save:
        names = (saved_name(end_paths(run.checkpoint.config)[end]) for end in lora.modules_to_save)
        nbytes = 16 * sum(run.start[name].size for name in names)
        text += (
            f"; all of {' and '.join(lora.modules_to_save)} in float32: {mib(nbytes)} with gradients and moments, "
            "next to the model's own (peft_trainable_token_indices trains the rows of some tokens only)"
        )
    return text


def _data(run: Run) -> str:
    counts, held_out = run.data.counts, run.data.validation
    text = f"{counts.samples:,} samples, {counts.tokens:,} tokens ({counts.trained_tokens:,} targets)"
    why = f" (longer than sequence_len {run.config.sequence_len}: raise it, or set excess_length_strategy: truncate)"
    if run.config.excess_length_strategy == "truncate":
        why = f" (no target token in their first {run.config.sequence_len} tokens: raise sequence_len)"
    for name, note in (("truncated", ""), ("dropped", why), ("skipped", "")):
        if n := getattr(counts, name):
            text += f", {n:,} {name}{note}"
    if run.longest > (context := run.checkpoint.config.max_position_embeddings):
        text += (
            f", the longest has {run.longest:,} tokens: beyond the model's context of {context:,}, a limit for generate"
        )
    if counts.empty_targets:
        text += f", {counts.empty_targets:,} with an empty answer to train on (see --preview)"
    if hidden := counts.hidden():
        listed = ", ".join(f"{kind} of {count:,} samples" for kind, count in hidden.items())
        text += f", not shown by the chat template: {listed} (see --preview)"
    if counts.boundary_tokens:
        text += f", {counts.boundary_tokens:,} tokens span trained and untrained text (they are trained)"
    if held_out is None:
        return text
    return f"{text}; {len(held_out):,} samples, {int(held_out.lengths.sum()):,} tokens held out, {_evaluations(run)}"


def _evaluations(run: Run) -> str:
    every = run.intervals.eval
    return f"evaluated every {every} steps" if every else "evaluated after each epoch"


def _submits(run: Run, engine: Engine) -> str:
    recorded = engine.plan("train", run.capacity)
    flops = recorded.flops(run.capacity)
    count, step = max(1, round(flops / recorded.plan.flops_per_submit)), flops * run.shares[engine.exchange.rank]
    seconds, steps = step / first_rate(engine.device), run.schedule.total_steps
    return (
        f"about {count} per micro-batch, each within {run.config.max_dispatch_ms:g} ms; a full step is {step:.2g} "
        f"operations, at first guess about {duration(seconds)}, {duration(seconds * steps)} for {steps:,} steps"
    )
