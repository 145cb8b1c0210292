// Q4_0: d q. Records of 4 rows x 32 columns: 8 vec2 of signed 4-bit codes, d.
// uses: common/blocks.wgsl
struct RawWeight { q: vec2<u32>, d: vec2<u32> }

fn fetch_weight(r4: u32, c4: u32) -> RawWeight {
    let i = r4 * params.ldb4 + c4;
    let record = 9u * (i / 8u);
    return RawWeight(b[record + i % 8u], b[record + 8u]);
}
fn weight_words(raw: RawWeight) -> vec4<u32> { return codes_of_4(raw.q) << vec4(4u); }
fn weight_codes(raw: RawWeight) -> mat4x4<f32> { return signed_rows(weight_words(raw)); }
fn weight_scale(raw: RawWeight) -> vec4<f32> { return halves(raw.d) * 0.0625; }
fn decode_weight(raw: RawWeight) -> mat4x4<f32> { return scaled(weight_codes(raw), weight_scale(raw)); }
