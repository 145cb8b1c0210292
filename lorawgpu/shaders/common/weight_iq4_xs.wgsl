// IQ4_XS: d s level(q). Records of 4 rows x 256 columns: 64 vec2 of 4-bit codes; 4 of int8 s, a word for each 32 columns; d.
// uses: common/blocks.wgsl
// uses: common/levels.wgsl
struct RawWeight { q: vec2<u32>, s: u32, d: vec2<u32> }

fn fetch_weight(r4: u32, c4: u32) -> RawWeight {
    let i = r4 * params.ldb4 + c4;
    let record = 69u * (i / 64u);
    return RawWeight(b[record + i % 64u], b[record + 64u + i % 64u / 16u][i / 8u % 2u], b[record + 68u]);
}
fn weight_words(raw: RawWeight) -> vec4<u32> { return level_words(codes_of_4(raw.q)); }
fn weight_codes(raw: RawWeight) -> mat4x4<f32> { return signed_rows(weight_words(raw)); }
fn weight_scale(raw: RawWeight) -> vec4<f32> { return halves(raw.d) * vec4<f32>(unpack4xI8(raw.s)); }
fn decode_weight(raw: RawWeight) -> mat4x4<f32> { return scaled(weight_codes(raw), weight_scale(raw)); }
