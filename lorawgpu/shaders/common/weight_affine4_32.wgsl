// Affine, 4 bits: code * s - m. Records of 4 rows x 32 columns: 8 vec2 of codes; s and m, four f32 each.
// uses: common/blocks.wgsl
struct RawWeight { q: vec2<u32>, s: vec4<u32>, m: vec4<u32> }

fn fetch_weight(r4: u32, c4: u32) -> RawWeight {
    let i = r4 * params.ldb4 + c4;
    let record = 12u * (i / 8u);
    let end = record + 8u;
    return RawWeight(b[record + i % 8u], vec4(b[end], b[end + 1u]), vec4(b[end + 2u], b[end + 3u]));
}
fn weight_codes(raw: RawWeight) -> mat4x4<f32> { return unsigned_rows(codes_of_4(raw.q)); }
fn weight_scale(raw: RawWeight) -> vec4<f32> { return bitcast<vec4<f32>>(raw.s); }
fn weight_offset(raw: RawWeight) -> vec4<f32> { return bitcast<vec4<f32>>(raw.m); }
fn decode_weight(raw: RawWeight) -> mat4x4<f32> {
    return affine_rounded(weight_codes(raw), weight_scale(raw), weight_offset(raw));
}
