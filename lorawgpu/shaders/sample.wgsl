// The next token of each sequence, chosen on the GPU, and the step to it. logits: (rows, ld), `vocab` of them real.
//   score = (seen: logit < 0 ? logit * penalty : logit / penalty; else logit) * inv_temperature
//   floor = max of: the top_k-th largest score; the largest score t that sum_{score >= t} p >= top_p, p the softmax over
//           the top k; max score + log(min_p)
//   token = argmax over score >= floor of score + noise,  noise = -log(-log u): a draw from softmax(score) (Gumbel)
//   u of (key, stream of the sequence, position, token) by a hash: the same wherever and in whatever company it is drawn
// Equal scores at the floor are all kept. Equal best ones: the lowest id.
// Entry points: peak (the best of each of `groups` stripes, without noise), select_floor (the floor: one workgroup a row),
// draw (peak with floor and noise), finish (the best of the stripes becomes the next input). Greedy: peak, finish.
// A row without a finite best score, or a step marked bad, gives the token 0xffffffff.
// uses: common/hash.wgsl
// uses: common/reduce_vec4.wgsl

override FIELD: u32; // words from one field of `rows` to the next: ids, position, slot, kv_start, end, stream, count
override RING: u32; // tokens that `history` keeps of a row

const WG: u32 = 256u;
const NONE: u32 = 0xffffffffu;
const LOWEST: f32 = -3.4e38;
struct Params { vocab: u32, ld: u32, groups: u32, seen_ld: u32 }
struct Settings { inv_temperature: f32, penalty: f32, top_p: f32, log_min_p: f32, top_k: u32, key0: u32, key1: u32 }
struct Best { score: f32, id: u32 }

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> settings: Settings;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read> seen: array<u32>; // bits (rows, seen_ld words): tokens of the sequence so far
@group(0) @binding(4) var<storage, read> rows: array<u32>;
@group(0) @binding(5) var<storage, read_write> stripes: array<Best>; // (rows, groups)
@group(0) @binding(6) var<storage, read_write> floors: array<u32>; // (rows): ordered keys
// finish
@group(0) @binding(7) var<storage, read_write> next_rows: array<u32>; // rows
@group(0) @binding(8) var<storage, read_write> next_seen: array<u32>; // seen
@group(0) @binding(9) var<storage, read_write> history: array<u32>; // (rows, RING)
@group(0) @binding(10) var<storage, read> state: array<u32>;

var<workgroup> best: array<Best, WG>;

fn score_of(row: u32, id: u32) -> f32 {
    let logit = logits[row * params.ld + id];
    let known = (seen[row * params.seen_ld + id / 32u] >> (id % 32u) & 1u) == 1u;
    let penalised = select(logit / settings.penalty, logit * settings.penalty, logit < 0.0);
    return select(logit, penalised, known) * settings.inv_temperature;
}

fn ordered(x: f32) -> u32 { // keys that compare as the floats do
    let b = bitcast<u32>(x);
    return select(b | 0x80000000u, ~b, (b >> 31u) == 1u);
}
fn unordered(key: u32) -> f32 { return bitcast<f32>(select(~key, key & 0x7fffffffu, key >= 0x80000000u)); }

fn noise(k0: u32, k1: u32, id: u32) -> f32 {
    let v = (f32(mix32(mix32(id ^ k0) + k1)) + 0.5) * 0x1p-32f; // 1 - u, in (0, 1]
    let e = select(-log(max(1.0 - v, 0x1p-32f)), v, v < 1e-3); // -log u; the small ones win, and v is exact there
    return -log(e);
}

fn better(a: Best, b: Best) -> Best {
    if (b.score > a.score || (b.score == a.score && b.id < a.id)) { return b; }
    return a;
}

fn workgroup_best(mine: Best, lane: u32) -> Best {
    workgroupBarrier();
    best[lane] = mine;
    workgroupBarrier();
    for (var s = WG / 2u; s > 0u; s /= 2u) {
        if (lane < s) { best[lane] = better(best[lane], best[lane + s]); }
        workgroupBarrier();
    }
    return best[0];
}

@compute @workgroup_size(WG)
fn peak(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    var mine = Best(LOWEST, NONE);
    for (var id = wid.x * WG + lane; id < params.vocab; id += params.groups * WG) {
        mine = better(mine, Best(score_of(wid.y, id), id));
    }
    mine = workgroup_best(mine, lane);
    if (lane == 0u) { stripes[wid.y * params.groups + wid.x] = mine; }
}

@compute @workgroup_size(WG)
fn draw(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = wid.y;
    let stream = rows[5u * FIELD + row];
    let position = rows[FIELD + row];
    let k0 = fold_key(fold_key(settings.key0, stream), position);
    let k1 = fold_key(fold_key(settings.key1, stream), position);
    let lowest = floors[row];
    var mine = Best(LOWEST, NONE);
    for (var id = wid.x * WG + lane; id < params.vocab; id += params.groups * WG) {
        let score = score_of(row, id);
        if (ordered(score) >= lowest) { mine = better(mine, Best(score + noise(k0, k1, id), id)); }
    }
    mine = workgroup_best(mine, lane);
    if (lane == 0u) { stripes[row * params.groups + wid.x] = mine; }
}

// The largest key t with sum_{key >= t} weight >= goal, two bits a pass; weight: 1, or exp(score - top) above `lowest`.
fn search(row: u32, lane: u32, goal: f32, by_mass: bool, top: f32, lowest: u32) -> u32 {
    var t = 0u;
    for (var bit = 30u; bit < 32u; bit -= 2u) { // wraps past 0
        var sums = vec4(0.0);
        for (var id = lane; id < params.vocab; id += WG) {
            let score = score_of(row, id);
            let key = ordered(score);
            let weight = select(select(0.0, exp(score - top), key >= lowest), 1.0, !by_mass);
            sums += select(vec4(0.0), vec4(weight), vec4(key) >= vec4(t, t | 1u << bit, t | 2u << bit, t | 3u << bit));
        }
        sums = workgroup_sum_vec4(sums, lane);
        t |= select(select(select(0u, 1u, sums.y >= goal), 2u, sums.z >= goal), 3u, sums.w >= goal) << bit;
    }
    return t;
}

fn mass_above(row: u32, lane: u32, top: f32, lowest: u32) -> f32 {
    var sum = 0.0;
    for (var id = lane; id < params.vocab; id += WG) {
        let score = score_of(row, id);
        sum += select(0.0, exp(score - top), ordered(score) >= lowest);
    }
    return workgroup_sum_vec4(vec4(sum), lane).x;
}

@compute @workgroup_size(WG)
fn select_floor(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = wid.y;
    var mine = Best(LOWEST, NONE);
    for (var i = lane; i < params.groups; i += WG) { mine = better(mine, stripes[row * params.groups + i]); }
    let top = workgroup_best(mine, lane).score;
    var lowest = 0u;
    if (settings.top_k > 0u && settings.top_k < params.vocab) {
        lowest = search(row, lane, f32(settings.top_k), false, top, 0u);
    }
    if (settings.top_p < 1.0) {
        let goal = settings.top_p * mass_above(row, lane, top, lowest);
        lowest = max(lowest, search(row, lane, goal, true, top, lowest));
    }
    if (lane == 0u) { floors[row] = min(max(lowest, ordered(top + settings.log_min_p)), ordered(top)); }
}

@compute @workgroup_size(WG)
fn finish(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = wid.y;
    var mine = Best(LOWEST, NONE);
    for (var i = lane; i < params.groups; i += WG) { mine = better(mine, stripes[row * params.groups + i]); }
    mine = workgroup_best(mine, lane);
    if (lane > 0u) { return; }
    let token = select(mine.id, NONE, state[0] != 0u);
    let count = next_rows[6u * FIELD + row];
    history[row * RING + count % RING] = token;
    next_rows[6u * FIELD + row] = count + 1u;
    if (token >= params.vocab || next_rows[2u * FIELD + row] + 1u >= next_rows[4u * FIELD + row]) { return; }
    next_seen[row * params.seen_ld + token / 32u] |= 1u << (token % 32u);
    next_rows[row] = token;
    next_rows[FIELD + row] += 1u;
    next_rows[2u * FIELD + row] += 1u;
}
