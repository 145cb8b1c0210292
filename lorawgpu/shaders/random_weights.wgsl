// Random weights for benchmarks: out (count words), from a hash of (seed, index).
//   kind 0: ternary codes 0, 1, 2 in 2-bit fields   1: two bf16 per word   2: f32; both about N(0, scale^2)   3: ones
//   4: blocks: records of `record` random words, except that there are words `first` from word `scales` on, and words
//      `second` from word `offsets` on
// Grid: (x, y) workgroups of 256, stride = 256 x; one word per lane.
struct Params { count: u32, stride: u32, kind: u32, seed: u32, scale: f32, record: u32, scales: u32, offsets: u32, first: u32, second: u32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;

fn hash(v: u32) -> u32 {
    var h = v;
    h ^= h >> 16u; h *= 0x85ebca6bu;
    h ^= h >> 13u; h *= 0xc2b2ae35u;
    return h ^ (h >> 16u);
}
// The sum of four uniforms, close enough to a normal distribution for benchmarks.
fn normal(h: u32) -> f32 {
    let u = vec4<f32>(unpack4xU8(h)) / 255.0 - 0.5;
    return params.scale * 1.7320508 * (u.x + u.y + u.z + u.w);
}

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) gid: vec3<u32>) {
    let i = gid.y * params.stride + gid.x;
    if (i >= params.count) { return; }
    let h = hash(i ^ hash(params.seed * 2654435761u + 1u));
    switch (params.kind) {
        case 0u: { let both = h & (h >> 1u) & 0x55555555u; out[i] = h ^ (both << 1u); } // 3 becomes 1
        case 1u: { out[i] = (bitcast<u32>(normal(h)) >> 16u) | (bitcast<u32>(normal(hash(h))) & 0xffff0000u); }
        case 2u: { out[i] = bitcast<u32>(normal(h)); }
        case 4u: {
            let word = i % params.record;
            out[i] = select(h, select(params.first, params.second, word >= params.offsets), word >= params.scales);
        }
        default: { out[i] = bitcast<u32>(1.0); }
    }
}
