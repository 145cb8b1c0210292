// 2^x to about one ulp, for x <= 0. The built-in exp2 of software adapters is off by 1e-6.
//   x = n + r, |r| <= 1/2;  2^n times a polynomial of degree 6 in r (Cephes' exp2f). 0 below -126; NaN passes through.
fn exact_exp2(x: vec4<f32>) -> vec4<f32> {
    let n = round(clamp(x, vec4(-126.0), vec4(0.0)));
    let r = x - n;
    var p = vec4(1.535336188319500e-4);
    p = fma(p, r, vec4(1.339887440266574e-3));
    p = fma(p, r, vec4(9.618437357674640e-3));
    p = fma(p, r, vec4(5.550332471162809e-2));
    p = fma(p, r, vec4(2.402264791363012e-1));
    p = fma(p, r, vec4(6.931472028550421e-1));
    let y = fma(p, r, vec4(1.0)) * bitcast<vec4<f32>>(vec4<u32>(vec4<i32>(n) + 127) << vec4(23u));
    return select(y, vec4(0.0), x < vec4(-126.0));
}
