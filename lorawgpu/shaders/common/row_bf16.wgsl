// uses: common/half.wgsl
// Columns 4 c4 .. 4 c4 + 3 of a row of `part` in bf16: two per word, the even column in the low half.
fn widen(word: u32) -> vec2<f32> { return vec2(from_bf16(word & 0xffffu), from_bf16(word >> 16u)); }
fn load4(row: u32, c4: u32) -> vec4<f32> {
    let i = 2u * (row * params.ld4 + c4);
    return vec4(widen(part[i]), widen(part[i + 1u]));
}
