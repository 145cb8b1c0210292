// uses: common/grid.wgsl
// total[i] = (total[i] +, if `accumulate`) sum over p of parts[p,i], in the order of p. parts [parts, count4], total [count4] vec4s.
// Grid: one thread per vec4, folded (ops/checks.py).
struct Params { count4: u32, parts: u32, accumulate: u32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> parts: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> total: array<vec4<f32>>;

@compute @workgroup_size(256)
fn forward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
           @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * 256u + lane;
    if (i >= params.count4) { return; }
    var sum = parts[i];
    for (var p = 1u; p < params.parts; p++) { sum += parts[p * params.count4 + i]; }
    if (params.accumulate != 0u) { sum += total[i]; }
    total[i] = sum;
}
