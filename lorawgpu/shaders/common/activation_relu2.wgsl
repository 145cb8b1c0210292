// relu2:  act = max(g, 0)^2           act' = 2 max(g, 0)        It overflows f16.
fn act(g: vec4<f32>) -> vec4<f32> {
    let r = max(g, vec4(0.0));
    return r * r;
}
fn act_slope(g: vec4<f32>) -> vec4<f32> { return 2.0 * max(g, vec4(0.0)); }
