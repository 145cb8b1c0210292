"""Rows times a constant, in place. Equations: shaders/scale.wgsl."""

from lorawgpu.ops.checks import expect_rows, fold_elements


def scale_forward(plan, x, *, rows, width, scale):
    """x [rows, width] *= scale. It is its own backward, on the gradient of x."""
    count = rows * expect_rows(rows, width, x=x)
    plan.record("scale", "forward", fold_elements(count), params={"count4": count // 4, "scale": scale}, x=x)
