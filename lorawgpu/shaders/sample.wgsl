// Chooses the next token of each sequence and advances the sequence. logits: (rows, ld), of which `vocab` are real.
//   score = (seen: logit < 0 ? logit * penalty : logit / penalty; else logit) * inv_temperature
//   token = argmax over score >= floor of score + noise,  noise = -log(-log u): a draw from softmax(score) (Gumbel)
//   floor = the larger of floors[row] (top-k and top-p, sample_floor.wgsl) and the largest score + log(min_p)
//   u is a hash of (key, stream of the sequence, position, token), so a draw depends neither on its row nor on the batch
// Each row has its own settings; a greedy one draws without noise. Ties go to the lowest id.
// Entry points: peak (the best of each of `groups` stripes), draw (the same with floor and noise), finish (the best of
// all stripes becomes the next input). Greedy: peak, finish.
// A row without a finite best score, or a step marked bad, yields token 0xffffffff.
// uses: common/hash.wgsl
// uses: common/sample_score.wgsl

override FIELD: u32; // words from one field of `rows` to the next: ids, position, slot, kv_start, end, stream, count
override RING: u32; // tokens per row in `history`

const WG: u32 = 256u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> settings: array<Settings>;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read> seen: array<u32>; // bit set (rows, seen_ld words) of the sequence's tokens so far
@group(0) @binding(4) var<storage, read> rows: array<u32>;
@group(0) @binding(5) var<storage, read_write> floors: array<u32>; // (rows), as ordered keys
@group(0) @binding(6) var<storage, read_write> stripes: array<Best>; // (rows, groups)
@group(0) @binding(7) var<storage, read> peaks: array<Best>; // written by `peak`
// finish
@group(0) @binding(8) var<storage, read_write> next_rows: array<u32>; // rows
@group(0) @binding(9) var<storage, read_write> next_seen: array<u32>; // seen
@group(0) @binding(10) var<storage, read_write> history: array<u32>; // (rows, RING)
@group(0) @binding(11) var<storage, read> state: array<u32>;

fn noise(k0: u32, k1: u32, id: u32) -> f32 {
    let v = (f32(mix32(mix32(id ^ k0) + k1)) + 0.5) * 0x1p-32f; // 1 - u, in (0, 1]
    let e = select(-log(max(1.0 - v, 0x1p-32f)), v, v < 1e-3); // -log u; small values win, and there v is exact
    return -log(e);
}

fn best_peak(row: u32, lane: u32) -> Best {
    var mine = Best(LOWEST, NONE);
    for (var i = lane; i < params.groups; i += WG) { mine = better(mine, peaks[row * params.groups + i]); }
    return workgroup_best(mine, lane);
}

@compute @workgroup_size(WG)
fn peak(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    var mine = Best(LOWEST, NONE);
    for (var id = wid.x * WG + lane; id < params.vocab; id += params.groups * WG) {
        mine = better(mine, Best(score_of(wid.y, id), id));
    }
    mine = workgroup_best(mine, lane);
    if (lane == 0u) {
        stripes[wid.y * params.groups + wid.x] = mine;
        if (wid.x == 0u) { floors[wid.y] = 0u; }
    }
}

@compute @workgroup_size(WG)
fn draw(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = wid.y;
    let top = best_peak(row, lane).score;
    let stream = rows[5u * FIELD + row];
    let position = rows[FIELD + row];
    let k0 = fold_key(fold_key(settings[row].key0, stream), position);
    let k1 = fold_key(fold_key(settings[row].key1, stream), position);
    let lowest = min(max(floors[row], ordered(top + settings[row].log_min_p)), ordered(top));
    var mine = Best(LOWEST, NONE);
    for (var id = wid.x * WG + lane; id < params.vocab; id += params.groups * WG) {
        let score = score_of(row, id);
        if (ordered(score) >= lowest) { mine = better(mine, Best(score + select(noise(k0, k1, id), 0.0, settings[row].greedy == 1u), id)); }
    }
    mine = workgroup_best(mine, lane);
    if (lane == 0u) { stripes[row * params.groups + wid.x] = mine; }
}

@compute @workgroup_size(WG)
fn finish(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = wid.y;
    let chosen = best_peak(row, lane);
    if (lane > 0u) { return; }
    let token = select(chosen.id, NONE, state[0] != 0u);
    let count = next_rows[6u * FIELD + row];
    history[row * RING + count % RING] = token;
    next_rows[6u * FIELD + row] = count + 1u;
    if (token >= params.vocab || next_rows[2u * FIELD + row] + 1u >= next_rows[4u * FIELD + row]) { return; }
    next_seen[row * params.seen_ld + token / 32u] |= 1u << (token % 32u);
    next_rows[row] = token;
    next_rows[FIELD + row] += 1u;
    next_rows[2u * FIELD + row] += 1u;
}
