// uses: common/grid.wgsl
// uses: common/reduce.wgsl
// RMSNorm on each head of q and k in a fused projection. x, y, dy: (rows, ld), q from column 0, k from k_off, v from v_off.
//   forward:   rstd = 1/sqrt(mean(x^2) + eps) per head;  y = x * rstd * weight for q and k,  y = x for v
//   backward:  g = dy * weight;  dy = rstd * (g - x * rstd^2 * mean(g * x)) for q and k, in place;  dv is unchanged
// q_weight, k_weight: (HD). Grid: one workgroup per row and head of q, k (forward: and v). Saved: x; rstd is recomputed.

const WG: u32 = 64u;

struct Params { rows: u32, ld: u32, k_off: u32, v_off: u32, HD: u32, heads: u32, kv_heads: u32, eps: f32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> q_weight: array<f32>;
@group(0) @binding(3) var<storage, read> k_weight: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
@group(0) @binding(5) var<storage, read_write> dy: array<f32>;

struct Head { start: u32, part: u32 } // part 0: q, 1: k, 2: v

fn head_of(row: u32, head: u32) -> Head {
    let base = row * params.ld;
    if (head < params.heads) { return Head(base + head * params.HD, 0u); }
    let h = head - params.heads;
    if (h < params.kv_heads) { return Head(base + params.k_off + h * params.HD, 1u); }
    return Head(base + params.v_off + (h - params.kv_heads) * params.HD, 2u);
}
fn weight_of(part: u32, d: u32) -> f32 {
    if (part == 0u) { return q_weight[d]; }
    return k_weight[d];
}
fn rstd_of(start: u32, lane: u32) -> f32 {
    var sum = 0.0;
    for (var d = lane; d < params.HD; d += WG) { sum += x[start + d] * x[start + d]; }
    return inverseSqrt(workgroup_sum(sum, lane) / f32(params.HD) + params.eps);
}

@compute @workgroup_size(WG)
fn forward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
           @builtin(local_invocation_index) lane: u32) {
    let all = params.heads + 2u * params.kv_heads;
    let id = group_index(wid, groups);
    if (id >= params.rows * all) { return; } // uniform in the workgroup
    let head = head_of(id / all, id % all);
    let rstd = rstd_of(head.start, lane);
    for (var d = lane; d < params.HD; d += WG) {
        let value = x[head.start + d];
        y[head.start + d] = select(value * rstd * weight_of(head.part, d), value, head.part == 2u);
    }
}

@compute @workgroup_size(WG)
fn backward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
            @builtin(local_invocation_index) lane: u32) {
    let all = params.heads + params.kv_heads;
    let id = group_index(wid, groups);
    if (id >= params.rows * all) { return; }
    let head = head_of(id / all, id % all);
    let rstd = rstd_of(head.start, lane);
    var sum = 0.0; // sum of g * x
    for (var d = lane; d < params.HD; d += WG) {
        sum += dy[head.start + d] * weight_of(head.part, d) * x[head.start + d];
    }
    let k = workgroup_sum(sum, lane) / f32(params.HD) * rstd * rstd;
    for (var d = lane; d < params.HD; d += WG) {
        dy[head.start + d] = rstd * (dy[head.start + d] * weight_of(head.part, d) - x[head.start + d] * k);
    }
}
