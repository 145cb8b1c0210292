// Tree sum of four values at once over one workgroup of WG lanes (a power of two). Call from uniform control flow only.
var<workgroup> reduce_vec4_scratch: array<vec4<f32>, WG>;

fn workgroup_sum_vec4(value: vec4<f32>, lane: u32) -> vec4<f32> {
    workgroupBarrier(); // the previous call may still be reading
    reduce_vec4_scratch[lane] = value;
    workgroupBarrier();
    for (var s = WG / 2u; s > 0u; s /= 2u) {
        if (lane < s) { reduce_vec4_scratch[lane] += reduce_vec4_scratch[lane + s]; }
        workgroupBarrier();
    }
    return reduce_vec4_scratch[0];
}
