"""A run on a device: load the model, record the largest plan, and say what would fit if it does not."""

from dataclasses import replace

from lorawgpu.data.batching import token_capacity
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.engine.exchange import Exchange
from lorawgpu.errors import DeviceError
from lorawgpu.gpu import KernelCache, device_errors
from lorawgpu.gpu.submit_budget import first_rate, flops_per_submit
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.optim.adamw import AdamW
from lorawgpu.train.setup import Run
from lorawgpu.util.progress import busy
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.synthetic import meta_model


def build_engine(run: Run, device, kernels: KernelCache | None = None, exchange: Exchange | None = None) -> Engine:
    """Load the model onto the device and record the plan of the largest micro-batch.

    After that the memory of the run is known, except for up to 26 MiB that split sums of a smaller plan may need. On a
    dry device no weights are read. Raises DeviceError if the run does not fit, with settings that would.
    """
    if not device.dry:
        run.model_digest.start()  # done before the first checkpoint needs it
    with device_errors():
        model = (meta_model if device.dry else load_model)(device, run.checkpoint)
        weights = dict(device.memory.held)
        try:
            with busy("compiling"):
                return engine_of(run, device, model, kernels, exchange)
        except DeviceError as error:
            reason = str(error)
    # Outside the except clause, because the exception holds the half-built engine and its buffers.
    raise DeviceError(f"{reason}\n{_advice(run, device, model, weights)}")


def engine_of(run: Run, device, model, kernels=None, exchange=None, **changed) -> Engine:
    """The engine of a run on a loaded model. changed: fields of Options."""
    config = run.config
    options = Options(
        capacity=run.capacity,
        positions=run.longest,
        dropout=config.lora_dropout,
        seed=config.seed,
        checkpointing=config.gradient_checkpointing,
        attention=config.attn_implementation,
        shares=run.shares,
        flops_per_submit=flops_per_submit(first_rate(device), config.max_dispatch_ms),
    )
    optimizer = AdamW(
        config.adam_beta1, config.adam_beta2, config.adam_epsilon, config.weight_decay, config.max_grad_norm
    )
    layout = AdapterLayout(run.lora, run.checkpoint.config)
    options = replace(options, **changed)
    return Engine(device, model, options, layout, run.start, optimizer, kernels, exchange=exchange)


def _advice(run: Run, device, model, weights: dict) -> str:
    """Settings that would fit, found by trying them on the device, the least costly first."""
    config, gc = run.config, run.config.gradient_checkpointing
    rows = config.sequence_len if config.sample_packing else run.longest
    sizes = [config.micro_batch_size >> i for i in range(1, config.micro_batch_size.bit_length())]
    checkpoint = [] if gc else ["gradient_checkpointing true"]  # what is set already is no advice
    tries = [([f"micro_batch_size {n}"], token_capacity(n, rows), gc) for n in sizes]
    if not gc:
        tries += [(checkpoint, run.capacity, True)]
        tries += [([*checkpoint, f"micro_batch_size {n}"], token_capacity(n, rows), True) for n in sizes]
    least = [*checkpoint, "micro_batch_size 1"] if config.micro_batch_size > 1 else checkpoint
    shorter = [rows >> i for i in range(1, rows.bit_length() - 4)]
    tries += [([*least, f"sequence_len {n}"], token_capacity(1, n), True) for n in shorter]
    for settings, capacity, checkpointing in tries:
        device.memory.held = dict(weights)
        try:
            engine_of(run, device, model, capacity=capacity, checkpointing=checkpointing)
        except DeviceError:
            continue
        raised = " (raise gradient_accumulation_steps to keep the number of tokens per step)"
        return f"It would fit with {_listed(settings)}{raised if 'micro_batch_size' in str(settings) else ''}."
    return (
        f"Not even one short sample fits next to {sum(weights.values()):,} bytes of weights: lower lora_r, or use a "
        "smaller model or another device."
    )


def _listed(settings: list[str]) -> str:
    return ", ".join(settings[:-1]) + " and " * (len(settings) > 1) + settings[-1]
