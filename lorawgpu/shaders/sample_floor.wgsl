// The lowest score that top-k or top-p keeps, as the largest ordered key t with
//   sum_{key >= t} weight >= goal      top-k: weight 1, goal k;   top-p: weight exp(score - top), goal p times their sum,
//   over keys at or above the previous floor. Ties at the floor are all kept.
// t is found in digits of four bits, highest first: a dispatch sums, per stripe, the weights at or above each of the 16
// values of its digit; the next dispatch adds up the stripes and picks the digit. Sums have a fixed order.
// partial: (2, rows, groups, 4); search: (2, rows): t, bits of goal, bits of top, floor. A dispatch writes one half and
// reads the other.
// Entry points: digit (`bit` 28, 24, .. 0; grid (groups, rows)), settle (floors[row] = t; grid (1, rows)).
// uses: common/sample_score.wgsl

const WG: u32 = 256u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> settings: array<Settings>;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read> seen: array<u32>;
@group(0) @binding(4) var<storage, read> peaks: array<Best>;
@group(0) @binding(5) var<storage, read_write> partial: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> search: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> floors: array<u32>;

var<workgroup> scratch: array<vec4<f32>, WG>;
var<workgroup> known: vec4<u32>;

fn half_of(bit: u32) -> u32 { return bit / 4u % 2u; }

// Adds up scratch over lanes with the same index modulo `width`; the sums are in scratch[0 .. width-1].
fn add_lanes(lane: u32, width: u32) {
    workgroupBarrier();
    for (var s = WG / 2u; s >= width; s /= 2u) {
        if (lane < s) { scratch[lane] += scratch[lane + s]; }
        workgroupBarrier();
    }
}

// t, goal, top and floor once the digit at `bit` is known; uniform.
fn after_digit(row: u32, rows: u32, lane: u32, bit: u32) -> vec4<u32> {
    var sum = vec4(0.0);
    let base = (half_of(bit) * rows + row) * params.groups * 4u;
    for (var i = lane; i < params.groups * 4u; i += WG) { sum += partial[base + i]; }
    scratch[lane] = sum;
    add_lanes(lane, 4u);
    if (lane == 0u) {
        var found = search[half_of(bit) * rows + row];
        if (bit == 28u && params.by_mass == 1u) { found.y = bitcast<u32>(settings[row].top_p * scratch[0].x); }
        let goal = bitcast<f32>(found.y);
        var digit = 0u;
        for (var q = 0u; q < 4u; q += 1u) {
            let reached = vec4<u32>(scratch[q] >= vec4(goal));
            digit += reached.x + reached.y + reached.z + reached.w; // sums are descending, so those that reach the goal come first
        }
        found.x |= (max(digit, 1u) - 1u) << bit;
        known = found;
    }
    return workgroupUniformLoad(&known);
}

@compute @workgroup_size(WG)
fn digit(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
         @builtin(local_invocation_index) lane: u32) {
    let row = wid.y;
    var now: vec4<u32>;
    if (params.bit == 28u) { // uniform
        var mine = Best(LOWEST, NONE);
        for (var i = lane; i < params.groups; i += WG) { mine = better(mine, peaks[row * params.groups + i]); }
        now = vec4(0u, bitcast<u32>(f32(settings[row].top_k)), bitcast<u32>(workgroup_best(mine, lane).score), floors[row]);
    } else {
        now = after_digit(row, grid.y, lane, params.bit + 4u);
    }
    var s0 = vec4(0.0);
    var s1 = vec4(0.0);
    var s2 = vec4(0.0);
    var s3 = vec4(0.0);
    let t0 = vec4(now.x) | (vec4(0u, 1u, 2u, 3u) << vec4(params.bit));
    let step = 4u << params.bit; // four values of the digit
    for (var id = wid.x * WG + lane; id < params.vocab; id += params.groups * WG) {
        let score = score_of(row, id);
        let key = ordered(score);
        let mass = select(1.0, exp(score - bitcast<f32>(now.z)), params.by_mass == 1u);
        let weight = vec4(select(0.0, mass, key >= now.w));
        s0 += select(vec4(0.0), weight, vec4(key) >= t0);
        s1 += select(vec4(0.0), weight, vec4(key) >= t0 + step);
        s2 += select(vec4(0.0), weight, vec4(key) >= t0 + 2u * step);
        s3 += select(vec4(0.0), weight, vec4(key) >= t0 + 3u * step);
    }
    let to = ((half_of(params.bit) * grid.y + row) * params.groups + wid.x) * 4u;
    for (var q = 0u; q < 4u; q += 1u) {
        workgroupBarrier();
        scratch[lane] = select(select(s0, s1, q == 1u), select(s2, s3, q == 3u), q > 1u);
        add_lanes(lane, 1u);
        if (lane == 0u) { partial[to + q] = scratch[0]; }
    }
    if (lane == 0u && wid.x == 0u) { search[half_of(params.bit) * grid.y + row] = now; }
}

@compute @workgroup_size(WG)
fn settle(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
    let t = after_digit(wid.y, grid.y, lane, 0u).x;
    if (lane == 0u) { floors[wid.y] = max(floors[wid.y], t); }
}
