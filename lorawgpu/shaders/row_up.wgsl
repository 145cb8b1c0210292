// uses: common/grid.wgsl
// uses: common/reduce_int.wgsl
// For each row of x, the power of two `up` with which its largest magnitude lies in [2^13, 2^14): so that up x, split into
// two f16, keeps 22 bits and cannot overflow. A row of zeros, or with an infinity or NaN, has up = 1.
// Grid: one workgroup per row.
const WG: u32 = 128u;

struct Params { rows: u32, ld4: u32, off4: u32, columns4: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> up: array<f32>;

@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let row = group_index(wid, groups);
    if (row >= params.rows) { return; } // uniform in the workgroup
    let base = row * params.ld4 + params.off4;
    var largest = vec4(0u); // bits of |x|, which have the order of the values
    for (var c = lane; c < params.columns4; c += WG) {
        largest = max(largest, bitcast<vec4<u32>>(x[base + c]) & vec4(0x7fffffffu));
    }
    let most = workgroup_max_u32(max(max(largest.x, largest.y), max(largest.z, largest.w)), lane);
    let exponent = clamp(most >> 23u, 13u, 254u); // subnormal rows and tiny ones cannot be raised further
    let power = clamp(267u - exponent, 1u, 253u); // 127 + 13 - (exponent - 127)
    let plain = most == 0u || most >= 0x7f800000u;
    if (lane == 0u) { up[row] = select(bitcast<f32>(power << 23u), 1.0, plain); }
}
