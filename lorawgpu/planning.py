"""What a run will do and need, in words, before its first step."""

from .engine import Engine
from .gpu.device import ADAPTER_LIMITS
from .pace import first_rate
from .run import Run


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def plan_text(run: Run, engine: Engine, resumed: str = "") -> str:
    """The plan as lines of `name  value`."""
    device, config = engine.device, run.config
    lines = {
        "device": f"{device.name}, {device.reason}; driver {device.driver}",
        "limits": ", ".join(f"{name} {mib(device.limits[name])}" for name in ADAPTER_LIMITS) + _splits(engine),
        "model": _model(run),
        "adapter": _adapter(run),
        "data": _data(run),
        "batches": f"up to {run.capacity} tokens x {config.gradient_accumulation_steps} a step"
        + (", packed" if config.sample_packing else f", {config.micro_batch_size} samples each"),
        "steps": f"{run.schedule.total_steps}, {config.lr_scheduler} from {config.learning_rate:g}"
        + (f" after {run.schedule.warmup_steps} of warmup" if run.schedule.warmup_steps else ""),
        "memory": f"{mib(device.memory.total)} of the device: "
        + ", ".join(f"{kind} {mib(n)}" for kind, n in sorted(device.memory.held.items(), key=lambda i: -i[1])),
        "submits": _submits(run, engine),
        "output": str(run.folder) + (f", resumed from {resumed}" if resumed else ""),
    }
    return "\n".join(f"{name:<8} {value}" for name, value in lines.items())


def _splits(engine: Engine) -> str:
    model = engine.model
    split = [f"{name} in {len(weight.parts)} parts" for name, weight in (("embedding", model.embedding),
             ("head", model.head)) if len(weight.parts) > 1]  # fmt: skip
    return "; " + ", ".join(split) if split else "; no matrix is split"


def _model(run: Run) -> str:
    c = run.checkpoint.config
    store = "ternary" if c.ternary else "dense"
    return (
        f"{run.checkpoint.name}: {c.family}, {store}, {c.num_hidden_layers} layers of {c.hidden_size}, "
        f"vocabulary {c.vocab_size}"
    )


def _adapter(run: Run) -> str:
    trained = sum(t.size for t in run.start.values())
    source = f", continued from {run.config.adapter}" if run.config.adapter else ""
    return f"r {run.lora.r}, alpha {run.lora.alpha:g}, {trained:,} trainable parameters{source}"


def _data(run: Run) -> str:
    counts, held_out = run.data.counts, run.data.validation
    text = f"{counts.samples:,} samples, {counts.tokens:,} tokens, {counts.trained_tokens:,} of them trained"
    for name in ("truncated", "dropped", "skipped"):
        if n := getattr(counts, name):
            text += f", {n:,} {name}"
    return text + (f"; {len(held_out):,} samples held out" if held_out is not None else "")


def _submits(run: Run, engine: Engine) -> str:
    plan = engine.plan("train", run.capacity).plan
    flops = sum(r.flops for section in plan.sections.values() for r in section)
    count, step = max(1, round(flops / plan.flops_per_submit)), flops * run.config.gradient_accumulation_steps
    return (
        f"about {count} a micro-batch, each within {run.config.max_dispatch_ms:g} ms; "
        f"a full step is {step:.2g} operations, at first guess {step / first_rate(engine.device):.2g} s"
    )
