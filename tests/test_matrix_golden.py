"""Golden cases with products on matrix cores, in their plain expansion."""

from copy import copy

import pytest
from golden_case import GOLDEN
from test_ops_matmul_cooperative import SMALL

from lorawgpu.gpu import KernelCache
from lorawgpu.gpu.capabilities import MatrixCores
from lorawgpu.ops.matmul import cooperative
from lorawgpu.verify.cases import read_case
from lorawgpu.verify.compare import judge
from lorawgpu.verify.run import run_case


@pytest.mark.long
@pytest.mark.parametrize("name", ["bitnet_q_only", "llama_q4_k_m"])
def test_gradients_are_those_of_the_outside_autograd(device, monkeypatch, name):
    """BitNet: int8 forward and ternary backward. Llama: blocks of two parts, and what is left in float32."""
    monkeypatch.setattr(cooperative, "TILES", SMALL)
    cores, recorded = copy(device), []
    cores.matrix = MatrixCores(16, 32, "plain")
    record = cooperative.record
    monkeypatch.setattr(cooperative, "record", lambda plan, problem: recorded.append(1) or record(plan, problem))
    row, wrong = judge(*(case := read_case(GOLDEN / name), run_case(cores, case, KernelCache(cores))))
    assert recorded and not wrong and row["grad_rel_max"] < 2e-5
