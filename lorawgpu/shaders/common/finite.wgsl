// Detects NaN and infinity by their exponent bits, because shader compilers fold x != x to false.
fn is_finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u; }
