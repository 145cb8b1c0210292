// uses: common/step.wgsl
// uses: common/hash.wgsl
// Dropout on an adapter path: y (+)= x * mask / (1 - p). x, y: (rows, ld), of which `width` columns are real.
//   k_i = fold(step key_i, stream);  h = mix(mix((token * width + column) ^ k_0) + k_1);  kept iff h >= threshold
// reference/dropout.py has the same integer arithmetic. Nothing is saved: the backward recomputes the mask.
// Grid: (x, y) workgroups of 256, stride = 256 x; one vec4 per lane.

override ACCUMULATE: bool = false;

struct Params { rows: u32, ld4: u32, width: u32, stream: u32, threshold: u32, keep: f32, stride: u32, first_row: u32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;

fn scale_of(index: u32, k0: u32, k1: u32) -> f32 {
    return select(0.0, params.keep, mix32(mix32(index ^ k0) + k1) >= params.threshold);
}

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) gid: vec3<u32>) {
    let i = gid.y * params.stride + gid.x;
    if (i >= params.rows * params.ld4) { return; }
    let k0 = fold_key(step.key0, params.stream);
    let k1 = fold_key(step.key1, params.stream);
    let index = (params.first_row + i / params.ld4) * params.width + 4u * (i % params.ld4);
    let d = x[i] * vec4(scale_of(index, k0, k1), scale_of(index + 1u, k0, k1), scale_of(index + 2u, k0, k1), scale_of(index + 3u, k0, k1));
    if (ACCUMULATE) { y[i] += d; } else { y[i] = d; }
}
