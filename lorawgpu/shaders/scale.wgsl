// uses: common/grid.wgsl
// x *= scale, in place. x: (rows, ld). Its own backward: dx *= scale. Grid: one thread per four columns.

const WG: u32 = 256u;

struct Params { count4: u32, scale: f32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(WG)
fn forward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
           @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * WG + lane;
    if (i < params.count4) { x[i] *= params.scale; }
}
