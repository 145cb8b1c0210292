// NF4: level(q) absmax. Records of 4 rows x 64 columns: 16 vec2 of 4-bit codes; absmax, four f32.
// uses: common/blocks.wgsl
// uses: common/nf4.wgsl
struct RawWeight { q: vec2<u32>, upper: vec2<u32>, lower: vec2<u32> }

fn fetch_weight(r4: u32, c4: u32) -> RawWeight {
    let i = r4 * params.ldb4 + c4;
    let record = 18u * (i / 16u);
    return RawWeight(b[record + i % 16u], b[record + 16u], b[record + 17u]);
}
fn weight_codes(raw: RawWeight) -> mat4x4<f32> { return nf4_rows(codes_of_4(raw.q)); }
fn weight_scale(raw: RawWeight) -> vec4<f32> { return bitcast<vec4<f32>>(vec4(raw.upper, raw.lower)); }
fn decode_weight(raw: RawWeight) -> mat4x4<f32> { return scaled(weight_codes(raw), weight_scale(raw)); }
