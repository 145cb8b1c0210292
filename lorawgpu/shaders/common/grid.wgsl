// Index of this workgroup in a grid folded into two dimensions. The caller guards the overhang.
fn group_index(wid: vec3<u32>, groups: vec3<u32>) -> u32 { return wid.y * groups.x + wid.x; }
