// Exact conversion of 16-bit floats (in the low half of `bits`) to f32. unpack2x16float may flush subnormals.
fn from_bf16(bits: u32) -> f32 { return bitcast<f32>(bits << 16u); }

fn from_f16(bits: u32) -> f32 {
    let magnitude = bits & 0x7fffu;
    let normal = bitcast<f32>((magnitude << 13u) + 0x38000000u); // exponent bias 15 -> 127
    let subnormal = f32(magnitude) * 0x1p-24f;
    let value = select(subnormal, normal, magnitude >= 0x400u);
    return select(value, -value, (bits & 0x8000u) != 0u);
}
// Four f16, two per word, the first in the low half.
fn halves(w: vec2<u32>) -> vec4<f32> {
    return vec4(from_f16(w.x & 0xffffu), from_f16(w.x >> 16u), from_f16(w.y & 0xffffu), from_f16(w.y >> 16u));
}
