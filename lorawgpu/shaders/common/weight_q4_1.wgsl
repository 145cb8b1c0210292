// Q4_1: d q + m. Records of 4 rows x 32 columns: 8 vec2 of 4-bit codes, d, m.
// uses: common/blocks.wgsl
struct RawWeight { q: vec2<u32>, d: vec2<u32>, m: vec2<u32> }

fn fetch_weight(r4: u32, c4: u32) -> RawWeight {
    let i = r4 * params.ldb4 + c4;
    let record = 10u * (i / 8u);
    return RawWeight(b[record + i % 8u], b[record + 8u], b[record + 9u]);
}
fn weight_words(raw: RawWeight) -> vec4<u32> { return codes_of_4(raw.q); }
fn weight_codes(raw: RawWeight) -> mat4x4<f32> { return unsigned_rows(weight_words(raw)); }
fn weight_scale(raw: RawWeight) -> vec4<f32> { return halves(raw.d); }
fn weight_offset(raw: RawWeight) -> vec4<f32> { return -halves(raw.m); }
fn decode_weight(raw: RawWeight) -> mat4x4<f32> {
    return affine(weight_codes(raw), weight_scale(raw), weight_offset(raw));
}
