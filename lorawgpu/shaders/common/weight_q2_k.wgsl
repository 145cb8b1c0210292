// Q2_K: (d s) q - dmin m. Records of 4 rows x 256 columns: 32 vec2 of 2-bit codes; 8 of bytes s + 16 m, a word for each 16
// columns; d; dmin.
// uses: common/blocks.wgsl
struct RawWeight { q: vec2<u32>, sm: u32, d: vec2<u32>, dmin: vec2<u32> }

fn fetch_weight(r4: u32, c4: u32) -> RawWeight {
    let i = r4 * params.ldb4 + c4;
    let record = 42u * (i / 64u);
    let j = i % 64u;
    let q = b[record + j / 2u] >> vec2(4u * (j % 2u));
    return RawWeight(q, b[record + 32u + j / 8u][j / 4u % 2u], b[record + 40u], b[record + 41u]);
}
fn weight_words(raw: RawWeight) -> vec4<u32> { return codes_of_2(raw.q); }
fn weight_codes(raw: RawWeight) -> mat4x4<f32> { return unsigned_rows(weight_words(raw)); }
fn weight_scale(raw: RawWeight) -> vec4<f32> { return halves(raw.d) * vec4<f32>(unpack4xU8(raw.sm & 0x0f0f0f0fu)); }
fn weight_offset(raw: RawWeight) -> vec4<f32> {
    return halves(raw.dmin) * vec4<f32>(unpack4xU8((raw.sm >> 4u) & 0x0f0f0f0fu));
}
fn decode_weight(raw: RawWeight) -> mat4x4<f32> {
    return affine(weight_codes(raw), weight_scale(raw), weight_offset(raw));
}
