"""The gradient norm and AdamW over the adapter's flat buffers. Equations: shaders/adamw.wgsl."""

from lorawgpu.ops.checks import WG, expect, expect_state, fold, fold_elements

GROUP = WG * 16 * 4  # elements summed by one workgroup of norm_partial: WG threads, SPAN = 16 vec4s each
_NONE = {
    "count4": 0,
    "first": 0,
    "record_id": 0,
    "one_minus_beta1": 0.0,
    "beta2": 0.0,
    "one_minus_beta2": 0.0,
    "eps": 0.0,
    "weight_decay": 0.0,
    "max_norm": 0.0,
}


def partial_count(sizes) -> int:
    """Length of `partials` for gradient pieces of these element counts."""
    return sum(-(-size // GROUP) for size in sizes)


def grad_norm(plan, norm, partials, grads, step, state, *, record_id):
    """norm[0] = norm of `grads` * inv_targets, before clipping. A non-finite norm marks the step bad.

    grads: the pieces of the flat gradient, a list of f32 [n], n a multiple of 4, zeros in the padding.
    partials: scratch, f32 [partial_count].
    """
    expect("norm", norm, (1,))
    expect("partials", partials, (partial_count(g.size for g in grads),))
    expect_state(state)
    first = 0
    for piece in grads:
        _expect_flat("grads", piece, piece.size)
        groups = partial_count([piece.size])
        plan.record(
            "adamw",
            "norm_partial",
            fold(groups),
            params=_NONE | {"count4": piece.size // 4, "first": first},
            step=step,
            grads=piece,
            partials=partials,
        )
        first += groups
    plan.record(
        "adamw",
        "norm_finish",
        (1,),
        params=_NONE | {"count4": first, "record_id": record_id},
        partials=partials,
        norm=norm,
        state=state,
    )


def adamw_step(
    plan, weights, exp_avg, exp_avg_sq, grads, norm, step, state, *, beta1, beta2, eps, weight_decay, max_norm
):
    """One AdamW step of one piece, in place. A bad step changes nothing. max_norm <= 0 means no clipping.

    All tensors have the same length, a multiple of 4. lr, inv_targets and Adam's bias corrections come from `step`,
    `norm` from `grad_norm`.
    """
    for name, tensor in (("weights", weights), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq), ("grads", grads)):
        _expect_flat(name, tensor, weights.size)
    expect("norm", norm, (1,))
    expect_state(state)
    params = _NONE | {
        "count4": weights.size // 4,
        "one_minus_beta1": 1.0 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1.0 - beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "max_norm": max_norm,
    }
    plan.record(
        "adamw",
        "adamw",
        fold_elements(weights.size),
        params=params,
        step=step,
        grads=grads,
        norm=norm,
        state=state,
        weights=weights,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
    )


def _expect_flat(name, tensor, size):
    if tensor.dtype != "f32" or tensor.shape != (size,) or size % 4:
        raise ValueError(
            f"{name} ({tensor.label}): got {tensor.dtype} {list(tensor.shape)}, wanted f32 [{size}], a multiple of 4"
        )
