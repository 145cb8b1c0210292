"""The per-layer input against the reference: every type of the table's rows, widths that are no multiple of 4; and how
its rows get from the table to the GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
from oplab import Lab, check, normal

from lorawgpu.doctor.elementwise import EPS, per_layer
from lorawgpu.model.context import GATHERED, StepData
from lorawgpu.ops.per_layer import per_layer_forward


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_matches_reference(plan, dtype):
    check(plan, per_layer, (dtype, 3, 10), (dtype, 1, 1), (dtype, 5, 42), (dtype, 7, 256), (dtype, 2, 300))


def test_small_projections(plan):
    """Values so small that eps matters: it is added after the scale."""
    check(plan, per_layer, ("bf16", 3, 10), gain=0.02)


def test_rows_of_another_stride_or_type_are_refused(plan):
    lab, weight = Lab(plan), np.ones(16, np.float32)
    y, proj, shape = lab.rows(3, 10), lab.padded(normal(3, 10)), {"rows": 3, "width": 10, "scale": 1.0, "eps": EPS}
    for table in (normal(3, 10), np.zeros((3, 16), np.uint32)):
        with lab.section, pytest.raises(ValueError, match=r"table_rows.*wanted bf16 or f16 or f32 \[3, 16\]"):
            per_layer_forward(plan, y.tensor, proj, lab.input(table), lab.input(weight), **shape)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_layer_gets_its_columns_of_the_table(device, dtype):
    """More tokens than are gathered at once, then fewer; no gather is larger than that."""
    width, table, sizes = 10, np.arange(50 * 30).reshape(50, 30), []
    table = table.astype({"f32": np.float32, "bf16": np.uint16}[dtype])

    def gather(ids):
        sizes.append(len(ids))
        return table[ids]

    layers = [SimpleNamespace(index=i) for i in range(3)]
    per_layer = SimpleNamespace(dtype=dtype, gather=gather)
    model = SimpleNamespace(per_layer=per_layer, layers=layers, config=SimpleNamespace(per_layer_input=width))
    batch = StepData.create(device, model, GATHERED + 40, 1)
    for count in (GATHERED + 40, 7):
        ids = np.random.default_rng(count).integers(0, 50, count)
        batch.write_per_layer(device, model, ids)
        for layer, tensor in enumerate(batch.rows(count).per_layer):
            got = device.read(tensor)
            assert np.array_equal(got[:, :width], table[ids][:, layer * width : (layer + 1) * width])
            assert not got[:, width:].any()
    assert sizes == [GATHERED, 40, 7]
