// The bookkeeping of one optimizer step over its micro-batches. Grid: one thread.
//   begin:  nothing bad seen yet, no loss yet        end:  count bad steps
// state: 16 words
//   0  1: something non-finite was seen in this step
//   1  lowest id of a record that saw it in this step, 0xffffffff: none
//   2  how many steps up to this one were bad in a row
//   3  how many were bad in all
//   4  word 1 of the latest bad step: what to show when the host reads a few steps late
//   5  how many steps have ended
// total: the step's loss, as cross_entropy.wgsl adds it.

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
