// What both backward passes of flash attention need to know of a query row.
//   stats[t,h] = first slot, last - first, bits of lse / ln 2, bits of delta = sum_d dout[t,h,d] out[t,h,d]
// dout, out [rows, ld]; lse [rows, heads]; stats [rows, heads, 4] u32. Grid: (heads / 16, rows), 16 lanes a head.
struct Params { heads: u32, head_dim: u32, ld: u32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> dout: array<f32>;
@group(0) @binding(2) var<storage, read> out: array<f32>;
@group(0) @binding(3) var<storage, read> lse: array<f32>;
@group(0) @binding(4) var<storage, read> slot: array<u32>;
@group(0) @binding(5) var<storage, read> kv_start: array<u32>;
@group(0) @binding(6) var<storage, read_write> stats: array<vec4<u32>>;

var<workgroup> sums: array<array<f32, 17>, 16>;

@compute @workgroup_size(16, 16)
fn forward(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_id) lid: vec3<u32>) {
    let t = wid.y;
    let h = wid.x * 16u + lid.y;
    var sum = 0.0;
    if (h < params.heads) {
        let base = t * params.ld + h * params.head_dim;
        for (var d = lid.x; d < params.head_dim; d += 16u) { sum = fma(dout[base + d], out[base + d], sum); }
    }
    sums[lid.y][lid.x] = sum;
    workgroupBarrier();
    if (lid.x > 0u || h >= params.heads) { return; }
    for (var i = 1u; i < 16u; i++) { sum += sums[lid.y][i]; }
    let row = t * params.heads + h;
    stats[row] = vec4(kv_start[t], slot[t] - kv_start[t], bitcast<u32>(lse[row] * 1.4426950408889634), bitcast<u32>(sum));
}
