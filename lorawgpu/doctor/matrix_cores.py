"""Products on the device's matrix cores, or else in their plain expansion."""

import numpy as np

from lorawgpu.doctor.lab import normal
from lorawgpu.doctor.matmul import weight_of
from lorawgpu.gpu.capabilities import MatrixCores
from lorawgpu.ops.matmul import Operand, Problem, cooperative

PLAIN = MatrixCores(16, 32, "plain")


def matrix_product(lab, store, layout, m, n, k):
    """x W^T ("nk") or x W ("kn"), rows of very different magnitudes."""
    weight, values = weight_of(lab.device, store, *((k, n) if layout == "nk" else (n, k)))
    x, part, out = normal(m, k), weight.parts[0], lab.output(m, n)
    rows = np.exp2(np.arange(m) % 40 - 20.0)[:, None].astype(np.float32)
    b = Operand(part.tensor, store=part.store)
    operands = Operand(out.tensor), Operand(lab.input(x * rows)), b.T if layout == "nk" else b
    problem = Problem(m, n, k, *operands, segments=weight.segments)
    cooperative.record(lab.plan, problem, lab.device.matrix or PLAIN)
    want = x.astype(np.float64) @ (values.T if layout == "nk" else values)
    return lambda: {"product": (out.value / rows, want)}
