// What the kernels that make batches of routed layers share.

var<workgroup> slots: array<i32, THREADS>;
// Of each thread's row the first of its run, as far as is known.
var<workgroup> firsts: array<u32, THREADS>;

// Whether a tile begins at row `thread` of the workgroup, whose slots are known. For whole workgroups.
fn begins_tile(thread: u32) -> bool {
    var first = 0u;
    if thread == 0u || slots[max(thread, 1u) - 1u] != slots[thread] {
        first = thread;
    }
    for (var step = 1u; step < THREADS; step *= 2u) {
        firsts[thread] = first;
        workgroupBarrier();
        if thread >= step {
            first = max(first, firsts[thread - step]);
        }
        workgroupBarrier();
    }
    return slots[thread] >= 0 && (thread - first) % SGMV_TILE_ROWS == 0u;
}
