// What the stores in blocks share (ops/stores.py): a matrix as records of 4 rows x 32 or 256 columns, which lie row of
// records by row of records. A record holds planes of codes, then scales, then f16 scales (weights/blocks.py).
// A plane of w-bit codes has a vec2 for each 4 / w blocks of 4 x 4: rows 0 and 1 in x, rows 2 and 3 in y; column c in
// byte c; there, bits w (2 j + r % 2) hold row r of block j. So four columns of a row are a shift and a mask, and a block
// serves both orientations of a product. Eight-bit codes take two vec2, a word for each row.
// Signed codes are in two's complement, and decoded in the upper bits of a byte: 2^(8 - w) times their value.
// Each store has weight_codes and weight_scale of four rows, which share a scale along at least 16 columns, and with
// affine codes weight_offset: a weight is code * scale - offset.
// uses: common/half.wgsl
@group(0) @binding(2) var<storage, read> b: array<vec2<u32>>;

// Packed codes of four columns (bytes) of rows 0 to 3, by the width of a code.
fn codes_of_4(w: vec2<u32>) -> vec4<u32> { return vec4(w.x, w.x >> 4u, w.y, w.y >> 4u) & vec4(0x0f0f0f0fu); }
fn codes_of_2(w: vec2<u32>) -> vec4<u32> { return vec4(w.x, w.x >> 2u, w.y, w.y >> 2u) & vec4(0x03030303u); }
fn codes_of_1(w: vec2<u32>) -> vec4<u32> { return vec4(w.x, w.x >> 1u, w.y, w.y >> 1u) & vec4(0x01010101u); }

fn unsigned_rows(w: vec4<u32>) -> mat4x4<f32> {
    return mat4x4<f32>(vec4<f32>(unpack4xU8(w.x)), vec4<f32>(unpack4xU8(w.y)), vec4<f32>(unpack4xU8(w.z)), vec4<f32>(unpack4xU8(w.w)));
}
fn signed_rows(w: vec4<u32>) -> mat4x4<f32> {
    return mat4x4<f32>(vec4<f32>(unpack4xI8(w.x)), vec4<f32>(unpack4xI8(w.y)), vec4<f32>(unpack4xI8(w.z)), vec4<f32>(unpack4xI8(w.w)));
}
// Row r times s[r], and minus m[r]. Products of codes and scales have at most 24 bits: only the difference rounds.
fn scaled(q: mat4x4<f32>, s: vec4<f32>) -> mat4x4<f32> { return mat4x4<f32>(q[0] * s.x, q[1] * s.y, q[2] * s.z, q[3] * s.w); }
fn affine(q: mat4x4<f32>, s: vec4<f32>, m: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(q[0] * s.x - m.x, q[1] * s.y - m.y, q[2] * s.z - m.z, q[3] * s.w - m.w);
}
// The same for scales of 24 bits, whose products round too. The minimum changes no value of a model; without it a driver
// may fuse product and difference, which rounds once where the format does twice.
fn affine_rounded(q: mat4x4<f32>, s: vec4<f32>, m: vec4<f32>) -> mat4x4<f32> {
    let p = scaled(q, s);
    let most = vec4(0x1p100f);
    return mat4x4<f32>(min(p[0], most) - m.x, min(p[1], most) - m.y, min(p[2], most) - m.z, min(p[3], most) - m.w);
}
