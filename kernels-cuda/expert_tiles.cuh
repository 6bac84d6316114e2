// The tiles of a routed layer's batch, in the order of their rows. Those in use come first, and their number stands at word
// counts_at. A tile is in one block: of a block's rows of one slot, the last tile may have fewer than SGMV_TILE_ROWS.
//
//   rows   RowRef[rows], Tile[rows] at word tiles_at, at word counts_at + 1 how many tiles the rows of each block begin
//   block  THREADS rows, a thread for a row
#pragma once
#include "routed.cuh"

DEVICE void expert_tiles(u32* rows, const Params& p) {
    __shared__ int slots[THREADS];
    // Tiles of the blocks before, and of all blocks.
    __shared__ u32 before, all;
    __shared__ u32 begun[THREADS / 32];
    const u32 thread = threadIdx.x, lane = thread % 32;
    const u32 block = block_index(), blocks = div_ceil(p.rows, THREADS);
    const u64 row = (u64)block * THREADS + thread;
    if (thread == 0) before = all = 0;
    const int slot = row < p.rows ? (int)rows[2 * row] : -1;
    slots[thread] = slot;
    __syncthreads();
    u32 earlier = 0, any = 0;
    for (u32 i = thread; i < blocks; i += THREADS) {
        const u32 count = rows[(u64)p.counts_at + 1 + i];
        any += count;
        if (i < block) earlier += count;
    }
    if (earlier) atomicAdd(&before, earlier);
    if (any) atomicAdd(&all, any);
    const bool begins = begins_tile(slots);
    const u32 bits = __ballot_sync(~0u, begins);
    if (lane == 0) begun[thread / 32] = __popc(bits);
    __syncthreads();

    u32* const tiles = rows + p.tiles_at;
    if (begins) {
        u32 at = before + __popc(bits & ((1u << lane) - 1));
        for (u32 warp = 0; warp < thread / 32; warp++) at += begun[warp];
        const u32 end = thread + SGMV_TILE_ROWS < THREADS ? thread + SGMV_TILE_ROWS : THREADS;
        u32 last = thread + 1;
        // Rows past the last one have no slot.
        while (last < end && slots[last] == slot) last++;
        u32* const tile = tiles + 4ull * at;
        // The counts are memory's, and not trusted.
        if (at < p.rows) tile[0] = (u32)slot, tile[1] = (u32)row, tile[2] = last - thread, tile[3] = 0;
    }
    if (row < p.rows && row >= all) {
        u32* const tile = tiles + 4 * row;
        tile[0] = 0xffffffffu, tile[1] = tile[2] = tile[3] = 0;
    }
    if (row == 0) rows[p.counts_at] = all;
}

// An entry, the same for all types, that first does START.
#define EXPERT_TILES_ENTRY(START, act, weight)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) lorapool_expert_tiles_##act##_##weight(                      \
        u32* rows, const __grid_constant__ Params p) {                                                                 \
        START                                                                                                          \
        expert_tiles(rows, p);                                                                                         \
    }
