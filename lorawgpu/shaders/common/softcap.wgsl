// uses: common/tanh.wgsl
// A soft cap: cap * tanh(z / cap), and its slope 1 - tanh(z / cap)^2. Infinity and NaN pass through, because a finite value
// would hide them.
struct Capped { value: vec4<f32>, slope: vec4<f32> }

fn softcap(z: vec4<f32>, cap: f32) -> Capped {
    let t = exact_tanh(z / cap);
    let exponent = vec4<u32>(0x7f800000u);
    let finite = (bitcast<vec4<u32>>(z) & exponent) != exponent;
    return Capped(select(z, cap * t.value, finite), t.slope);
}
