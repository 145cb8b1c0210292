// Integer tree reductions over one workgroup of WG lanes (a power of two). Call from uniform control flow only.
var<workgroup> reduce_int_scratch: array<u32, WG>;

fn workgroup_max_u32(value: u32, lane: u32) -> u32 {
    workgroupBarrier(); // the previous call may still be reading
    reduce_int_scratch[lane] = value;
    workgroupBarrier();
    for (var s = WG / 2u; s > 0u; s /= 2u) {
        if (lane < s) { reduce_int_scratch[lane] = max(reduce_int_scratch[lane], reduce_int_scratch[lane + s]); }
        workgroupBarrier();
    }
    return reduce_int_scratch[0];
}

fn workgroup_sum_u32(value: u32, lane: u32) -> u32 { // wraps, so it serves signed values too
    workgroupBarrier();
    reduce_int_scratch[lane] = value;
    workgroupBarrier();
    for (var s = WG / 2u; s > 0u; s /= 2u) {
        if (lane < s) { reduce_int_scratch[lane] += reduce_int_scratch[lane + s]; }
        workgroupBarrier();
    }
    return reduce_int_scratch[0];
}
