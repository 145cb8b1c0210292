// f32 weight: W[r, 4c .. 4c+3] at b[r * ldb4 + c].
@group(0) @binding(2) var<storage, read> b: array<vec4<f32>>;
alias RawWeight = mat4x4<f32>;

fn fetch_weight(r4: u32, c4: u32) -> RawWeight {
    let i = 4u * r4 * params.ldb4 + params.b_off4 + c4;
    return RawWeight(b[i], b[i + params.ldb4], b[i + 2u * params.ldb4], b[i + 3u * params.ldb4]);
}
fn decode_weight(raw: RawWeight) -> mat4x4<f32> { return raw; }
