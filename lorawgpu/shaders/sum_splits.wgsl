// out[m, s n + c] (+)= sum of parts[z, m, c] over the splits z of group s, in ascending order.
// parts: (splits, M, n); groups of splits end at end0, end1, end2; out: (M, ldo).
// Grid: (x, y) workgroups of 64, stride = 64 x; one vec4 of out per lane.
override ACCUMULATE: bool = false;

struct Params {
    count4: u32, slab4: u32, n4: u32, columns4: u32, ldo4: u32, o_off4: u32, stride: u32, end0: u32, end1: u32, end2: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> parts: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) gid: vec3<u32>) {
    let i = gid.y * params.stride + gid.x;
    if (i >= params.count4) { return; }
    let m = i / params.columns4;
    let column = i % params.columns4;
    let group = column / params.n4;
    let first = select(select(params.end1, params.end0, group == 1u), 0u, group == 0u);
    let last = select(select(params.end2, params.end1, group == 1u), params.end0, group == 0u);
    let at = m * params.n4 + column % params.n4;
    var sum = vec4(0.0);
    for (var z = first; z < last; z += 1u) { sum += parts[z * params.slab4 + at]; }
    let o = m * params.ldo4 + params.o_off4 + column;
    if (ACCUMULATE) { out[o] += sum; } else { out[o] = sum; }
}
