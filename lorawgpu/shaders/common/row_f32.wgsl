// Columns 4 c4 .. 4 c4 + 3 of a row of `part` in f32.
fn load4(row: u32, c4: u32) -> vec4<f32> {
    let i = 4u * (row * params.ld4 + c4);
    return bitcast<vec4<f32>>(vec4(part[i], part[i + 1u], part[i + 2u], part[i + 3u]));
}
