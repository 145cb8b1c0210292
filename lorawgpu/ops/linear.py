"""A linear layer with frozen weights: y = x W^T, dx = dy W, plus the low-rank terms of its adapters (ops/lora.py)."""

from lorawgpu.ops.matmul import Epilogue, Operand, Problem, matmul, split_matmul, splits_to_fill, tuning_of


def linear_forward(plan, y, x, weight, *, rows, qscale=None, lora=None, residual=None):
    """y [rows, weight.rows] = x W^T (+ lora) (+ residual).

    x f32 [rows, weight.columns], or with qscale the quantizer's int8 words [rows, columns/4].
    """
    for part in weight.parts:
        segments, low_rank = weight.within(part, lora)
        problem = Problem(
            rows,
            part.rows,
            weight.columns,
            out=Operand(y, part.start),
            a=Operand(x),
            b=Operand(part.tensor, store=part.store).T,
            epilogue=Epilogue(lora=low_rank, residual=residual),
            segments=segments,
            qscale=qscale,
        )
        matmul(plan, problem)


def linear_backward(plan, work, dx, dy, weight, *, rows, lora=None, accumulate=False, room=0):
    """dx [rows, weight.columns] (+)= dy W (+ dh A).

    dh A is added in the product's epilogue, which saves a pass over dx, unless the store leaves no registers for it.
    `room`: elements of scratch that cost no memory (Context.room).
    """
    room = min(room, plan.device.max_binding // 4)
    fused = lora is not None and weight.parts[0].store.adapter_in_transposed
    for i, part in enumerate(weight.parts):
        segments, _ = weight.within(part)
        problem = Problem(
            rows,
            weight.columns,
            part.rows,
            out=Operand(dx),
            a=Operand(dy, part.start),
            b=Operand(part.tensor, store=part.store),
            epilogue=Epilogue(lora=lora if fused and i == 0 else None, accumulate=accumulate or i > 0),
            segments=segments,
        )
        tuning = tuning_of(plan.device.capabilities)
        split_matmul(plan, work, problem, splits_to_fill(tuning, rows, weight.columns, part.rows, room))
    if lora and not fused:
        with plan.scope("lora_back"):
            _add_low_rank(plan, dx, lora, rows=rows, columns=weight.columns)


def _add_low_rank(plan, dx, lora, *, rows, columns):
    """dx += dh A."""
    problem = Problem(
        rows,
        columns,
        lora.ranks[0],
        out=Operand(dx),
        a=Operand(lora.h, lora.h_offs[0]),
        b=Operand(lora.factors, lora.f_offs[0], columns),
        epilogue=Epilogue(accumulate=True),
        few_terms=True,
    )
    matmul(plan, problem)
