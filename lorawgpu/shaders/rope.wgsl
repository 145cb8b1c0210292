// uses: common/grid.wgsl
// Rotary embedding, half-split pairs (i, i + HD/2), between the fused projection and attention; k and v go to the cache.
//   angle = position * inv_freq     y_lo = x_lo cos - x_hi sin     y_hi = x_hi cos + x_lo sin     (v is copied)
//   backward: the inverse rotation (-sin) of dq, dk; dv is copied.
// qkv, dqkv: (rows, ld), q in columns [0, Q), k in [k_off, k_off+KV), v in [v_off, v_off+KV). q, dq: (rows, ldq).
// kcache, vcache, dk, dv: (cache_rows, ldkv), row slot[t] for token t; a slot outside writes nothing and reads as 0.
// table: (positions, HD), cos of the HD/2 angles, then their sin. Q = NH*HD, KV = NKV*HD.
// Grid: `blocks` workgroups a row, one thread a column: of (q | k | v) forward, of dqkv backward. Saved: position, slot.

override WG: u32 = 256u;
override HALF: u32; // HD/2; a constant, because dividing by one is cheap

struct Params {
    rows: u32, blocks: u32, ld: u32, Q: u32, KV: u32,
    k_off: u32, v_off: u32, ldq: u32, ldkv: u32, cache_rows: u32, positions: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> position: array<i32>;
@group(0) @binding(2) var<storage, read> slot: array<i32>;
@group(0) @binding(3) var<storage, read> table: array<f32>;
// forward
@group(0) @binding(4) var<storage, read> qkv: array<f32>;
@group(0) @binding(5) var<storage, read_write> q: array<f32>;
@group(0) @binding(6) var<storage, read_write> kcache: array<f32>;
@group(0) @binding(7) var<storage, read_write> vcache: array<f32>;
// backward
@group(0) @binding(8) var<storage, read> dq: array<f32>;
@group(0) @binding(9) var<storage, read> dk: array<f32>;
@group(0) @binding(10) var<storage, read> dv: array<f32>;
@group(0) @binding(11) var<storage, read_write> dqkv: array<f32>;

// What column c of a row of heads turns with: its partner's column, and (cos, signed sin) of y = x cos + partner sin.
struct Turn { partner: u32, cos: f32, sin: f32 }

fn turn(t: u32, c: u32, direction: f32) -> Turn {
    let d = c % (2u * HALF);
    let upper = d >= HALF;
    let row = min(u32(position[t]), params.positions - 1u) * 2u * HALF;
    let i = select(d, d - HALF, upper);
    let sin = table[row + HALF + i] * direction;
    return Turn(select(c + HALF, c - HALF, upper), table[row + i], select(-sin, sin, upper));
}

fn roped(t: u32, c: u32, width: u32, first: u32) -> f32 { // column c of the heads from column `first` of qkv on
    if (c >= width) { return 0.0; }
    let r = turn(t, c, 1.0);
    let base = t * params.ld + first;
    return qkv[base + c] * r.cos + qkv[base + r.partner] * r.sin;
}

@compute @workgroup_size(WG)
fn forward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
           @builtin(local_invocation_index) lane: u32) {
    let group = group_index(wid, groups);
    let t = group / params.blocks;
    var c = group % params.blocks * WG + lane;
    if (t >= params.rows || c >= params.ldq + 2u * params.ldkv) { return; }
    if (c < params.ldq) {
        q[t * params.ldq + c] = roped(t, c, params.Q, 0u);
        return;
    }
    c -= params.ldq;
    let s = u32(slot[t]);
    if (s >= params.cache_rows) { return; }
    if (c < params.ldkv) {
        kcache[s * params.ldkv + c] = roped(t, c, params.KV, params.k_off);
        return;
    }
    c -= params.ldkv;
    var v = 0.0;
    if (c < params.KV) { v = qkv[t * params.ld + params.v_off + c]; }
    vcache[s * params.ldkv + c] = v;
}

@compute @workgroup_size(WG)
fn backward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
            @builtin(local_invocation_index) lane: u32) {
    let group = group_index(wid, groups);
    let t = group / params.blocks;
    let c = group % params.blocks * WG + lane;
    if (t >= params.rows || c >= params.ld) { return; }
    let k = c - params.k_off; // these wrap for columns before their part
    let v = c - params.v_off;
    let s = u32(slot[t]);
    let cached = s < params.cache_rows;
    let base = s * params.ldkv;
    var d = 0.0;
    if (c < params.Q) {
        let r = turn(t, c, -1.0);
        d = dq[t * params.ldq + c] * r.cos + dq[t * params.ldq + r.partner] * r.sin;
    } else if (k < params.KV && cached) {
        let r = turn(t, k, -1.0);
        d = dk[base + k] * r.cos + dk[base + r.partner] * r.sin;
    } else if (v < params.KV && cached) {
        d = dv[base + v];
    }
    dqkv[t * params.ld + c] = d;
}
