"""The final adapter of a run: written, read back from disk, and checked."""

from pathlib import Path

import numpy as np

from lorawgpu.data.batching import bucket, flatten
from lorawgpu.engine.engine import Engine
from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.lora.peft_dir import read_adapter, write_adapter
from lorawgpu.train.setup import Run

PROBE_TOKENS = 64  # tokens of the sample that the adapter is checked on


def save_final(run: Run, engine: Engine, fallback: str) -> None:
    """Write the adapter of `engine` into the run folder and check what was written.

    Raises CheckFailed, with the `fallback`, if the adapter on disk is not finite, equals the adapter that the run
    started with, or does not change the model's output.
    """
    try:
        write_adapter(run.folder, run.lora, engine.tensors(), run.checkpoint.name)
        check_final(run, engine, run.folder)
    except CheckFailed as error:
        raise CheckFailed(f"{error}. {fallback}") from None


def check_final(run: Run, engine: Engine, folder: Path) -> None:
    try:
        _, tensors = read_adapter(folder, run.checkpoint.config)
    except UserError as error:
        raise CheckFailed(f"the final adapter does not load: {error}") from None
    if all(np.array_equal(tensor, run.start[name]) for name, tensor in tensors.items()):
        raise CheckFailed(f"{folder}: the final adapter equals the initial one: nothing was trained")
    without, _ = try_out(run, engine, adapter=False)
    engine.load("params", tensors)
    with_adapter, finite = try_out(run, engine)
    if np.array_equal(with_adapter, without):
        raise CheckFailed(f"{folder}: the final adapter does not change the model's output")
    if not finite:
        raise CheckFailed(f"{folder}: with the final adapter, the model computes values that are not finite")


def try_out(run: Run, engine: Engine, adapter: bool = True) -> tuple[np.ndarray, bool]:
    """The model's logits at the end of a training sample, and whether all values that led to them were finite.

    Checking logits is not enough: the quantizer turns NaN into finite numbers.
    """
    sample = next(source for source in run.data.train if len(source))[0]
    cut = type(sample)(sample.input_ids[:PROBE_TOKENS], sample.labels[:PROBE_TOKENS])
    engine.begin()
    logits = engine.logits(flatten([cut], bucket(len(cut), run.capacity)), np.array([len(cut) - 1]), adapter)
    return logits, bool(np.isfinite(logits).all()) and not engine.steps_state().bad
