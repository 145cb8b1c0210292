// bf16 weight, two per word, the even column in the low half. A bf16 is the upper half of a float32.
@group(0) @binding(2) var<storage, read> b: array<vec2<u32>>;
struct RawWeight { r0: vec2<u32>, r1: vec2<u32>, r2: vec2<u32>, r3: vec2<u32> }

fn fetch_weight(r4: u32, c4: u32) -> RawWeight {
    let i = 4u * r4 * params.ldb4 + params.b_off4 + c4;
    return RawWeight(b[i], b[i + params.ldb4], b[i + 2u * params.ldb4], b[i + 3u * params.ldb4]);
}
fn widen(x: vec2<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4(x.x << 16u, x.x & 0xffff0000u, x.y << 16u, x.y & 0xffff0000u));
}
fn decode_weight(raw: RawWeight) -> mat4x4<f32> {
    return mat4x4<f32>(widen(raw.r0), widen(raw.r1), widen(raw.r2), widen(raw.r3));
}
