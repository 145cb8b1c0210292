"""Cross-entropy of a chunk of target rows, and the sum over a step. Equations: shaders/cross_entropy.wgsl.j2."""

import numpy as np

from lorawgpu.gpu import padded
from lorawgpu.ops.checks import expect, expect_state, fold


def cross_entropy_forward(
    plan, losses, logits, target_ids, state, *, start, rows, vocab, record_id, row_weights=None, softcap=0.0
):
    """losses[start+i] = cross-entropy of logits[i] [rows, vocab] for id target_ids[start+i]; 0 for a negative id.

    losses f32 and target_ids i32 have the same length, one entry per target row; this chunk is `rows` from `start` on.
    row_weights: f32 of that length, multiplies each loss; None means all 1. softcap: the cap of the logits, 0 for none.
    Logits are not changed.
    """
    chunk = start, rows, vocab, record_id
    _record(plan, "loss", losses, logits, target_ids, state, *chunk, row_weights, softcap)


def cross_entropy_forward_backward(
    plan, losses, logits, target_ids, state, *, start, rows, vocab, record_id, row_weights=None, softcap=0.0
):
    """The same, and logits become dlogits of the SUM of the losses. Rows without a target become 0."""
    _record(
        plan, "loss_and_grad", losses, logits, target_ids, state, start, rows, vocab, record_id, row_weights, softcap
    )


def loss_sum(plan, total, losses, *, start, rows):
    """total u32 [2] += sum(losses[start : start+rows]), exact in fixed point; skips non-finite losses.

    `loss_value` reads it.
    """
    expect("losses", losses, (1,))
    expect("total", total, (2,), "u32")
    plan.record(
        "cross_entropy",
        "add_losses",
        (1,),
        losses=losses,
        total=total,
        template={"capped": False},
        params={"rows": rows, "ld4": 0, "V": 0, "start": start, "count": losses.shape[0], "record_id": 0},
    )


def fixed_point(total: np.ndarray) -> int:
    """The sum in the two words of `total`, in units of 2^-32, so that sums of several devices add up exactly."""
    whole, parts = total.tolist()
    return ((whole ^ 1 << 31) - (1 << 31) << 32) + parts


def fixed_point_words(value: int) -> np.ndarray:
    """The inverse of `fixed_point`: the two words of a total."""
    return np.array([value >> 32 & 0xFFFFFFFF, value & 0xFFFFFFFF], np.uint32)


def loss_value(total: np.ndarray) -> float:
    """The sum in `total`."""
    return fixed_point(total) / 2**32


def _record(plan, entry, losses, logits, target_ids, state, start, rows, vocab, record_id, row_weights, softcap):
    expect("logits", logits, (rows, padded(vocab)))
    expect("target_ids", target_ids, (1,), "i32")
    expect("losses", losses, target_ids.shape)
    expect_state(state)
    weights = {}
    if row_weights is not None:
        expect("row_weights", row_weights, target_ids.shape)
        entry, weights = f"weighted_{entry}", {"row_weights": row_weights}
    plan.record(
        "cross_entropy",
        entry,
        fold(rows),
        losses=losses,
        logits=logits,
        target_ids=target_ids,
        state=state,
        template={"capped": bool(softcap)},
        params={
            "rows": rows,
            "ld4": padded(vocab) // 4,
            "V": vocab,
            "start": start,
            "count": target_ids.shape[0],
            "record_id": record_id,
            **({"cap": softcap} if softcap else {}),
        },
        **weights,
    )
