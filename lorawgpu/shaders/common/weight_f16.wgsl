// f16 weight, two per word, the even column in the low half.
// uses: common/half.wgsl
@group(0) @binding(2) var<storage, read> b: array<vec2<u32>>;
struct RawWeight { r0: vec2<u32>, r1: vec2<u32>, r2: vec2<u32>, r3: vec2<u32> }

fn fetch_weight(r4: u32, c4: u32) -> RawWeight {
    let i = 4u * r4 * params.ldb4 + params.b_off4 + c4;
    return RawWeight(b[i], b[i + params.ldb4], b[i + 2u * params.ldb4], b[i + 3u * params.ldb4]);
}
fn decode_weight(raw: RawWeight) -> mat4x4<f32> {
    return mat4x4<f32>(halves(raw.r0), halves(raw.r1), halves(raw.r2), halves(raw.r3));
}
