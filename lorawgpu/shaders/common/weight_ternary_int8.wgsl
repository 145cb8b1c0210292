// Ternary weight for the int8 product: reads four blocks along a row (16 columns), and a block's codes T + 1 as four rows.
@group(0) @binding(2) var<storage, read> b: array<vec4<u32>>;
alias RawWeight = vec4<u32>;

fn fetch_weight(r4: u32, c16: u32) -> RawWeight { return b[(r4 * params.ldb4 + params.b_off4) / 4u + c16]; }
fn ternary_codes(word: u32) -> vec4<u32> { return (vec4(word) >> vec4(0u, 2u, 4u, 6u)) & vec4(0x03030303u); }
