// Records non-finite values. step_state.wgsl lists the words of `state`; the main file declares the buffer.
fn mark_bad(record_id: u32) {
    atomicStore(&state[0], 1u);
    atomicMin(&state[1], record_id);
}

fn any_not_finite(x: vec4<f32>) -> bool {
    let exponent = vec4<u32>(0x7f800000u);
    return any((bitcast<vec4<u32>>(x) & exponent) == exponent);
}
