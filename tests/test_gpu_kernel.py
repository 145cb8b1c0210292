"""Assembling shaders from files, templates and snippets."""

import numpy as np
import pytest

from lorawgpu.errors import DeviceError
from lorawgpu.gpu import KernelCache, Plan, open_device
from lorawgpu.gpu import device as gpu_device
from lorawgpu.gpu import kernel as gpu_kernel

MAIN = """// uses: common/rounded.wgsl
// uses: common/both.wgsl
@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(1)
fn main() { out[0] = rounded(out[0]); }
"""
SNIPPETS = {
    "rounded": "enable f16;\nfn rounded(x: f32) -> f32 { return f32(f16(x)); }\n",
    "both": "// Nothing to enable; in a comment.\n  enable f16;\ndiagnostic(off, derivative_uniformity);\n",
}


@pytest.fixture
def shaders(tmp_path, monkeypatch):
    """Replaces our shaders by a folder with MAIN as `half`, and snippets."""
    (tmp_path / "common").mkdir()
    (tmp_path / "half.wgsl").write_text(MAIN)
    for name, text in SNIPPETS.items():
        (tmp_path / "common" / f"{name}.wgsl").write_text(text)
    monkeypatch.setattr(gpu_kernel, "SHADERS", tmp_path)
    gpu_kernel._read.cache_clear()
    yield tmp_path
    gpu_kernel._read.cache_clear()


def test_directives_of_snippets_come_first_and_no_line_moves(shaders):
    lines = gpu_kernel.load("half").splitlines()
    first, *others = MAIN.splitlines()
    assert lines[0] == f"enable f16; diagnostic(off, derivative_uniformity); {first}"
    assert lines[1 : len(others) + 1] == others
    assert not [line for line in lines[1:] if line.strip().startswith(("enable", "diagnostic"))]
    assert len(lines) == len("\n".join([MAIN, *SNIPPETS.values()]).splitlines())


def test_without_directives_nothing_is_added(shaders):
    (shaders / "plain.wgsl").write_text("fn nothing() {}\n")
    assert gpu_kernel.load("plain") == "fn nothing() {}\n"


@pytest.fixture
def half_device(monkeypatch):
    """A device with shader-f16, which our shaders do not need."""
    monkeypatch.setattr(gpu_device, "OPTIONAL_FEATURES", ("shader-f16",))
    device = open_device()
    if "shader-f16" not in device.capabilities.features:
        pytest.skip("the adapter has no shader-f16")
    return device


def test_a_snippet_may_enable_a_feature(shaders, half_device):
    plan = Plan(half_device)
    out = half_device.upload(np.float32([1 / 3]))
    with plan.section("run"):
        plan.record("half", "main", (1,), out=out)
    plan.run("run")
    assert half_device.read(out)[0] == np.float16(1 / 3)


def test_an_error_names_the_line_of_the_main_file(shaders, half_device):
    (shaders / "half.wgsl").write_text(MAIN.replace("= rounded(", "= missing("))
    gpu_kernel._read.cache_clear()
    with pytest.raises(DeviceError, match=r"half.wgsl:main does not compile(?s:.)*:5:22"):
        KernelCache(half_device).get("half", "main", {}, {})
