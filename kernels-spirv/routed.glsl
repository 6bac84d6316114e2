// What the kernels that make batches of routed layers share.

shared int slots[THREADS];
// Of each thread's row the first of its run, as far as is known.
shared uint firsts[THREADS];

// Whether a tile begins at row `thread` of the workgroup, whose slots are known. For whole workgroups.
bool begins_tile(uint thread) {
    uint first = thread == 0u || slots[max(thread, 1u) - 1u] != slots[thread] ? thread : 0u;
    for (uint step = 1u; step < THREADS; step *= 2u) {
        firsts[thread] = first;
        barrier();
        if (thread >= step) {
            first = max(first, firsts[thread - step]);
        }
        barrier();
    }
    return slots[thread] >= 0 && (thread - first) % SGMV_TILE_ROWS == 0u;
}
