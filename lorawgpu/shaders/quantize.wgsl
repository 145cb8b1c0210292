// uses: common/grid.wgsl
// uses: common/reduce.wgsl
// uses: common/reduce_int.wgsl
// uses: common/divide.wgsl
// uses: common/finite.wgsl
// uses: common/state.wgsl
// BitNet's per-token int8 quantizer, with or without the RMSNorm before it. x, y: (rows, ld); weight: (ld); rstd: (rows)
//   quantize:               v = x
//   rmsnorm_quantize:       rstd = 1/sqrt(mean(x^2) + eps);  v = x * rstd * weight
//   rmsnorm_quantize_keep:  the same, and y = v (LoRA reads the unquantized row)
//   all:  s = 127 / max(max|v|, 1e-5);  xq = clamp(round_half_even(v * s), -128, 127)
// xq: (rows, ld/4) words of four columns, lowest byte first. qscale: (rows, 2) words: bits of f32 1/s, and the i32 sum of
// the row of xq, which a ternary product subtracts because it uses codes T + 1.
// A non-finite x marks the step bad here, because rounding would turn NaN into a number.
// Grid: one workgroup per row. Backward: straight through, dx = dv.

const WG: u32 = 128u; // more threads cost more in barriers than they save in the loop, above all on software adapters

struct Params { rows: u32, ld4: u32, C: f32, eps: f32, record_id: u32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> xq: array<u32>;
@group(0) @binding(4) var<storage, read_write> qscale: array<vec2<u32>>; // u32: a small integer is a subnormal f32
@group(0) @binding(5) var<storage, read_write> rstd: array<f32>;
@group(0) @binding(6) var<storage, read_write> y: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> state: array<atomic<u32>>;

fn max_bits(v: vec4<f32>) -> u32 { // bits of |v|, which have the order of the values, with infinity and NaN on top
    let b = bitcast<vec4<u32>>(v) & vec4(0x7fffffffu);
    return max(max(b.x, b.y), max(b.z, b.w));
}

fn finish_row(row: u32, lane: u32, s: f32, row_sum: u32, finite: bool) {
    let total = workgroup_sum_u32(row_sum, lane);
    if (lane == 0u) {
        qscale[row] = vec2(bitcast<u32>(divide(1.0, s)), total);
        if (!finite) { mark_bad(params.record_id); }
    }
}

fn scale_of(largest: u32) -> f32 { return divide(127.0, max(bitcast<f32>(largest), 1e-5)); }

fn quantize4(v: vec4<f32>, s: f32) -> vec4<i32> { return vec4<i32>(clamp(round(v * s), vec4(-128.0), vec4(127.0))); }

fn pack4(q: vec4<i32>) -> u32 {
    let b = vec4<u32>(q & vec4(255));
    return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}

fn sum4(q: vec4<i32>) -> u32 { return u32(q.x + q.y + q.z + q.w); }

@compute @workgroup_size(WG)
fn quantize(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
            @builtin(local_invocation_index) lane: u32) {
    let row = group_index(wid, groups);
    if (row >= params.rows) { return; } // uniform in the workgroup
    let base = row * params.ld4;
    var largest = 0u;
    for (var c = lane; c < params.ld4; c += WG) { largest = max(largest, max_bits(x[base + c])); }
    largest = workgroup_max_u32(largest, lane);
    let s = scale_of(largest);
    var row_sum = 0u;
    for (var c = lane; c < params.ld4; c += WG) {
        let q = quantize4(x[base + c], s);
        xq[base + c] = pack4(q);
        row_sum += sum4(q);
    }
    finish_row(row, lane, s, row_sum, largest < 0x7f800000u);
}

// The two entry points below differ by one store, because an entry point binds exactly the buffers that it uses.
fn row_rstd(base: u32, lane: u32) -> vec2<f32> { // (rstd, sum of squares)
    var sum = 0.0;
    for (var c = lane; c < params.ld4; c += WG) { sum += dot(x[base + c], x[base + c]); }
    sum = workgroup_sum(sum, lane);
    return vec2(inverseSqrt(sum / params.C + params.eps), sum);
}

fn row_scale(base: u32, lane: u32, r: f32) -> f32 {
    var largest = 0u;
    for (var c = lane; c < params.ld4; c += WG) { largest = max(largest, max_bits(x[base + c] * r * weight[c])); }
    return scale_of(workgroup_max_u32(largest, lane));
}

@compute @workgroup_size(WG)
fn rmsnorm_quantize(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
                    @builtin(local_invocation_index) lane: u32) {
    let row = group_index(wid, groups);
    if (row >= params.rows) { return; }
    let base = row * params.ld4;
    let norm = row_rstd(base, lane);
    if (lane == 0u) { rstd[row] = norm.x; }
    let s = row_scale(base, lane, norm.x);
    var row_sum = 0u;
    for (var c = lane; c < params.ld4; c += WG) {
        let q = quantize4(x[base + c] * norm.x * weight[c], s);
        xq[base + c] = pack4(q);
        row_sum += sum4(q);
    }
    finish_row(row, lane, s, row_sum, is_finite(norm.y));
}

@compute @workgroup_size(WG)
fn rmsnorm_quantize_keep(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
                         @builtin(local_invocation_index) lane: u32) {
    let row = group_index(wid, groups);
    if (row >= params.rows) { return; }
    let base = row * params.ld4;
    let norm = row_rstd(base, lane);
    if (lane == 0u) { rstd[row] = norm.x; }
    let s = row_scale(base, lane, norm.x);
    var row_sum = 0u;
    for (var c = lane; c < params.ld4; c += WG) {
        let v = x[base + c] * norm.x * weight[c];
        let q = quantize4(v, s);
        y[base + c] = v;
        xq[base + c] = pack4(q);
        row_sum += sum4(q);
    }
    finish_row(row, lane, s, row_sum, is_finite(norm.y));
}
