// The bookkeeping of one optimizer step. Grid: one thread.
//   begin:  clear the bad flag and the loss        end:  count steps and bad steps
// state: 16 words
//   0  1 if something non-finite was seen in this step
//   1  lowest id of a record that saw it in this step; 0xffffffff if none
//   2  bad steps in a row, up to this one
//   3  bad steps in total
//   4  word 1 of the latest bad step, for a host that reads a few steps late
//   5  steps that have ended
// total: the step's loss, as added up by cross_entropy.wgsl.

@group(0) @binding(0) var<storage, read_write> state: array<atomic<u32>>;
@group(0) @binding(1) var<storage, read_write> total: array<vec2<u32>>;

@compute @workgroup_size(1)
fn begin() {
    atomicStore(&state[0], 0u);
    atomicStore(&state[1], 0xffffffffu);
    total[0] = vec2(0u);
}

@compute @workgroup_size(1)
fn end() {
    if (atomicLoad(&state[0]) != 0u) {
        atomicAdd(&state[2], 1u);
        atomicAdd(&state[3], 1u);
        atomicStore(&state[4], atomicLoad(&state[1]));
    } else {
        atomicStore(&state[2], 0u);
    }
    atomicAdd(&state[5], 1u);
}
