// The sixteen values of a code of IQ4_NL and IQ4_XS (ggml's kvalues_iq4nl), int8, four per word:
// -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.
// Selected from words, because an array with computed indices would lie in memory.
fn level_row(w: u32) -> vec4<f32> {
    let q = unpack4xU8(w);
    let odd = (q & vec4(4u)) != vec4(0u);
    let negative = select(vec4(0xbfad9881u), vec4(0xf6eaddcfu), odd);
    let positive = select(vec4(0x26190d01u), vec4(0x71594535u), odd);
    let word = select(negative, positive, q >= vec4(8u));
    return vec4<f32>(bitcast<vec4<i32>>(word << (vec4(24u) - 8u * (q & vec4(3u)))) >> vec4(24u));
}
fn level_rows(w: vec4<u32>) -> mat4x4<f32> {
    return mat4x4<f32>(level_row(w.x), level_row(w.y), level_row(w.z), level_row(w.w));
}
