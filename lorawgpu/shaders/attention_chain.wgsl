// uses: common/exp.wgsl
// uses: common/tanh.wgsl
// Attention as a chain of separate products, to check flash attention against. Equations: reference/attention.py.
//   scores            weights[h,t,j] = scale * sum_d x[t,h,d] cache[j,h/G,d]       (q.k, and dout.v for dattn)
//   capped_scores     weights = softcap tanh(those / softcap)
//   softmax           weights -> attn, in place; lse[t,h] = (max_j weights / ln 2, 1 / sum_j exp(weights - max))
//   apply             row_out[t,h,d] = scale * sum_j attn[h,t,j] cache[j,h/G,d]    (out, and dq from dscores)
//   softmax_backward  weights = attn (weights - sum_j attn weights), in place      (dattn -> dscores)
//   softcap_slope     weights *= 1 - tanh(scale * sum_d x[t,h,d] cache[j,h/G,d] / softcap)^2       (dscores -> dz)
//   apply_transposed  slot_out[j,d] = scale * sum over G heads and t of attn[h,t,j] x[t,h,d]   (dv; dk from dscores)
// x, row_out [rows, row_ld]; cache, slot_out [slots, slot_ld]; weights, attn [heads, rows, span], span >= slots.
// Row t sees the last `window` of slots kv_start[t] .. slot[t]. What computes scores visits only tiles that some row
// sees; both softmax kernels write every weight, 0 for slots that a row does not see. apply_transposed needs slot[t] = t
// and segment_end <= rows; with `accumulate` it adds to slot_out.
// Grid, 16 x 16 tiles: of scores (slots, rows, heads); apply (head_dim, rows, heads); apply_transposed (head_dim, slots,
// kv heads). Both softmax kernels: one workgroup per row, (rows, heads). Saved: lse.
// uses: common/reduce.wgsl

const WG: u32 = 256u;
const TILE: u32 = 16u;
const NONE: u32 = 0xffffffffu;

struct Params { rows: u32, slots: u32, span: u32, heads: u32, group: u32, head_dim: u32, row_ld: u32, slot_ld: u32,
                scale: f32, window: u32, softcap: f32, accumulate: u32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> slot: array<u32>;
@group(0) @binding(2) var<storage, read> kv_start: array<u32>;
@group(0) @binding(3) var<storage, read> segment_end: array<u32>;
@group(0) @binding(4) var<storage, read> x: array<f32>;
@group(0) @binding(5) var<storage, read> cache: array<f32>;
@group(0) @binding(6) var<storage, read> attn: array<f32>;
@group(0) @binding(7) var<storage, read_write> weights: array<f32>;
@group(0) @binding(8) var<storage, read_write> row_out: array<f32>;
@group(0) @binding(9) var<storage, read_write> slot_out: array<f32>;
@group(0) @binding(10) var<storage, read_write> lse: array<vec2<f32>>;

// One element of padding per row, so that columns fall into different banks.
var<workgroup> left: array<array<f32, 17>, TILE>;
var<workgroup> right: array<array<f32, 17>, TILE>;

fn row_at(t: u32, h: u32, d: u32) -> f32 {
    if (t >= params.rows || d >= params.head_dim) { return 0.0; }
    return x[t * params.row_ld + h * params.head_dim + d];
}

fn cache_at(j: u32, h: u32, d: u32) -> f32 {
    if (j >= params.slots || d >= params.head_dim) { return 0.0; }
    return cache[j * params.slot_ld + h / params.group * params.head_dim + d];
}

fn attn_at(h: u32, t: u32, j: u32) -> f32 {
    if (t >= params.rows || j >= params.slots) { return 0.0; }
    return attn[(h * params.rows + t) * params.span + j];
}

fn first_slot(t: u32) -> u32 { return max(kv_start[t], slot[t] - min(slot[t], params.window - 1u)); }

// The first and the last slot that any of the rows t0 .. t0+15 sees.
fn tile_range(t0: u32) -> vec2<u32> {
    var lo = 0xffffffffu;
    var hi = 0u;
    for (var t = t0; t < min(t0 + TILE, params.rows); t++) {
        lo = min(lo, first_slot(t));
        hi = max(hi, slot[t]);
    }
    return vec2(lo, min(hi, params.slots - 1u));
}

// Whether a row of the tile of scores sees a slot of it. Uniform: it depends only on wid.
fn tile_is_seen(wid: vec3<u32>) -> bool {
    let range = tile_range(wid.y * TILE);
    return wid.x * TILE <= range.y && wid.x * TILE + TILE > range.x;
}

// Where this thread's pair (t, j) of the tile lies in `weights`; NONE if there is no such pair.
fn weight_index(wid: vec3<u32>, lid: vec3<u32>) -> u32 {
    let t = wid.y * TILE + lid.y;
    let j = wid.x * TILE + lid.x;
    return select(NONE, (wid.z * params.rows + t) * params.span + j, t < params.rows && j < params.slots);
}

// scale * x . cache of this thread's pair.
fn tile_score(wid: vec3<u32>, lid: vec3<u32>) -> f32 {
    let t = wid.y * TILE + lid.y;
    let h = wid.z;
    var sum = 0.0;
    for (var d = 0u; d < params.head_dim; d += TILE) {
        left[lid.y][lid.x] = row_at(t, h, d + lid.x);
        right[lid.y][lid.x] = cache_at(wid.x * TILE + lid.y, h, d + lid.x);
        workgroupBarrier();
        for (var k = 0u; k < TILE; k++) { sum = fma(left[lid.y][k], right[lid.x][k], sum); }
        workgroupBarrier();
    }
    return params.scale * sum;
}

@compute @workgroup_size(16, 16)
fn scores(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_id) lid: vec3<u32>) {
    if (!tile_is_seen(wid)) { return; }
    let score = tile_score(wid, lid);
    let at = weight_index(wid, lid);
    if (at != NONE) { weights[at] = score; }
}

@compute @workgroup_size(16, 16)
fn capped_scores(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_id) lid: vec3<u32>) {
    if (!tile_is_seen(wid)) { return; }
    let score = tile_score(wid, lid);
    let at = weight_index(wid, lid);
    if (at != NONE) { weights[at] = params.softcap * exact_tanh(vec4(score / params.softcap)).value.x; }
}

@compute @workgroup_size(16, 16)
fn softcap_slope(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_id) lid: vec3<u32>) {
    if (!tile_is_seen(wid)) { return; }
    let score = tile_score(wid, lid);
    let at = weight_index(wid, lid);
    if (at != NONE) { weights[at] *= exact_tanh(vec4(score / params.softcap)).slope.x; }
}

@compute @workgroup_size(WG)
fn softmax(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let t = wid.x;
    let base = (wid.y * params.rows + t) * params.span;
    let lo = first_slot(t);
    let hi = min(slot[t], params.slots - 1u);
    var top = -3.4e38;
    for (var j = lo + lane; j <= hi; j += WG) { top = max(top, weights[base + j]); }
    top = workgroup_max(top, lane);
    var sum = 0.0;
    for (var j = lo + lane; j <= hi; j += WG) { sum += exact_exp(weights[base + j] - top); }
    sum = workgroup_sum(sum, lane);
    for (var j = lane; j < params.span; j += WG) {
        var p = 0.0;
        if (j >= lo && j <= hi) { p = exact_exp(weights[base + j] - top) / sum; }
        weights[base + j] = p;
    }
    if (lane == 0u) { lse[t * params.heads + wid.y] = vec2(top * 1.4426950408889634, 1.0 / sum); }
}

@compute @workgroup_size(16, 16)
fn apply(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_id) lid: vec3<u32>) {
    let t = wid.y * TILE + lid.y;
    let d = wid.x * TILE + lid.x;
    let h = wid.z;
    let range = tile_range(wid.y * TILE);
    var sum = 0.0;
    for (var j = range.x / TILE * TILE; j <= range.y; j += TILE) {
        left[lid.y][lid.x] = attn_at(h, t, j + lid.x);
        right[lid.y][lid.x] = cache_at(j + lid.y, h, d);
        workgroupBarrier();
        for (var k = 0u; k < TILE; k++) { sum = add_product(sum, left[lid.y][k], right[k][lid.x]); }
        workgroupBarrier();
    }
    if (t >= params.rows) { return; }
    let width = params.heads * params.head_dim;
    if (d < params.head_dim) { row_out[t * params.row_ld + h * params.head_dim + d] = params.scale * sum; }
    if (h + 1u == params.heads && wid.x == 0u && width + lid.x < params.row_ld) {
        row_out[t * params.row_ld + width + lid.x] = 0.0;
    }
}

@compute @workgroup_size(WG)
fn softmax_backward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let t = wid.x;
    let base = (wid.y * params.rows + t) * params.span;
    let lo = first_slot(t);
    let hi = min(slot[t], params.slots - 1u);
    var sum = 0.0;
    for (var j = lo + lane; j <= hi; j += WG) { sum = fma(attn[base + j], weights[base + j], sum); }
    sum = workgroup_sum(sum, lane);
    for (var j = lane; j < params.span; j += WG) {
        var ds = 0.0;
        if (j >= lo && j <= hi) { ds = attn[base + j] * (weights[base + j] - sum); }
        weights[base + j] = ds;
    }
}

@compute @workgroup_size(16, 16)
fn apply_transposed(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_id) lid: vec3<u32>) {
    let j0 = wid.y * TILE;
    let d = wid.x * TILE + lid.x;
    var end = 0u;
    for (var j = j0; j < min(j0 + TILE, params.slots); j++) { end = max(end, min(segment_end[j], j + params.window)); }
    end = min(end, params.rows);
    var sum = 0.0;
    for (var h = wid.z * params.group; h < (wid.z + 1u) * params.group; h++) {
        for (var t = j0; t < end; t += TILE) {
            left[lid.y][lid.x] = attn_at(h, t + lid.y, j0 + lid.x);
            right[lid.y][lid.x] = row_at(t + lid.y, h, d);
            workgroupBarrier();
            for (var k = 0u; k < TILE; k++) { sum = add_product(sum, left[k][lid.y], right[k][lid.x]); }
            workgroupBarrier();
        }
    }
    let j = j0 + lid.y;
    if (j >= params.slots) { return; }
    let width = params.heads / params.group * params.head_dim;
    let at = j * params.slot_ld + wid.z * params.head_dim + d;
    if (d < params.head_dim && params.accumulate != 0u) {
        slot_out[at] += params.scale * sum;
    } else if (d < params.head_dim) {
        slot_out[at] = params.scale * sum;
    }
    if (width == (wid.z + 1u) * params.head_dim && wid.x == 0u && width + lid.x < params.slot_ld) {
        slot_out[j * params.slot_ld + width + lid.x] = 0.0;
    }
}

// A weight of 0 must hide the slot's value, because a slot that was never written may hold NaN.
fn add_product(sum: f32, weight: f32, value: f32) -> f32 { return select(fma(weight, value, sum), sum, weight == 0.0); }
