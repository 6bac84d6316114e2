// What the kernels that make batches of routed layers share.
#pragma once
#include "common.cuh"

// Whether a tile begins at this thread's row; `slots`: those of the block's rows. For whole blocks.
DEVICE bool begins_tile(const int* slots) {
    __shared__ u32 changes[THREADS / 32];
    const u32 thread = threadIdx.x, lane = thread % 32;
    u32 word = thread / 32;
    const u32 bits = __ballot_sync(~0u, thread == 0 || slots[thread - 1] != slots[thread]);
    if (lane == 0) changes[word] = bits;
    __syncthreads();
    // The last change up to this row.
    u32 found = bits & (~0u >> (31 - lane));
    while (found == 0) found = changes[--word];
    const u32 first = word * 32 + 31 - __clz(found);
    return slots[thread] >= 0 && (thread - first) % SGMV_TILE_ROWS == 0;
}
