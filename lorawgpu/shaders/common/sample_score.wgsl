// Scores of the next token, shared by sample.wgsl and sample_floor.wgsl. The main file declares params, settings (one
// for each row), logits, seen.
struct Params { vocab: u32, ld: u32, groups: u32, seen_ld: u32, bit: u32, by_mass: u32 }
struct Settings { inv_temperature: f32, penalty: f32, top_p: f32, log_min_p: f32, top_k: u32, key0: u32, key1: u32, greedy: u32 }
struct Best { score: f32, id: u32 }
const NONE: u32 = 0xffffffffu;
const LOWEST: f32 = -3.4e38;

fn score_of(row: u32, id: u32) -> f32 {
    let logit = logits[row * params.ld + id];
    let known = ((seen[row * params.seen_ld + id / 32u] >> (id % 32u)) & 1u) == 1u;
    let penalised = select(logit / settings[row].penalty, logit * settings[row].penalty, logit < 0.0);
    return select(logit, penalised, known) * settings[row].inv_temperature;
}

fn ordered(x: f32) -> u32 { // an integer key with the order of the floats
    let b = bitcast<u32>(x);
    return select(b | 0x80000000u, ~b, (b >> 31u) == 1u);
}

var<workgroup> best: array<Best, WG>;

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
