// Q8_0: d q. Records of 4 rows x 32 columns: 16 vec2 of int8 codes, d.
// uses: common/blocks.wgsl
struct RawWeight { upper: vec2<u32>, lower: vec2<u32>, d: vec2<u32> }

fn fetch_weight(r4: u32, c4: u32) -> RawWeight {
    let i = r4 * params.ldb4 + c4;
    let record = 17u * (i / 8u);
    let at = record + 2u * (i % 8u);
    return RawWeight(b[at], b[at + 1u], b[record + 16u]);
}
fn weight_words(raw: RawWeight) -> vec4<u32> { return vec4(raw.upper, raw.lower); }
fn weight_codes(raw: RawWeight) -> mat4x4<f32> { return signed_rows(weight_words(raw)); }
fn weight_scale(raw: RawWeight) -> vec4<f32> { return halves(raw.d); }
fn decode_weight(raw: RawWeight) -> mat4x4<f32> { return scaled(weight_codes(raw), weight_scale(raw)); }
