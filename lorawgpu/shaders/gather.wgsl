// uses: common/grid.wgsl
// Gathers target rows of the residual stream, and scatters their gradient back. x, dx: (M, ld); y, dy: (rows, ld)
//   forward:   y[i] = x[index[start+i]]       backward:  dx[index[start+i]] = dy[i]
// if target_ids[start+i] >= 0. Other rows of y become 0; other rows of dx are not written (clear it before).
// index, target_ids: (count); start+i past their end has no target. Rows are unique, so a plain store suffices.
// Grid: one thread per four columns of y.

const WG: u32 = 256u;

struct Params { rows: u32, ld4: u32, start: u32, count: u32, source_rows: u32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> index: array<i32>;
@group(0) @binding(2) var<storage, read> target_ids: array<i32>;
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> y: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> dy: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> dx: array<vec4<f32>>;

fn source_row(row: u32) -> u32 { // source_rows or more for none
    let i = params.start + row;
    if (i >= params.count) { return params.source_rows; }
    return select(params.source_rows, u32(index[i]), target_ids[i] >= 0);
}

@compute @workgroup_size(WG)
fn forward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
           @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * WG + lane;
    let row = i / params.ld4;
    if (row >= params.rows) { return; }
    let source = source_row(row);
    var v = vec4(0.0);
    if (source < params.source_rows) { v = x[source * params.ld4 + i % params.ld4]; }
    y[i] = v;
}

@compute @workgroup_size(WG)
fn backward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
            @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * WG + lane;
    let row = i / params.ld4;
    if (row >= params.rows) { return; }
    let source = source_row(row);
    if (source < params.source_rows) { dx[source * params.ld4 + i % params.ld4] = dy[i]; }
}
