// total[i] = sum over p of parts[p,i], in the order of p. parts [parts, count], total [count].
// Grid: (x, y) workgroups of 256, stride = 256 x elements a row of workgroups.
struct Params { count: u32, parts: u32, stride: u32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> parts: array<f32>;
@group(0) @binding(2) var<storage, read_write> total: array<f32>;

@compute @workgroup_size(256)
fn forward(@builtin(global_invocation_id) gid: vec3<u32>) {
    let i = gid.y * params.stride + gid.x;
    if (i >= params.count) { return; }
    var sum = parts[i];
    for (var p = 1u; p < params.parts; p++) { sum += parts[p * params.count + i]; }
    total[i] = sum;
}
