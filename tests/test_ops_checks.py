"""The grids of the element-wise kernels: Python and shaders must agree on the workgroup size."""

import re

import pytest

from lorawgpu.gpu.kernel import SHADERS
from lorawgpu.ops.checks import WG, fold, fold_elements

ELEMENTWISE = (
    "adamw",
    "dropout",
    "embedding",
    "gate",
    "gather",
    "random_weights",
    "rope",
    "sum_parts",
)  # fold_elements or WG


@pytest.mark.parametrize("stem", ELEMENTWISE)
def test_a_shader_has_the_threads_that_its_grid_is_made_for(stem):
    (path,) = SHADERS.glob(f"{stem}.wgsl*")
    code = path.read_text()
    sizes = set(re.findall(r"@workgroup_size\((\w+)\)", code))
    named = re.findall(r"^const WG: u32 = (\d+)u;", code, re.M)
    assert (sizes, named) in [({"WG"}, [str(WG)]), ({str(WG)}, [])]


@pytest.mark.parametrize("count", [0, 1, 4 * WG, 4 * WG + 1, 4 * WG * 32768 + 1])
def test_a_grid_has_a_thread_for_every_four_elements(count):
    x, y = fold_elements(count)
    assert x * y * WG * 4 >= count and max(x, y) <= 65535
    assert fold(-(-count // (4 * WG))) == (x, y)
