// The counter-based hash of reference/dropout.py: MurmurHash3's finalizer, and folding words into keys.
fn mix32(v: u32) -> u32 {
    var h = v;
    h ^= h >> 16u; h *= 0x85ebca6bu;
    h ^= h >> 13u; h *= 0xc2b2ae35u;
    return h ^ (h >> 16u);
}
fn fold_key(key: u32, word: u32) -> u32 { return mix32(key ^ word) + 0x9e3779b9u; }
