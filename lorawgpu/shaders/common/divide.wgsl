// a / b for positive normal numbers, rounded as in IEEE 754. A GPU's own division may be a few ulps off, and drivers
// optimize float corrections away, so the remainder is computed in integers; it is small enough for 32 bits.
fn divide(a: f32, b: f32) -> f32 {
    let one = 1u << 23u;
    let B = (bitcast<u32>(b) & (one - 1u)) | one;
    var A = (bitcast<u32>(a) & (one - 1u)) | one;
    var exponent = 127u + (bitcast<u32>(a) >> 23u) - (bitcast<u32>(b) >> 23u);
    if (A < B) {
        A <<= 1u;
        exponent -= 1u;
    }
    var q = u32(f32(A) / f32(B) * f32(one)); // A * 2^23 / B, in [2^23, 2^24), a few units off
    var r = bitcast<i32>((A << 23u) - q * B); // wraps to the exact remainder
    for (var k = 0u; k < 4u; k += 1u) {
        if (r < 0) {
            q -= 1u;
            r += i32(B);
        } else if (r >= i32(B)) {
            q += 1u;
            r -= i32(B);
        }
    }
    q += select(0u, 1u, 2 * r > i32(B)); // the quotient of two such numbers is never a tie
    return bitcast<f32>((exponent << 23u) + q - one);
}
