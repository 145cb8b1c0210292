// uses: common/grid.wgsl
// uses: common/half.wgsl
// Embedding lookup: x[t] = table[ids[t]] * scale.  x: (rows, ld); ids: (rows)
// The table is stored as it came, two 16-bit values a word, and split by rows where it exceeds a binding: `part` holds
// rows [row_start, row_start + part_rows), and a record writes only the tokens whose id lies there.
// Grid: one thread for four columns. The table is frozen and nothing lies below it: no backward.

const WG: u32 = 256u;
override FORMAT: u32; // of the table: 0 f32, 1 bf16, 2 f16

struct Params { rows: u32, ld4: u32, row_start: u32, part_rows: u32, scale: f32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<i32>;
@group(0) @binding(2) var<storage, read> part: array<u32>;
@group(0) @binding(3) var<storage, read_write> x: array<vec4<f32>>;

fn decode(word: u32) -> vec2<f32> {
    if (FORMAT == 1u) { return vec2(from_bf16(word & 0xffffu), from_bf16(word >> 16u)); }
    return vec2(from_f16(word & 0xffffu), from_f16(word >> 16u));
}

fn load4(i: u32) -> vec4<f32> { // elements 4i .. 4i+3 of the part
    if (FORMAT == 0u) {
        return bitcast<vec4<f32>>(vec4(part[4u * i], part[4u * i + 1u], part[4u * i + 2u], part[4u * i + 3u]));
    }
    return vec4(decode(part[2u * i]), decode(part[2u * i + 1u]));
}

@compute @workgroup_size(WG)
fn forward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
           @builtin(local_invocation_index) lane: u32) {
    let i = group_index(wid, groups) * WG + lane;
    let t = i / params.ld4;
    if (t >= params.rows) { return; }
    let row = u32(ids[t]) - params.row_start; // wraps for rows before the part
    if (row < params.part_rows) { x[i] = load4(row * params.ld4 + i % params.ld4) * params.scale; }
}
