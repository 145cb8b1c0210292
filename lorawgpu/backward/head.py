"""Gradient of the head; mirrors model/head.py."""

from lorawgpu.families.modules import HEAD
from lorawgpu.ops.gather import gather_backward
from lorawgpu.ops.linear import linear_backward
from lorawgpu.ops.lora import lora_back, lora_backward, lora_dropout_back
from lorawgpu.ops.matmul import Epilogue, Operand, Problem, matmul, split_matmul, splits_by_length
from lorawgpu.ops.rmsnorm import rmsnorm_backward
from lorawgpu.ops.token_rows import columns_backward


def head_backward(c, head, dx, start, rows):
    """Write dx of target rows [start, start + rows), given the dlogits in head.logits; adapter gradients +=.

    Needs `head_forward` first.
    """
    shape = {"rows": rows, "width": c.config.hidden_size}
    dlogits = head.logits.rows(0, rows)
    _normalized_backward(c, head, dlogits, start, rows)
    dgathered = c.work.take(head.x.shape, label="dhead x")
    rmsnorm_backward(c.plan, dgathered, head.n, head.x, c.model.norm, head.rstd, accumulate=False, **shape)
    gather_backward(c.plan, dx, dgathered, c.batch.target_rows, c.batch.target_ids, start=start, **shape)
    c.work.give(dgathered)


def _normalized_backward(c, head, dlogits, start, rows):
    """head.n, the normalized rows, become their gradient, after what the adapter trains has read them."""
    adapter, product = head.adapter, {"rows": rows, "room": c.room}
    if c.adapter and HEAD in c.adapter.layout.matrices:
        _matrix_backward(c, head.n, dlogits, rows)
    if adapter.group:
        _lora_backward(c, head, dlogits, start, **product)
        return
    if adapter.columns:
        _rows_backward(c, head, dlogits, rows)
    linear_backward(c.plan, c.work, head.n, dlogits, c.head, **product)
    if adapter.columns:  # dn += dcolumns R
        count, width = adapter.rows.shape
        a, epilogue = Operand(adapter.columns), Epilogue(accumulate=True)
        matmul(c.plan, Problem(rows, width, count, Operand(head.n), a, Operand(adapter.rows), epilogue))


def _matrix_backward(c, n, dlogits, rows):
    """dW += dlogits^T n, part by part."""
    for (first, stop), part in c.adapter.rows_of(c.adapter.grads, HEAD):
        a, epilogue = Operand(dlogits, first).T, Epilogue(accumulate=True)
        matmul(c.plan, Problem(stop - first, part.shape[1], rows, Operand(part), a, Operand(n), epilogue))


def _rows_backward(c, head, dlogits, rows):
    """The columns of trained rows leave dlogits, so that the base's rows have no part; dR += dcolumns^T n."""
    adapter, slot = head.adapter, c.adapter.layout.tokens[HEAD].slot
    columns_backward(c.plan, adapter.columns, dlogits, adapter.ids, rows=rows)
    (count, width), out = adapter.rows.shape, Operand(slot.of(c.adapter.grads))
    a, epilogue = Operand(adapter.columns).T, Epilogue(accumulate=True)
    problem = Problem(count, width, rows, out, a, Operand(head.n), epilogue)
    split_matmul(c.plan, c.work, problem, splits_by_length(rows))


def _lora_backward(c, head, dlogits, start, *, rows, room):
    """As backward.linear.project_backward, on target rows."""
    group, params = head.adapter.group, c.adapter.params
    dh = c.work.take((rows, group.rank), label="dh head")
    dropout = {"width": c.config.hidden_size, "step": c.step, "p": c.dropout, "first_row": start}
    lora_backward(
        c.plan, c.work, dh, dlogits, head.adapter.h, head.n, group, params, c.adapter.grads, rows=rows, **dropout
    )
    lora = lora_back(group, dh, params) if c.dropout == 0.0 else None
    linear_backward(c.plan, c.work, head.n, dlogits, c.head, rows=rows, lora=lora, room=room)
    if lora is None:
        lora_dropout_back(c.plan, c.work, head.n, dh, group, params, rows=rows, **dropout)
    c.work.give(dh)
