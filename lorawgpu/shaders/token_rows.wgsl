// uses: common/grid.wgsl
// Rows of the embedding and columns of the logits that are trained, and the gradient of a table that is looked up.
//   lookup:    x[t] = table[r] * scale             if r = row_of[ids[t]] >= 0       x: (rows, ld); table: (any, ld)
//   add_rows:  table[ids[t] - first] += scale * sum of x over the rows of that id   if within [first, first + count)
//   add_own:   table[r] += the same                                                  if r >= 0
//   put:       y[i, ids[k]] = x[i, k]                                                y: (rows, ldv); x: (rows, ld)
//   take:      x[i, k] = y[i, ids[k]]; y[i, ids[k]] = 0                              k < count; the padding of x is 0
// order: the rows of x sorted by id, equal ids by position, then -1. A thread adds up one run of equal ids, in that
// order: no atomics, and always the same sum. Grid: lookup and add, one thread per four columns; put and take, one per
// element of x.

const WG: u32 = 256u;

struct Params { rows: u32, ld: u32, ldv: u32, first: u32, count: u32, scale: f32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<i32>;
@group(0) @binding(2) var<storage, read> row_of: array<i32>;
@group(0) @binding(3) var<storage, read> order: array<i32>;
@group(0) @binding(4) var<storage, read> rows: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> x: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> dx: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> drows: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read_write> small: array<f32>;
@group(0) @binding(9) var<storage, read_write> logits: array<f32>;

@compute @workgroup_size(WG)
fn lookup(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * WG + lane;
    let ld4 = params.ld / 4u;
    let t = i / ld4;
    if (t >= params.rows) { return; }
    let id = u32(ids[t]);
    if (id >= arrayLength(&row_of)) { return; }
    let row = row_of[id];
    if (row >= 0) { x[i] = rows[u32(row) * ld4 + i % ld4] * params.scale; }
}

fn starts_run(k: u32) -> bool { // whether row order[k] is the first one of its id
    if (order[k] < 0) { return false; }
    if (k == 0u) { return true; }
    return ids[order[k - 1u]] != ids[order[k]];
}

fn sum_of_run(k: u32, column: u32, ld4: u32) -> vec4<f32> {
    let id = ids[order[k]];
    var sum = vec4(0.0);
    for (var j = k; j < params.rows; j++) {
        let t = order[j];
        if (t < 0) { break; }
        if (ids[t] != id) { break; }
        sum += dx[u32(t) * ld4 + column];
    }
    return sum * params.scale;
}

@compute @workgroup_size(WG)
fn add_rows(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
            @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * WG + lane;
    let ld4 = params.ld / 4u;
    let k = i / ld4;
    if (k >= params.rows) { return; }
    if (!starts_run(k)) { return; }
    let row = u32(ids[order[k]]) - params.first; // wraps for ids before the part
    if (row >= params.count) { return; }
    drows[row * ld4 + i % ld4] += sum_of_run(k, i % ld4, ld4);
}

@compute @workgroup_size(WG)
fn add_own(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
           @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * WG + lane;
    let ld4 = params.ld / 4u;
    let k = i / ld4;
    if (k >= params.rows) { return; }
    if (!starts_run(k)) { return; }
    let id = u32(ids[order[k]]);
    if (id >= arrayLength(&row_of)) { return; }
    let row = row_of[id];
    if (row < 0) { return; }
    drows[u32(row) * ld4 + i % ld4] += sum_of_run(k, i % ld4, ld4);
}

@compute @workgroup_size(WG)
fn put(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
       @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * WG + lane;
    let row = i / params.ld;
    let k = i % params.ld;
    if (row >= params.rows || k >= params.count) { return; }
    logits[row * params.ldv + u32(ids[k])] = small[i];
}

@compute @workgroup_size(WG)
fn take(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * WG + lane;
    let row = i / params.ld;
    let k = i % params.ld;
    if (row >= params.rows) { return; }
    if (k >= params.count) {
        small[i] = 0.0;
        return;
    }
    let at = row * params.ldv + u32(ids[k]);
    small[i] = logits[at];
    logits[at] = 0.0;
}
