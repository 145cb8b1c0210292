// uses: common/grid.wgsl
// uses: common/reduce.wgsl
// RMSNorm over the last axis. x, y, dy, dx: (rows, ld); weight: (ld); rstd: (rows). ld = padded(C), padding zero.
//   forward:   rstd = 1/sqrt(mean(x^2) + eps);  y = x * rstd * weight
//   add:       y = residual + x * rstd * weight
//   backward:  g = dy * weight;  dx = rstd * (g - x * rstd^2 * mean(g * x))
// Grid: one workgroup per row. Saved: x, rstd. The weight is frozen, so there is no dweight. `add` has the same backward.

const WG: u32 = 128u; // more threads cost more in barriers than they save in the loop, above all on software adapters
override ACCUMULATE: bool = false; // backward: dx += instead of dx =

struct Params { rows: u32, ld4: u32, C: f32, eps: f32 }

// shared
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;
// forward, add
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> rstd_out: array<f32>;
// backward
@group(0) @binding(5) var<storage, read> dy: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> rstd: array<f32>;
@group(0) @binding(7) var<storage, read_write> dx: array<vec4<f32>>;
// add
@group(0) @binding(8) var<storage, read> residual: array<vec4<f32>>;

@compute @workgroup_size(WG)
fn forward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
           @builtin(local_invocation_index) lane: u32) {
    let row = group_index(wid, groups);
    if (row >= params.rows) { return; } // uniform in the workgroup
    let base = row * params.ld4;
    var sum = 0.0;
    for (var c = lane; c < params.ld4; c += WG) { sum += dot(x[base + c], x[base + c]); }
    let r = inverseSqrt(workgroup_sum(sum, lane) / params.C + params.eps);
    if (lane == 0u) { rstd_out[row] = r; }
    for (var c = lane; c < params.ld4; c += WG) { y[base + c] = x[base + c] * r * weight[c]; }
}

@compute @workgroup_size(WG)
fn add(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
       @builtin(local_invocation_index) lane: u32) {
    let row = group_index(wid, groups);
    if (row >= params.rows) { return; }
    let base = row * params.ld4;
    var sum = 0.0;
    for (var c = lane; c < params.ld4; c += WG) { sum += dot(x[base + c], x[base + c]); }
    let r = inverseSqrt(workgroup_sum(sum, lane) / params.C + params.eps);
    if (lane == 0u) { rstd_out[row] = r; }
    for (var c = lane; c < params.ld4; c += WG) { y[base + c] = residual[base + c] + x[base + c] * r * weight[c]; }
}

@compute @workgroup_size(WG)
fn backward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
            @builtin(local_invocation_index) lane: u32) {
    let row = group_index(wid, groups);
    if (row >= params.rows) { return; }
    let base = row * params.ld4;
    let r = rstd[row];
    var sum = 0.0; // sum of g * x
    for (var c = lane; c < params.ld4; c += WG) { sum += dot(dy[base + c] * weight[c], x[base + c]); }
    let k = workgroup_sum(sum, lane) / params.C * r * r;
    for (var c = lane; c < params.ld4; c += WG) {
        let d = r * (dy[base + c] * weight[c] - x[base + c] * k);
        if (ACCUMULATE) { dx[base + c] += d; } else { dx[base + c] = d; }
    }
}
