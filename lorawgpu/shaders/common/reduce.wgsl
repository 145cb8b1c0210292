// Tree reductions over one workgroup of WG lanes (a power of two). Call from uniform control flow only.
var<workgroup> reduce_scratch: array<f32, WG>;

fn workgroup_sum(value: f32, lane: u32) -> f32 {
    workgroupBarrier(); // the previous call may still be reading
    reduce_scratch[lane] = value;
    workgroupBarrier();
    for (var s = WG / 2u; s > 0u; s /= 2u) {
        if (lane < s) { reduce_scratch[lane] += reduce_scratch[lane + s]; }
        workgroupBarrier();
    }
    return reduce_scratch[0];
}

fn workgroup_max(value: f32, lane: u32) -> f32 {
    workgroupBarrier();
    reduce_scratch[lane] = value;
    workgroupBarrier();
    for (var s = WG / 2u; s > 0u; s /= 2u) {
        if (lane < s) { reduce_scratch[lane] = max(reduce_scratch[lane], reduce_scratch[lane + s]); }
        workgroupBarrier();
    }
    return reduce_scratch[0];
}
