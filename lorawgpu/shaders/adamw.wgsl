// uses: common/grid.wgsl
// uses: common/reduce.wgsl
// uses: common/finite.wgsl
// uses: common/state.wgsl
// uses: common/step.wgsl
// Gradient norm, clipping and PyTorch's AdamW over flat buffers. weights, grads, exp_avg, exp_avg_sq: (4 * count4)
//   norm_partial:  partials[first + group] = sum of (grads * inv_targets)^2 over the group's SPAN * WG * 4 elements
//   norm_finish:   norm = sqrt(sum of partials[0 .. count4)); if not finite, the step is bad   Grid: one workgroup
//   adamw:         g = grads * inv_targets * min(1, max_norm / (norm + 1e-6))                  max_norm <= 0: no clip
//                  p -= lr * weight_decay * p;  m += (1 - b1) * (g - m);  v = b2 * v + (1 - b2) * g^2
//                  p -= lr * m_scale * m / (sqrt(v) * v_scale + eps)
// Grid of adamw: one thread per four elements. A bad step changes nothing. 1 - b1 and 1 - b2 are computed in float64.

const WG: u32 = 256u;
const SPAN = 16u; // vec4s per thread

struct Params {
    count4: u32, first: u32, record_id: u32,
    one_minus_beta1: f32, beta2: f32, one_minus_beta2: f32, eps: f32, weight_decay: f32, max_norm: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> grads: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> partials: array<f32>;
@group(0) @binding(4) var<storage, read_write> norm: array<f32>;
@group(0) @binding(5) var<storage, read_write> state: array<atomic<u32>>;
@group(0) @binding(6) var<storage, read_write> weights: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> exp_avg: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read_write> exp_avg_sq: array<vec4<f32>>;

@compute @workgroup_size(WG)
fn norm_partial(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
                @builtin(local_invocation_index) lane: u32) {
    let group = group_index(wid, groups);
    let base = group * SPAN * WG;
    if (base >= params.count4) { return; } // uniform in the workgroup
    var sum = 0.0;
    for (var i = base + lane; i < min(base + SPAN * WG, params.count4); i += WG) {
        let g = grads[i] * step.inv_targets;
        sum += dot(g, g);
    }
    sum = workgroup_sum(sum, lane);
    if (lane == 0u) { partials[params.first + group] = sum; }
}

@compute @workgroup_size(WG)
fn norm_finish(@builtin(local_invocation_index) lane: u32) {
    var sum = 0.0;
    for (var i = lane; i < params.count4; i += WG) { sum += partials[i]; }
    sum = workgroup_sum(sum, lane);
    if (lane == 0u) {
        norm[0] = sqrt(sum);
        if (!is_finite(sum)) { mark_bad(params.record_id); }
    }
}

@compute @workgroup_size(WG)
fn adamw(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
         @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * WG + lane;
    if (i >= params.count4 || atomicLoad(&state[0]) != 0u) { return; }
    var scale = step.inv_targets;
    if (params.max_norm > 0.0) { scale *= min(1.0, params.max_norm / (norm[0] + 1e-6)); }
    let g = grads[i] * scale;
    let m = exp_avg[i] + params.one_minus_beta1 * (g - exp_avg[i]);
    let v = params.beta2 * exp_avg_sq[i] + params.one_minus_beta2 * g * g;
    let p = weights[i] - step.lr * params.weight_decay * weights[i];
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    weights[i] = p - step.lr * step.m_scale * m / (sqrt(v) * step.v_scale + params.eps);
}
