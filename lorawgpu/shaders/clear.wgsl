// Fill with zeros. out: (count). Grid: (x, y) workgroups of 256, stride = 256 x elements per row of workgroups.
struct Params { count: u32, stride: u32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) gid: vec3<u32>) {
    let i = gid.y * params.stride + gid.x;
    if (i < params.count) { out[i] = 0u; }
}
