"""Choosing between the ways in which a file may be read, by the loss of a text that every language model predicts well.

A wrong layout of i2_s scrambles each matrix, so the model predicts worse than one that knows nothing.
"""

import sys

import numpy as np

from lorawgpu.data.batching import Sample, SampleList, token_capacity
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.engine.evaluation import evaluate_source
from lorawgpu.errors import UserError
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.options import I2_S_LAYOUT, how_to_say
from lorawgpu.weights.tensors import Checkpoint

TEXT = "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is Rome."
KNOWN, UNKNOWN = 6.0, 9.0  # nats a token: the right reading is below the first, every other one above the second


def settled(device, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or the reading of its file that is clearly the right one.

    UserError, with the losses and the option that says it, if none is. A dry device computes nothing: there, the
    checkpoint is returned as it is.
    """
    readings = checkpoint.readings()
    if not readings or device.dry:
        return checkpoint
    ids = text_of(checkpoint)
    losses = {name: loss_of(device, reading, ids) for name, reading in readings.items()}
    shown = ", ".join(f"{name} {loss:.2f}" for name, loss in losses.items())
    chosen = clear(losses)
    if chosen is None:
        raise UserError(
            f"{checkpoint.path}: has tensors of type i2_s, whose layout the file does not say, and the loss of a fixed "
            f"text in each ({shown}) does not tell; {how_to_say(I2_S_LAYOUT)}."
        )
    print(f"note: {checkpoint.name}: i2_s is read in the layout {chosen} (loss of a text: {shown})", file=sys.stderr)
    return readings[chosen]


def clear(losses: dict[str, float]) -> str | None:
    """The only one that is low, if all others are high; NaN is neither."""
    low = [name for name, loss in losses.items() if loss < KNOWN]
    high = [name for name, loss in losses.items() if loss > UNKNOWN]
    return low[0] if len(low) == 1 and len(low) + len(high) == len(losses) else None


def text_of(checkpoint: Checkpoint) -> np.ndarray:
    """The ids of TEXT. UserError if the model has no tokenizer."""
    try:
        tokenizer = checkpoint.tokenizer()
    except UserError as error:
        raise UserError(
            f"{checkpoint.path}: has tensors of type i2_s, whose layout the file does not say, and no tokenizer, which "
            f"trying them needs ({error}); {how_to_say(I2_S_LAYOUT)}."
        ) from None
    return np.array(tokenizer.encode(TEXT, add_special=True), np.int32)


def loss_of(device, checkpoint: Checkpoint, ids: np.ndarray) -> float:
    """The mean loss of a text; the weights are on the device only meanwhile. inf if they cannot be in this layout."""
    held = dict(device.memory.held)
    try:
        engine = Engine(device, load_model(device, checkpoint), Options(token_capacity(1, len(ids)), len(ids)))
        return evaluate_source(engine, SampleList([Sample(ids, ids)])).loss
    except UserError:
        return float("inf")
    finally:
        device.memory.held = held
