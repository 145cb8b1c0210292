// The levels of NF4, as in weights/nf4.py, by a tree of selects: an array with computed indices would lie in memory.
fn nf4_row(w: u32) -> vec4<f32> {
    let q = unpack4xU8(w);
    let one = (q & vec4(1u)) != vec4(0u);
    let two = (q & vec4(2u)) != vec4(0u);
    let four = (q & vec4(4u)) != vec4(0u);
    let a = select(vec4(-1.0), vec4(-0.6961928009986877), one);
    let b = select(vec4(-0.5250730514526367), vec4(-0.39491748809814453), one);
    let c = select(vec4(-0.28444138169288635), vec4(-0.18477343022823334), one);
    let d = select(vec4(-0.09105003625154495), vec4(0.0), one);
    let e = select(vec4(0.07958029955625534), vec4(0.16093020141124725), one);
    let f = select(vec4(0.24611230194568634), vec4(0.33791524171829224), one);
    let g = select(vec4(0.44070982933044434), vec4(0.5626170039176941), one);
    let h = select(vec4(0.7229568362236023), vec4(1.0), one);
    let negative = select(select(a, b, two), select(c, d, two), four);
    return select(negative, select(select(e, f, two), select(g, h, two), four), q >= vec4(8u));
}
fn nf4_rows(w: vec4<u32>) -> mat4x4<f32> { return mat4x4<f32>(nf4_row(w.x), nf4_row(w.y), nf4_row(w.z), nf4_row(w.w)); }
