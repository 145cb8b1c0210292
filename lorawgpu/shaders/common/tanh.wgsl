// uses: common/exp.wgsl
// tanh(x) and its slope 1 - tanh(x)^2, both within 4e-7 of their own size, at any x. The built-in tanh may overflow at
// large x, and near 0 its forms in exp cancel; 1 - value^2 cancels where the value is near 1.
//   |x| < 0.625:  value = x + x^3 P(x^2), a polynomial of degree 4 (Cephes' tanhf)   slope = 1 - value^2
//   otherwise:    value = 1 - 2 e / (1 + e),  e = exp(-2 |x|), with the sign of x    slope = 4 e / (1 + e)^2
// The slope of |x| above 43 is 0. NaN passes through.
struct Tanh { value: vec4<f32>, slope: vec4<f32> }

fn exact_tanh(x: vec4<f32>) -> Tanh {
    let z = x * x;
    var p = fma(vec4(-5.70498872745e-3), z, vec4(2.06390887954e-2));
    p = fma(p, z, vec4(-5.37397155531e-2));
    p = fma(p, z, vec4(1.33314422036e-1));
    p = fma(p, z, vec4(-3.33332819422e-1));
    let near = fma(p * z, x, x);
    let e = exact_exp4(-2.0 * abs(x));
    let y = 1.0 / (1.0 + e);
    let r = fma(fma(-1.0 - e, y, vec4(1.0)), y, y); // a Newton step: a GPU's division may be a few ulps off
    let far = fma(-2.0 * e, r, vec4(1.0));
    let is_near = abs(x) < vec4(0.625);
    return Tanh(
        select(select(far, -far, x < vec4(0.0)), near, is_near),
        select(4.0 * e * r * r, fma(-near, near, vec4(1.0)), is_near),
    );
}
