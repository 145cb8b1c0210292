// uses: common/exp.wgsl
// gelu_tanh:  act = g/2 (1 + tanh z) = g * sig(2z),  z = sqrt(2/pi) (g + 0.044715 g^3)
//             act' = sig(2z) + g * sig(2z) (1 - sig(2z)) * 2z'
// With e = exp(-|2z|), nothing cancels or overflows: sig(2z) = 1/(1+e) or e/(1+e), sig (1 - sig) = e / (1+e)^2.
fn twice_z(g: vec4<f32>) -> vec4<f32> { return g * (1.5957691216 + 0.07135481627 * g * g); }
fn within(g: vec4<f32>) -> vec4<f32> { return clamp(g, vec4(-12.0), vec4(12.0)); } // beyond, sig is 0 or 1 and g^3 may overflow
fn act(g: vec4<f32>) -> vec4<f32> {
    let e = exact_exp4(-abs(twice_z(within(g))));
    return g * select(e, vec4(1.0), g >= vec4(0.0)) / (1.0 + e);
}
fn act_slope(g: vec4<f32>) -> vec4<f32> {
    let x = within(g);
    let e = exact_exp4(-abs(twice_z(x)));
    let rest = x * (1.5957691216 + 0.2140644488 * x * x) * e / (1.0 + e);
    return (select(e, vec4(1.0), g >= vec4(0.0)) + rest) / (1.0 + e);
}
