"""Soft cap of logits that are sampled from or read back. Equations: shaders/softcap.wgsl."""

from lorawgpu.ops.checks import expect_rows, fold_elements


def softcap_forward(plan, logits, *, rows, vocab, cap):
    """logits [rows, vocab] = cap * tanh(logits / cap), in place. ops.cross_entropy caps its own logits."""
    count = rows * expect_rows(rows, vocab, logits=logits)
    plan.record("softcap", "forward", fold_elements(count), params={"count4": count // 4, "cap": cap}, z=logits)
