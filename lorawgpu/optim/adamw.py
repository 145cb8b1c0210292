"""AdamW with gradient clipping over the adapter's flat buffers: a handful of dispatches for any adapter."""

import numpy as np

from lorawgpu.ops.adamw import adamw_step, grad_norm, partial_count
from lorawgpu.ops.step import adam_scales, pack_step
from lorawgpu.optim.settings import AdamWSettings

PIECE_ALIGN = 64  # elements, or 256 bytes: the alignment of pieces


class AdamW(AdamWSettings):
    """PyTorch's AdamW."""

    def record(self, plan, adapter, state, step, norm, *, record_id):
        """Record norm, clip and update of `adapter` (context.AdapterBuffers). norm f32 [1] receives the norm."""
        limit = plan.device.max_binding // 4 // PIECE_ALIGN * PIECE_ALIGN
        spans = [
            (start, min(start + limit, stop)) for a, stop in adapter.layout.buffers for start in range(a, stop, limit)
        ]

        def pieces(flat):
            return [flat.view(a, (b - a,), flat.label) for a, b in spans]

        partials = plan.device.tensor(
            (partial_count(b - a for a, b in spans),), label="norm partials", kind="optimizer"
        )
        grads = pieces(adapter.grads)
        grad_norm(plan, norm, partials, grads, step, state, record_id=record_id)
        self.record_pieces(plan, *map(pieces, (adapter.params, adapter.m, adapter.v)), grads, state, step, norm)

    def record_pieces(self, plan, params, m, v, grads, state, step, norm):
        """Record clip and update of pieces of an adapter, lists of tensors f32 [n]; `norm` f32 [1] is that of all."""
        for tensors in zip(params, m, v, grads, strict=True):
            adamw_step(
                plan,
                *tensors,
                norm,
                step,
                state,
                beta1=self.beta1,
                beta2=self.beta2,
                eps=self.epsilon,
                weight_decay=self.weight_decay,
                max_norm=self.max_grad_norm,
            )

    def step_values(self, step: int, lr: float, divisor: int) -> np.ndarray:
        """Contents of the step buffer for optimizer step `step` (from 1); gradients are divided by `divisor`."""
        m_scale, v_scale = adam_scales(step, self.beta1, self.beta2)
        return pack_step(lr=lr, inv_targets=1.0 / divisor, m_scale=m_scale, v_scale=v_scale)
