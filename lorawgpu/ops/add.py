"""Residual add: shaders/add.wgsl."""
from .checks import expect_rows, fold_elements


def add_forward(plan, y, x, *, rows, width):
    """y += x, both [rows, width]."""
    ld = expect_rows(rows, width, x=x, y=y)
    plan.record("add", "forward", fold_elements(rows * ld), params={"count4": rows * ld // 4}, x=x, y=y)
