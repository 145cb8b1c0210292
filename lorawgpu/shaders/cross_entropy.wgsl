// uses: common/exp.wgsl
// uses: common/grid.wgsl
// uses: common/reduce.wgsl
// uses: common/finite.wgsl
// uses: common/state.wgsl
// Cross-entropy of one chunk of target rows. logits: (rows, ld), columns [0, V); target_ids: (count); losses: (count)
//   loss[i] = lse - logits[i, id],  lse = log(sum_v exp(logits[i, v]))          id = target_ids[start + i]
//   dlogits[i, v] = exp(logits[i, v] - lse) - [v == id]      of the SUM of losses, in place of the logits
// A row with a negative id, or past the end of target_ids, is unused: loss 0, dlogits 0. Columns from V on become 0.
//   loss:           losses only         loss_and_grad:  both        Grid: one workgroup per row, online max and sum.
//   weighted_loss, weighted_loss_and_grad:  the same with loss[i] and dlogits[i] multiplied by row_weights[start + i]
//   add_losses:     total += sum of losses[start .. start+rows). Grid: one workgroup. total is a 64-bit fixed-point number
//                   (whole, units of 2^-32): exact, whereas compilers optimize the compensation of a float sum away.
// A non-finite loss marks the step bad.

const WG: u32 = 256u;
const LOWEST = -3e38; // finite, so that LOWEST - LOWEST is 0 and not NaN

struct Params { rows: u32, ld4: u32, V: u32, start: u32, count: u32, record_id: u32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> target_ids: array<i32>;
@group(0) @binding(2) var<storage, read_write> logits: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> losses: array<f32>;
@group(0) @binding(4) var<storage, read_write> state: array<atomic<u32>>;
@group(0) @binding(5) var<storage, read_write> total: array<vec2<u32>>;
@group(0) @binding(6) var<storage, read> row_weights: array<f32>; // (count)

var<workgroup> sums: array<vec2<u32>, WG>;

fn columns(c: u32) -> vec4<u32> { return vec4(4u * c) + vec4(0u, 1u, 2u, 3u); }

fn target_of(row: u32) -> u32 { // V or more for an unused row
    let i = params.start + row;
    if (i >= params.count) { return params.V; }
    return u32(target_ids[i]);
}

// (max, sum of exp(logit - max)) of a row, over its first `n4` vec4s. Writes the loss.
fn row_loss(row: u32, id: u32, n4: u32, lane: u32) -> vec2<f32> {
    let base = row * params.ld4;
    var logit = 0.0;
    if (lane == 0u && id < params.V) { logit = logits[base + id / 4u][id % 4u]; }
    var top = LOWEST;
    var sum = 0.0;
    for (var c = lane; c < n4; c += WG) {
        let v = select(vec4(LOWEST), logits[base + c], columns(c) < vec4(params.V));
        let higher = max(max(top, max(v.x, v.y)), max(v.z, v.w));
        sum = sum * exact_exp(top - higher) + dot(exact_exp4(v - higher), vec4(1.0));
        top = higher;
    }
    let row_top = workgroup_max(top, lane);
    let row_sum = workgroup_sum(sum * exact_exp(top - row_top), lane);
    if (lane == 0u && params.start + row < params.count) {
        let value = select(0.0, row_top - logit + log(row_sum), n4 > 0u);
        losses[params.start + row] = value;
        if (!is_finite(value)) { mark_bad(params.record_id); }
    }
    return vec2(row_top, row_sum);
}

@compute @workgroup_size(WG)
fn loss(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let row = group_index(wid, groups);
    if (row >= params.rows) { return; } // uniform in the workgroup
    let id = target_of(row);
    row_loss(row, id, select(0u, params.ld4, id < params.V), lane);
}

@compute @workgroup_size(WG)
fn loss_and_grad(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
                 @builtin(local_invocation_index) lane: u32) {
    let row = group_index(wid, groups);
    if (row >= params.rows) { return; }
    let id = target_of(row);
    let used = id < params.V;
    let stats = row_loss(row, id, select(0u, params.ld4, used), lane);
    let base = row * params.ld4;
    for (var c = lane; c < params.ld4; c += WG) {
        let p = exact_exp4(logits[base + c] - stats.x) / stats.y;
        let d = p - select(vec4(0.0), vec4(1.0), columns(c) == vec4(id));
        logits[base + c] = select(vec4(0.0), d, (columns(c) < vec4(params.V)) & vec4(used));
    }
}

// Returns the weight of a row; lane 0 multiplies by it the loss that it has just written.
fn weigh_loss(row: u32, id: u32, lane: u32) -> f32 {
    if (id >= params.V) { return 0.0; } // unused: its weight may never have been written
    let i = params.start + row;
    let weight = row_weights[i];
    if (lane == 0u) {
        losses[i] *= weight;
        if (!is_finite(losses[i])) { mark_bad(params.record_id); }
    }
    return weight;
}

@compute @workgroup_size(WG)
fn weighted_loss(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
                 @builtin(local_invocation_index) lane: u32) {
    let row = group_index(wid, groups);
    if (row >= params.rows) { return; }
    let id = target_of(row);
    row_loss(row, id, select(0u, params.ld4, id < params.V), lane);
    weigh_loss(row, id, lane);
}

@compute @workgroup_size(WG)
fn weighted_loss_and_grad(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
                          @builtin(local_invocation_index) lane: u32) {
    let row = group_index(wid, groups);
    if (row >= params.rows) { return; }
    let id = target_of(row);
    let used = id < params.V;
    let stats = row_loss(row, id, select(0u, params.ld4, used), lane);
    let weight = weigh_loss(row, id, lane);
    let base = row * params.ld4;
    for (var c = lane; c < params.ld4; c += WG) {
        let p = exact_exp4(logits[base + c] - stats.x) / stats.y;
        let d = weight * (p - select(vec4(0.0), vec4(1.0), columns(c) == vec4(id)));
        logits[base + c] = select(vec4(0.0), d, (columns(c) < vec4(params.V)) & vec4(used));
    }
}

fn fixed_point(x: f32) -> vec2<u32> { // two's complement, because rounding can make a loss negative
    let whole = floor(x);
    return select(vec2(0u), vec2(u32(i32(whole)), u32((x - whole) * 0x1p32f)), is_finite(x));
}

fn add64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.y + b.y;
    return vec2(a.x + b.x + select(0u, 1u, low < a.y), low);
}

@compute @workgroup_size(WG)
fn add_losses(@builtin(local_invocation_index) lane: u32) {
    var sum = vec2(0u);
    for (var i = lane; i < params.rows && params.start + i < params.count; i += WG) {
        sum = add64(sum, fixed_point(losses[params.start + i]));
    }
    sums[lane] = sum;
    workgroupBarrier();
    for (var s = WG / 2u; s > 0u; s /= 2u) {
        if (lane < s) { sums[lane] = add64(sums[lane], sums[lane + s]); }
        workgroupBarrier();
    }
    if (lane == 0u) { total[0] = add64(total[0], sums[0]); }
}
