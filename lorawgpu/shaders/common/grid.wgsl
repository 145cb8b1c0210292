// Number of this workgroup in a grid that was folded into two dimensions; the caller guards the overhang.
fn group_index(wid: vec3<u32>, groups: vec3<u32>) -> u32 { return wid.y * groups.x + wid.x; }
