"""`--memory SIZE`: settings with which a run fits into that much GPU memory, the fastest first."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import yaml

from lorawgpu.config.schema import TrainConfig
from lorawgpu.data.batch_order import Batches
from lorawgpu.data.batching import token_capacity
from lorawgpu.errors import DeviceError, UserError
from lorawgpu.gpu import KernelCache
from lorawgpu.train.checkpoint import Snapshot
from lorawgpu.train.placement import engine_of
from lorawgpu.train.setup import Run
from lorawgpu.train.trainer import Trainer
from lorawgpu.weights.synthetic import meta_model

UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}
RESERVE, SHARE = 0.7 * 2**30, 0.1  # left to desktop and driver: bytes, or this share of less memory
SHORTEST = 16  # tokens
PICKED = ("micro_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "sequence_len")


@dataclass(frozen=True)
class CardMemory:
    """A GPU's memory as the user gave it, in `text` and in bytes."""

    text: str
    size: int

    @staticmethod
    def read(text: str) -> "CardMemory":
        """UserError unless it is a size such as 8GiB."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([gm]i?b)", text.strip().lower())
        size = int(Fraction(match[1]) * UNITS[match[2]]) if match else 0
        if not size:
            raise UserError(f"--memory {text!r}: wanted the GPU's memory in GiB, GB, MiB or MB, such as 8GiB")
        return CardMemory(text, size)

    @staticmethod
    def holding(nbytes: int) -> "CardMemory":
        """The smallest memory that leaves so much for a run, in rounded figures."""
        unit = "GiB" if nbytes > 2**30 else "MiB"
        tenths = math.ceil(10 * min(nbytes + RESERVE, nbytes / (1 - SHARE)) / UNITS[unit.lower()])
        sizes = (CardMemory.read(f"{n / 10:.1f}{unit}") for n in itertools.count(tenths))
        return next(memory for memory in sizes if memory.usable >= nbytes)

    @property
    def usable(self) -> int:
        """Bytes for the run."""
        return self.size - self.reserved

    @property
    def reserved(self) -> int:
        """Bytes left to desktop and driver."""
        return int(min(RESERVE, SHARE * self.size))


def picked_for(run: Run, memory: CardMemory, dry_device, resuming: bool = False) -> dict:
    """Those settings of PICKED with which the run fits that are the fastest.

    Samples a step stay the same, or with packing tokens a step. resuming: only gradient_checkpointing may change.
    UserError, naming the memory that would do, if nothing fits.
    """
    if isinstance(run.config.micro_batches_per_rank, list):
        raise UserError("--memory picks batch sizes, and micro_batches_per_rank gives them: remove one of the two")
    planner = Planner(run, dry_device)
    candidates = [_changed(run, changes) for changes in _choices(run, resuming)]
    found = next((each for each in candidates if planner.bytes_of(each, memory.usable) is not None), None)
    if found is None:
        raise UserError(_refusal(memory, planner, candidates[-1], resuming))
    return {key: getattr(found.config, key) for key in PICKED}


def picked_before(snapshot: Snapshot | None) -> dict:
    """What `--memory` picked when the run to resume began."""
    saved = snapshot.state.get("picked", {}) if snapshot else {}
    return {key: saved[key] for key in PICKED if key in saved}


def _changed(run: Run, changes: dict) -> Run:
    """A run to plan: with the data and the schedule of the run before the changes."""
    config = run.config.model_copy(update=changes)
    longest = min(run.longest, config.sequence_len)
    shares = (config.gradient_accumulation_steps,) * len(run.shares)
    settings = replace(
        run.batches.settings,
        micro_batch_size=config.micro_batch_size,
        accumulation=sum(shares),
        capacity=token_capacity(config.micro_batch_size, config.sequence_len if config.sample_packing else longest),
    )
    batches = Batches(run.data.train, settings, run.data.weights)
    return replace(run, config=config, longest=longest, batches=batches, shares=shares)


class Planner:
    """Plans runs of one model on a dry device."""

    def __init__(self, run: Run, device):
        self.device, self.kernels = device, KernelCache(device)
        self.model = meta_model(device, run.checkpoint)
        self.weights = dict(device.memory.held)

    def bytes_of(self, run: Run, budget: int | None = None) -> int | None:
        """The GPU memory that a run takes, or None if it exceeds the budget or the device's limits."""
        memory = self.device.memory
        memory.held, memory.budget = dict(self.weights), budget
        try:
            memory.check(0, "the model")
            Trainer(run, engine_of(run, self.device, self.model, self.kernels))
        except DeviceError:
            return None
        return memory.total


def picked_lines(before: TrainConfig, config: TrainConfig, memory: CardMemory | None) -> str:
    """What was picked, as lines of a config."""
    comment = "# as --memory picked when the run began"
    if memory:
        comment = f"# for {memory.text} of GPU memory, {_size(memory.reserved)} of it left to desktop and driver"
    values = {key: getattr(config, key) for key in PICKED[:-1]}
    lines = [comment, yaml.safe_dump(values, sort_keys=False).strip()]
    if config.sequence_len != before.sequence_len:
        fate = "truncated" if config.excess_length_strategy == "truncate" else "dropped"
        why = f"was {before.sequence_len}, with which nothing fits; longer samples are {fate}"
        lines.append(f"sequence_len: {config.sequence_len} # {why}")
    return "\n".join(lines)


def _choices(run: Run, resuming: bool) -> list[dict]:
    """Changes of the config, the fastest first; the last one takes the least memory."""
    config, samples = run.config, run.config.micro_batch_size * run.config.gradient_accumulation_steps
    sizes = [config.micro_batch_size] if resuming else [n for n in range(1, samples + 1) if samples % n == 0]
    full = [_change(n, samples // n, again, config.sequence_len) for n in sizes for again in (False, True)]
    full.sort(key=lambda change: (_cost(run, change), -change["micro_batch_size"]))
    if resuming:
        return full
    return full + [_change(1, count, True, length) for length, count in _shorter(run, samples)]


def _change(*values) -> dict:
    micro_batch_size, steps, checkpointing, length = values
    return dict(zip(PICKED, (micro_batch_size, steps, checkpointing, length), strict=True))


def _cost(run: Run, change: dict) -> float:
    """Time per token, in proportion: BitNet-2B in benchmarks/README.md, 512 to 4,096 tokens with and without
    checkpointing."""
    rows = run.config.sequence_len if run.config.sample_packing else run.longest
    capacity = token_capacity(change["micro_batch_size"], rows)
    return (1.18 if change["gradient_checkpointing"] else 1.0) * (1 + 155 / capacity)


def _shorter(run: Run, samples: int) -> Iterator[tuple[int, int]]:
    """Shorter lengths of sequences that leave samples to train on, and the samples a step for each."""
    config = run.config
    lengths = [store.lengths for store in run.data.train if len(store)]
    shortest, longest = min(int(n.min()) for n in lengths), run.longest
    least = {"truncate": 0, "drop": shortest, "raise": longest}[config.excess_length_strategy]
    for parts in range(2, config.sequence_len // SHORTEST + 1):
        length, rest = divmod(config.sequence_len, parts)
        if length < least or (rest and config.sample_packing) or (not config.sample_packing and length >= longest):
            continue
        yield length, samples * parts if config.sample_packing else samples


def _refusal(memory: CardMemory, planner: Planner, smallest: Run, resuming: bool) -> str:
    needed, config = planner.bytes_of(smallest), smallest.config
    what = ", ".join(f"{key} {str(getattr(config, key)).lower()}" for key in PICKED)
    if needed is None:
        return f"--memory {memory.text}: not even {what} fits the limits of {planner.device.name}"
    kept = " (a resumed run keeps its batches)" if resuming else ""
    wanted = CardMemory.holding(needed)
    return (
        f"--memory {memory.text}: nothing fits{kept}. The least is {_size(needed)}, with {what}, and "
        f"{_size(wanted.reserved)} for desktop and driver: wanted --memory {wanted.text} or more, a lower lora_r, or a "
        "smaller model"
    )


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 0.1 * 2**30 else f"{nbytes / 2**20:.1f} MiB"
