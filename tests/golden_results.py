"""Results of golden cases as an exact computation would give them, and the keys that are printed of them."""

import numpy as np

from lorawgpu.verify.cases import Result

KEYS = (
    "case, loss_abs_err, logits_rel, grad_rel_max, grad_worst, grad_norm_rel_max, step_loss_abs_err, after3_rel_max, "
    "greedy_match, tolerance, ok"
).split(", ")
PHASES = {
    "loss_abs_err": "loss",
    "logits_rel": "loss",
    "grad_rel_max": "loss",
    "grad_norm_rel_max": "steps",
    "step_loss_abs_err": "steps",
    "after3_rel_max": "steps",
}


def perfect(case) -> Result:
    """What an exact computation would give."""
    x = case.expected
    grads = {n: g.astype(np.float64) for n, g in case.part("grad").items()}
    greedy = np.zeros((len(x["greedy"]), case.checkpoint.config.vocab_size))
    greedy[np.arange(len(greedy)), x["greedy"]] = 1.0
    return Result(
        loss=float(x["loss"]),
        logits=x["logits"][case.mask].astype(np.float64),
        grads=grads,
        step_losses=list(x["step_losses"]),
        grad_norms=list(x["grad_norms"]),
        after3=case.part("after3"),
        greedy=greedy,
    )
