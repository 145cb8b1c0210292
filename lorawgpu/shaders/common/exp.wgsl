// exp(x) to about one ulp. The built-in exp may be off by 3 + 2|x| ulps (Vulkan), 1e-6 where it matters.
//   x = n ln2 + r, |r| <= ln2 / 2;  exp(x) = 2^n exp(r), a polynomial of degree 7 in r (Cephes' expf)
// ln2 is subtracted in two parts, the first one exactly. The select never takes effect: it keeps compilers from merging
// the two parts. Below -87 the result is 0; infinity and NaN pass through.
fn exact_exp(x: f32) -> f32 {
    let n = round(clamp(x, -150.0, 129.0) * 1.44269504);
    let first = fma(n, -0.693359375, x);
    let r = fma(n, 2.12194440e-4, select(first, x, abs(n) > 1e3));
    var p = 1.9875691500e-4;
    p = fma(p, r, 1.3981999507e-3);
    p = fma(p, r, 8.3334519073e-3);
    p = fma(p, r, 4.1665795894e-2);
    p = fma(p, r, 1.6666665459e-1);
    p = fma(p, r, 5.0000001201e-1);
    let y = (fma(p * r, r, r) + 1.0) * bitcast<f32>(u32(clamp(i32(n), -126, 127) + 127) << 23u);
    return select(y, 0.0, x < -87.0);
}
fn exact_exp4(x: vec4<f32>) -> vec4<f32> { return vec4(exact_exp(x.x), exact_exp(x.y), exact_exp(x.z), exact_exp(x.w)); }
