// out[m, o_off + n] (+)= sum over z of parts[z, m, n], z ascending. parts: (splits, M, N), out: (M, ldo).
// Grid: (x, y) workgroups of 64, stride = 64 x; one vec4 a lane.
override ACCUMULATE: bool = false;

struct Params { count4: u32, splits: u32, n4: u32, ldo4: u32, o_off4: u32, stride: u32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> parts: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) gid: vec3<u32>) {
    let i = gid.y * params.stride + gid.x;
    if (i >= params.count4) { return; }
    var sum = parts[i];
    for (var z = 1u; z < params.splits; z += 1u) { sum += parts[z * params.count4 + i]; }
    let o = i / params.n4 * params.ldo4 + params.o_off4 + i % params.n4;
    if (ACCUMULATE) { out[o] += sum; } else { out[o] = sum; }
}
