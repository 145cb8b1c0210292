// Q6_K: (d s) q. Records of 4 rows x 256 columns: 64 vec2 of the lower 4 bits of signed codes; 32 of their upper 2 bits; 8 of
// int8 s, a word for each 16 columns; d.
// uses: common/blocks.wgsl
struct RawWeight { low: vec2<u32>, high: vec2<u32>, s: u32, d: vec2<u32> }

fn fetch_weight(r4: u32, c4: u32) -> RawWeight {
    let i = r4 * params.ldb4 + c4;
    let record = 105u * (i / 64u);
    let j = i % 64u;
    let high = b[record + 64u + j / 2u] >> vec2(4u * (j % 2u));
    return RawWeight(b[record + j], high, b[record + 96u + j / 8u][j / 4u % 2u], b[record + 104u]);
}
fn weight_words(raw: RawWeight) -> vec4<u32> {
    return (codes_of_4(raw.low) << vec4(2u)) | (codes_of_2(raw.high) << vec4(6u));
}
fn weight_codes(raw: RawWeight) -> mat4x4<f32> { return signed_rows(weight_words(raw)); }
fn weight_scale(raw: RawWeight) -> vec4<f32> { return halves(raw.d) * 0.25 * vec4<f32>(unpack4xI8(raw.s)); }
fn decode_weight(raw: RawWeight) -> mat4x4<f32> { return scaled(weight_codes(raw), weight_scale(raw)); }
