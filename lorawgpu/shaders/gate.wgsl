// uses: common/exp.wgsl
// uses: common/grid.wgsl
// uses: common/state.wgsl
// The gate of the feed-forward. gu, dgu: (rows, 2*ld), gate in columns [0, I), up in [ld, ld+I); m, dm: (rows, ld)
//   forward:   m = act(g) * u
//   backward:  dg = dm * u * act'(g);  du = dm * act(g)
//   relu2:  act = max(g, 0)^2           act' = 2 max(g, 0)
//   silu:   act = g * sig(g)            act' = sig(g) * (1 + g * (1 - sig(g)))
// Grid: one thread per four columns of m. Saved: gu. All float32, because relu2 overflows f16.
// A non-finite g or u marks the step bad here, because max(NaN, 0) is 0.

const WG: u32 = 256u;
override SILU: bool; // otherwise relu2

struct Params { rows: u32, ld4: u32, record_id: u32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> gu: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> m: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> state: array<atomic<u32>>;
@group(0) @binding(4) var<storage, read> dm: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> dgu: array<vec4<f32>>;

fn sigmoid(g: vec4<f32>) -> vec4<f32> { // exp of negative values only, so it never overflows
    let e = exact_exp4(-abs(g));
    return select(e, vec4(1.0), g >= vec4(0.0)) / (1.0 + e);
}

fn act(g: vec4<f32>) -> vec4<f32> {
    if (SILU) { return g * sigmoid(g); }
    let r = max(g, vec4(0.0));
    return r * r;
}

fn act_slope(g: vec4<f32>) -> vec4<f32> {
    if (SILU) {
        let s = sigmoid(g);
        return s * (1.0 + g * (1.0 - s));
    }
    return 2.0 * max(g, vec4(0.0));
}

@compute @workgroup_size(WG)
fn forward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
           @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * WG + lane;
    let row = i / params.ld4;
    if (row >= params.rows) { return; }
    let at = i + row * params.ld4;
    let g = gu[at];
    let u = gu[at + params.ld4];
    if (any_not_finite(g) || any_not_finite(u)) { mark_bad(params.record_id); }
    m[i] = act(g) * u;
}

@compute @workgroup_size(WG)
fn backward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
            @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * WG + lane;
    let row = i / params.ld4;
    if (row >= params.rows) { return; }
    let at = i + row * params.ld4;
    let g = gu[at];
    dgu[at] = dm[i] * gu[at + params.ld4] * act_slope(g);
    dgu[at + params.ld4] = dm[i] * act(g);
}
