// Q5_0: d q. Records of 4 rows x 32 columns: 8 vec2 of the lower 4 bits of signed codes, 2 of their top bits, d.
// uses: common/blocks.wgsl
struct RawWeight { low: vec2<u32>, high: vec2<u32>, d: vec2<u32> }

fn fetch_weight(r4: u32, c4: u32) -> RawWeight {
    let i = r4 * params.ldb4 + c4;
    let record = 11u * (i / 8u);
    let high = b[record + 8u + i % 8u / 4u] >> vec2(2u * (i % 4u));
    return RawWeight(b[record + i % 8u], high, b[record + 10u]);
}
fn weight_words(raw: RawWeight) -> vec4<u32> {
    return (codes_of_4(raw.low) << vec4(3u)) | (codes_of_1(raw.high) << vec4(7u));
}
fn weight_codes(raw: RawWeight) -> mat4x4<f32> { return signed_rows(weight_words(raw)); }
fn weight_scale(raw: RawWeight) -> vec4<f32> { return halves(raw.d) * 0.125; }
fn decode_weight(raw: RawWeight) -> mat4x4<f32> { return scaled(weight_codes(raw), weight_scale(raw)); }
