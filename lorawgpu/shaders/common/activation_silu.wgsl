// uses: common/exp.wgsl
// silu:  act = g * sig(g)            act' = sig(g) * (1 + g * (1 - sig(g)))
fn sigmoid(g: vec4<f32>) -> vec4<f32> { // exp of negative values only: it never overflows
    let e = exact_exp4(-abs(g));
    return select(e, vec4(1.0), g >= vec4(0.0)) / (1.0 + e);
}
fn act(g: vec4<f32>) -> vec4<f32> { return g * sigmoid(g); }
fn act_slope(g: vec4<f32>) -> vec4<f32> {
    let s = sigmoid(g);
    return s * (1.0 + g * (1.0 - s));
}
