// uses: common/grid.wgsl
// uses: common/softcap.wgsl
// Soft cap of logits that are sampled from or read back: z = cap * tanh(z / cap), in place. z: (rows, ld).
// Training caps inside cross_entropy.wgsl.j2, which has the gradient. Grid: one thread per four columns.

const WG: u32 = 256u;

struct Params { count4: u32, cap: f32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> z: array<vec4<f32>>;

@compute @workgroup_size(WG)
fn forward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
           @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * WG + lane;
    if (i < params.count4) { z[i] = softcap(z[i], params.cap).value; }
}
