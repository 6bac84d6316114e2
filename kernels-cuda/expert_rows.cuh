// The batch of a routed layer from that of its tokens: a row for each of a token's experts, whose slot is
// slot(token) * slot_stride + expert, and its token as the row of x that it reads.
//
//   batch  RowRef[x_rows]      experts  u32[rows], or u32[experts + 1] prefix sums with ROUTED_OFFSETS
//   rows   RowRef[rows], u32[rows] at word x_rows_at, at word counts_at + 1 how many tiles the rows of each block begin
//   tokens u32[rows] with ROUTED_TOKENS, else null
//   block  THREADS rows, a thread for a row
#pragma once
#include "routed.cuh"

// The expert of row `row`; one past the last where it has none.
DEVICE u32 expert_of(const Params& p, const u32* experts, u32 row) {
    if ((p.routed & ROUTED_OFFSETS) == 0) return experts[row];
    // The first whose rows end past this one.
    u32 low = 0, high = p.experts;
    while (low < high) {
        const u32 middle = low + (high - low) / 2;
        if (experts[middle + 1] <= row) low = middle + 1;
        else high = middle;
    }
    return low < p.experts && experts[low] > row ? p.experts : low;
}

DEVICE void expert_rows(const u32* batch, const u32* experts, u32* rows, const u32* tokens, const Params& p) {
    __shared__ int slots[THREADS];
    const u32 thread = threadIdx.x;
    const u64 row = (u64)block_index() * THREADS + thread;
    int slot = -1;
    u32 scale = 0;
    u32 token = NO_ROW;
    if (row < p.rows) {
        const u32 place = (p.routed & ROUTED_TOKENS) != 0 ? tokens[row] : (u32)row;
        const u32 of_token = place / p.top_k;
        const u32 expert = expert_of(p, experts, (u32)row);
        if (of_token < p.x_rows && expert < p.experts) {
            const u32* entry = batch + 2ull * of_token;
            // A negative slot is past any.
            if (entry[0] < p.slots) {
                slot = (int)(entry[0] * p.slot_stride + expert);
                scale = entry[1];
                token = of_token;
            }
        }
    }
    if (row < p.rows) {
        rows[2 * row] = (u32)slot;
        rows[2 * row + 1] = scale;
        if (p.x_rows_at != 0) rows[p.x_rows_at + row] = token;
    }
    if (p.counts_at == 0) return;
    slots[thread] = slot;
    __syncthreads();
    const u32 count = __syncthreads_count(begins_tile(slots));
    if (thread == 0 && row < p.rows) rows[(u64)p.counts_at + 1 + row / THREADS] = count;
}

// An entry, the same for all types, that first does START.
#define EXPERT_ROWS_ENTRY(START, act, weight)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) lorapool_expert_rows_##act##_##weight(                       \
        const u32* __restrict__ batch, const u32* __restrict__ experts, u32* __restrict__ rows,                        \
        const u32* __restrict__ tokens, const __grid_constant__ Params p) {                                            \
        START                                                                                                          \
        expert_rows(batch, experts, rows, tokens, p);                                                                  \
    }
