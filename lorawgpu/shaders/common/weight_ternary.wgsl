// Ternary weight in 4 x 4 blocks, one word each: bits 8c + 2r hold T[r, c] + 1. So four consecutive columns of a row are
// `word >> 2r`, masked, and a word serves both orientations. A row of blocks has ldb4 blocks.
@group(0) @binding(2) var<storage, read> b: array<u32>;
alias RawWeight = u32;

fn fetch_weight(r4: u32, c4: u32) -> RawWeight { return b[r4 * params.ldb4 + params.b_off4 + c4]; }
fn decode_row(word: u32) -> vec4<f32> { return vec4<f32>(unpack4xU8(word & 0x03030303u)) - 1.0; }
fn decode_weight(word: RawWeight) -> mat4x4<f32> {
    return mat4x4<f32>(decode_row(word), decode_row(word >> 2u), decode_row(word >> 4u), decode_row(word >> 6u));
}
