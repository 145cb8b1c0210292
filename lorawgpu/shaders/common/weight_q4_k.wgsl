// Q4_K: (d s) q - dmin m. Records of 4 rows x 256 columns: 64 vec2 of 4-bit codes; 8 of (s, m), bytes, for each 32 columns;
// d; dmin.
// uses: common/blocks.wgsl
struct RawWeight { q: vec2<u32>, sm: vec2<u32>, d: vec2<u32>, dmin: vec2<u32> }

fn fetch_weight(r4: u32, c4: u32) -> RawWeight {
    let i = r4 * params.ldb4 + c4;
    let record = 74u * (i / 64u);
    return RawWeight(b[record + i % 64u], b[record + 64u + i % 64u / 8u], b[record + 72u], b[record + 73u]);
}
fn weight_words(raw: RawWeight) -> vec4<u32> { return codes_of_4(raw.q); }
fn weight_codes(raw: RawWeight) -> mat4x4<f32> { return unsigned_rows(weight_words(raw)); }
fn weight_scale(raw: RawWeight) -> vec4<f32> { return halves(raw.d) * vec4<f32>(unpack4xU8(raw.sm.x)); }
fn weight_offset(raw: RawWeight) -> vec4<f32> { return halves(raw.dmin) * vec4<f32>(unpack4xU8(raw.sm.y)); }
fn decode_weight(raw: RawWeight) -> mat4x4<f32> {
    return affine(weight_codes(raw), weight_scale(raw), weight_offset(raw));
}
