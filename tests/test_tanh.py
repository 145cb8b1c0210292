"""tanh in shaders: value and slope within the bound of the snippet's header, wherever x lies."""

import numpy as np

from lorawgpu.gpu.kernel import SHADERS

BOUND = 4e-7  # of shaders/common/tanh.wgsl
MAIN = """
@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> found: array<Tanh>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < arrayLength(&x)) { found[id.x] = exact_tanh(x[id.x]); }
}
"""


def tanh_on(device, x):
    """(value, slope) of each element of x, whose length is a multiple of 4."""
    code = MAIN + "".join((SHADERS / f"common/{name}.wgsl").read_text() for name in ("tanh", "exp"))
    module = device.wgpu.create_shader_module(code=code)
    pipeline = device.wgpu.create_compute_pipeline(layout="auto", compute={"module": module, "entry_point": "main"})
    tensors = device.upload(x), device.tensor((2 * x.size,))
    entries = [{"binding": i, "resource": {"buffer": t.buffer, "size": t.nbytes}} for i, t in enumerate(tensors)]
    encoder = device.wgpu.create_command_encoder()
    compute = encoder.begin_compute_pass()
    compute.set_pipeline(pipeline)
    compute.set_bind_group(0, device.wgpu.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries))
    compute.dispatch_workgroups(-(-x.size // 256))
    compute.end()
    device.submit(encoder.finish())
    return device.read(tensors[1]).reshape(-1, 2, 4).swapaxes(0, 1).reshape(2, -1)


def test_value_and_slope_are_right_from_the_smallest_to_the_largest(device):
    ends = [0.0, 0.625, np.nextafter(np.float32(0.625), np.float32(0)), 87.0, 1e30, np.inf]
    sizes = np.concatenate([np.logspace(-30, 1.6, 20001), np.linspace(0.01, 12, 20001), ends])
    x = np.concatenate([sizes, -sizes]).astype(np.float32)
    value, slope = tanh_on(device, x)
    x = np.clip(x.astype(np.float64), -300, 300)
    wanted = np.tanh(x), np.cosh(x) ** -2.0
    np.testing.assert_allclose(value, wanted[0], rtol=BOUND, atol=0)
    np.testing.assert_allclose(slope, wanted[1], rtol=BOUND, atol=1e-37)
    assert (np.abs(value) <= 1).all() and (value == np.sign(x) * np.abs(value)).all()


def test_nan_passes_through(device):
    assert np.isnan(tanh_on(device, np.full(4, np.nan, np.float32))).all()
