// The sixteen values of a code of IQ4_NL and IQ4_XS (ggml's kvalues_iq4nl), int8, four per word:
// -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.
// Selected from words, because an array with computed indices would lie in memory.
fn levels_of(w: u32) -> u32 {
    let q = unpack4xU8(w);
    let odd = (q & vec4(4u)) != vec4(0u);
    let negative = select(vec4(0xbfad9881u), vec4(0xf6eaddcfu), odd);
    let positive = select(vec4(0x26190d01u), vec4(0x71594535u), odd);
    let word = select(negative, positive, q >= vec4(8u));
    return pack4xU8((word >> (8u * (q & vec4(3u)))) & vec4(0xffu));
}
fn level_words(w: vec4<u32>) -> vec4<u32> { return vec4(levels_of(w.x), levels_of(w.y), levels_of(w.z), levels_of(w.w)); }
