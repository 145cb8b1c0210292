// uses: common/grid.wgsl
// Residual add: y += x. x, y: (4 * count4). Grid: one thread for four elements. Its backward is dy itself.

override WG: u32 = 256u;

struct Params { count4: u32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(WG)
fn forward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
           @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * WG + lane;
    if (i < params.count4) { y[i] += x[i]; }
}
