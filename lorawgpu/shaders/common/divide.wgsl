// a / b rounded as IEEE does, where a GPU's own division may be a few units off: its result plus the exact remainder
// over b. The halves have 12 bits, so that their products are exact and fusing them into the sums changes nothing.
fn high_half(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) & 0xfffff000u); }

fn divide(a: f32, b: f32) -> f32 {
    let q = a / b;
    let qh = high_half(q);
    let bh = high_half(b);
    let remainder = a - qh * bh - qh * (b - bh) - (q - qh) * bh - (q - qh) * (b - bh);
    return q + remainder / b;
}
