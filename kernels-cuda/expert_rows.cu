// The batch of a routed layer from that of its tokens: a row for each of a token's experts, whose slot is
// slot(token) * slot_stride + expert, and its token as the row of x that it reads.
//
//   batch  RowRef[x_rows]      experts  u32[rows], or u32[experts + 1] prefix sums with ROUTED_OFFSETS
//   rows   RowRef[rows], Tile[rows] at word tiles_at, u32[rows] at word x_rows_at
//   tokens u32[rows] with ROUTED_TOKENS, else null
//   block  THREADS rows, a thread for a row
//
// A tile ends where the slot changes or at a multiple of SGMV_TILE_ROWS: in the block where it begins.
#include "common.cuh"

constexpr u32 MOST = SGMV_TILE_ROWS;
static_assert(THREADS % MOST == 0, "a tile's rows are in one block");

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
    slots[thread] = slot;
    __syncthreads();
    if (row >= p.rows) return;

    rows[2 * row] = (u32)slot;
    rows[2 * row + 1] = scale;
    if (p.x_rows_at != 0) rows[p.x_rows_at + row] = token;
    if (p.tiles == 0) return;
    u32 count = 0;
    if (slot >= 0 && (thread % MOST == 0 || slots[thread - 1] != slot)) {
        const u32 left = p.rows - (u32)row;
        const u32 end = (thread / MOST + 1) * MOST;
        u32 last = thread + 1;
        while (last < end && last - thread < left && slots[last] == slot) last++;
        count = last - thread;
    }
    u32* tile = rows + (p.tiles_at + 4 * row);
    tile[0] = count != 0 ? (u32)slot : 0xffffffffu;
    tile[1] = count != 0 ? (u32)row : 0;
    tile[2] = count;
    tile[3] = 0;
}

// The same for all types.
#define ENTRY(act, act_code, weight, weight_code)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) lorapool_expert_rows_##act##_##weight(                       \
        const u32* __restrict__ batch, const u32* __restrict__ experts, u32* __restrict__ rows,                        \
        const u32* __restrict__ tokens, const __grid_constant__ Params p) {                                            \
        expert_rows(batch, experts, rows, tokens, p);                                                                  \
    }
FOR_EACH_SPEC(ENTRY)
