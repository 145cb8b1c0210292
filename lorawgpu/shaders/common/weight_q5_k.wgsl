// Q5_K: (d s) q - dmin m. Records of 4 rows x 256 columns: 64 vec2 of the lower 4 bits of codes; 16 of their top bits; 8 of
// (s, m), bytes, for each 32 columns; d; dmin.
// uses: common/blocks.wgsl
struct RawWeight { low: vec2<u32>, high: vec2<u32>, sm: vec2<u32>, d: vec2<u32>, dmin: vec2<u32> }

fn fetch_weight(r4: u32, c4: u32) -> RawWeight {
    let i = r4 * params.ldb4 + c4;
    let record = 90u * (i / 64u);
    let j = i % 64u;
    let high = b[record + 64u + j / 4u] >> vec2(2u * (j % 4u));
    return RawWeight(b[record + j], high, b[record + 80u + j / 8u], b[record + 88u], b[record + 89u]);
}
fn weight_words(raw: RawWeight) -> vec4<u32> { return codes_of_4(raw.low) | (codes_of_1(raw.high) << vec4(4u)); }
fn weight_codes(raw: RawWeight) -> mat4x4<f32> { return unsigned_rows(weight_words(raw)); }
fn weight_scale(raw: RawWeight) -> vec4<f32> { return halves(raw.d) * vec4<f32>(unpack4xU8(raw.sm.x)); }
fn weight_offset(raw: RawWeight) -> vec4<f32> { return halves(raw.dmin) * vec4<f32>(unpack4xU8(raw.sm.y)); }
fn decode_weight(raw: RawWeight) -> mat4x4<f32> {
    return affine(weight_codes(raw), weight_scale(raw), weight_offset(raw));
}
