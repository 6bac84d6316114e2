// z[row][z_offset + r] = sum_k A[slot(tile)][r][k] * x[x_row(row)][k], for r < rank: prefill of routed layers for sm_90, bf16 or f16.
// There an adapter's expert has a few tens of rows, whose x lies anywhere, and a launch has thousands of slots.
//
//   grid   as many blocks as fit at once; each takes an equal share of the tiles
//   item   up to ROWS consecutive rows of one slot, a site and RANKS ranks; one after the other in a block
//   step   COLUMNS columns of an item for each warp; A and x are fetched to shared memory STAGES steps ahead
//
// A is the 16-row side of the product, x the 8-column side; of each 16 columns, both sides have a lane's four side by side. The warps
// take equal runs of chunks of COLUMNS columns. Order of a sum: a warp's products ascending; then warps ascending. So are those of
// the kernels for a cluster (prefill_shrink.cuh), its blocks in place of the warps, and the bits are the same.
#include "prefill.cuh"

constexpr u32 WARPS = 8;
constexpr u32 ROWS = 32;
constexpr u32 PACK = 8;
constexpr u32 PACKS = ROWS / PACK;
constexpr u32 STRIP = 32;
constexpr u32 STRIPS = 2;
constexpr u32 COLUMNS = STRIP * STRIPS;
constexpr u32 STAGES = 2;
// Bytes of a piece, 8 rows or ranks by a strip, and a warp's pieces of a step: A's, then x's.
constexpr u32 PIECE = 512;
constexpr u32 OF_A = STRIPS * 2, OF_X = STRIPS * PACKS;
constexpr u32 STAGE = (OF_A + OF_X) * PIECE;
// Sums of an item that a thread adds up.
constexpr u32 OWN = ROWS * RANKS / (WARPS * 32);
// Items that are known at a time.
constexpr u32 LIST = 32;

struct Item {
    u64 a;       // first rank and column
    u32 first;   // row of the launch; before its rows: a large number
    u32 rows;
    u32 z;       // where the item's sums go, from a row's first on
    u32 ranks;   // 0: nothing to do
};

struct Shared {
    unsigned char rings[WARPS][STAGES][STAGE];
    float sums[WARPS][ROWS * RANKS];
    Item list[LIST];
};

// Looks up the items of up to LIST / `each` tiles, from tile `at` to before `end`; how many there are. For a whole warp.
DEVICE u32 fill(const Params& p, const u32* batch, const u32* tables, const unsigned char* weights, Item* list, u32 at, u32 end,
                u32 each, u32 chunks) {
    const u32 lane = threadIdx.x % 32, tile = at + lane;
    int slot = -1;
    u32 first = 0, rows = 0;
    if (lane < LIST / each && tile < end) {
        const u32* words = batch + ((u64)p.tiles_at + 4ull * tile);
        slot = (int)words[0], first = words[1], rows = words[2];
        if (rows > SGMV_TILE_ROWS) rows = SGMV_TILE_ROWS;
        // A row number past 2^32 must not become a small one.
        if (first && rows > 0u - first) rows = 0u - first;
        if (rows == 0) slot = -1;
    }
    // A run: tiles of one slot whose rows follow each other.
    const int slot_before = __shfl_up_sync(~0u, slot, 1);
    const u32 end_before = __shfl_up_sync(~0u, first + rows, 1);
    const bool begins = slot >= 0 && (lane == 0 || first == 0 || slot != slot_before || first != end_before);
    const u32 go_on = __ballot_sync(~0u, slot >= 0 && !begins);
    // The lanes after this one that go on with its run.
    const u32 after = lane < 31 ? __ffs(~(go_on >> (lane + 1))) - 1 : 0;
    const u32 in_run = from_lane(first + rows, lane + after) - first;
    const u32 own = begins ? div_ceil(in_run, ROWS) * each : 0;
    u32 past = own;
#pragma unroll
    for (u32 s = 1; s < 32; s *= 2) {
        const u32 others = __shfl_up_sync(~0u, past, s);
        if (lane >= s) past += others;
    }
    if (begins) {
        Item* to = list + (past - own);
        for (u32 site = 0; site < p.sites; site++) {
            const Pair pair = pair_of(p, p.site[site], tables, slot);
            for (u32 chunk = 0; chunk < chunks; chunk++)
                for (u32 row = 0; row < in_run; row += ROWS) {
                    Item item;
                    const u32 left = saturating(pair.rank, chunk * RANKS);
                    item.a = (u64)weights + pair.offset + 2 * (chunk * RANKS * (u64)p.a_stride);
                    item.first = first + row - p.row_first;
                    item.rows = in_run - row < ROWS ? in_run - row : ROWS;
                    item.z = p.site[site].z_offset + chunk * RANKS;
                    item.ranks = left < RANKS ? left : RANKS;
                    *to++ = item;
                }
        }
    }
    return from_lane(past, 31);
}

// Where a sum is among a warp's: neither side has bank conflicts.
DEVICE u32 place_of_sum(u32 row, u32 rank) { return (row ^ row / 2 % 2) * RANKS + (rank ^ row / 4 % 2 * 8); }

template <class E>
DEVICE void shrink(const u32* batch, const u32* tables, const unsigned char* weights, const u16* x, float* z, const Params& p) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    __shared__ u32 known;
    // Where x may be read at once, only z waits for the launch before, and the next one may start beside this.
    bool waited = false;
    if (p.z_parts) launch_next();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const u32 chunks = div_ceil(p.max_rank, RANKS), each = p.sites * chunks, steps = div_ceil(div_ceil(p.in_features, COLUMNS), WARPS);
    const u32 column = warp * steps * COLUMNS + q * 8;
    // Rows of a piece are 64 bytes, the halves of every other two rows exchanged: neither copies nor loads have bank conflicts.
    const u32 ring = shared_address(shared.rings[warp]) + g * 64, swapped = g / 2 % 2;
    const u32 copy_to = ring + (q ^ swapped * 2) * 16, load_from = ring + swapped * 32 + q * 8;
    // Steps that this warp has columns for.
    const u32 own_steps = div_ceil(saturating(p.in_features, warp * steps * COLUMNS), COLUMNS);
    const bool wide = is_wide(x, p.x_stride);
    const Share share = share_of(tiles_of(p, batch), blockIdx.x, gridDim.x);

    for (u32 at = share.first; at < share.end; at += LIST / each) {
        if (warp == 0) {
            const u32 count = fill(p, batch, tables, weights, shared.list, at, share.end, each, chunks);
            if (lane == 0) known = count;
        }
        __syncthreads();
        const u32 count = known;
        auto next_of = [&](u32 i) {
            while (i < count && shared.list[i].ranks == 0) i++;
            return i;
        };
        // The row of x of the item's row `lane`; NO_ROW: zeros, or there is none.
        auto row_of_x = [&](u32 i) {
            if (i >= count) return NO_ROW;
            const u32 row = shared.list[i].first + lane;
            return lane < shared.list[i].rows && row < p.rows ? x_row(p, batch, row) : NO_ROW;
        };
        u32 now = next_of(0);
        if (now >= count) {
            __syncthreads();
            continue;
        }
        // What is fetched next: a step of an item, of which this lane has rows g and g + 8 of A, and of x those of each pack.
        u32 ahead = now, ahead_step = 0;
        u32 row = row_of_x(now), row_after = row_of_x(next_of(now + 1));
        const u16* x_from[PACKS];
        u32 is = 0;
        auto find_x = [&] {
            is = 0;
#pragma unroll
            for (u32 j = 0; j < PACKS; j++) {
                const u32 own = from_lane(row, j * PACK + g);
                is |= (own != NO_ROW) << j;
                x_from[j] = x + ((own == NO_ROW ? 0 : (u64)own * p.x_stride) + column);
            }
        };
        find_x();
        if (!waited && p.z_parts == 0) {
            start_in_turn();
            waited = true;
        }
        auto fetch = [&](u32 stage) {
            if (ahead >= count) {
                end_group();
                return;
            }
            const Item& item = shared.list[ahead];
            const u32 k = ahead_step * COLUMNS, ranks = item.ranks, packs = div_ceil(item.rows, PACK);
            const u64 from = item.a + 2 * (g * (u64)p.a_stride + k + column);
            const u32 to = copy_to + stage * STAGE;
#pragma unroll
            for (u32 i = 0; i < STRIPS; i++) {
                if (ahead_step >= own_steps) break;
                const u32 left = saturating(p.in_features, k + column + i * STRIP), bytes = left < 8 ? left * 2 : 16;
#pragma unroll
                for (u32 h = 0; h < 2; h++) {
                    const u32 some = g + h * 8 < ranks ? bytes : 0;
                    copy16(to + (i * 2 + h) * PIECE, (const void*)(some ? from + i * STRIP * 2 + h * (16 * (u64)p.a_stride) : item.a),
                           some);
                }
#pragma unroll
                for (u32 j = 0; j < PACKS; j++) {
                    if (j >= packs) break;
                    const u32 some = is >> j & 1 ? bytes : 0;
                    const u16* const here = x_from[j] + (k + i * STRIP);
                    const u32 place = to + (OF_A + j * STRIPS + i) * PIECE;
                    if (wide) copy16(place, some ? here : x, some);
                    else write16(place, some8(here, some / 2));
                }
            }
            end_group();
            if (++ahead_step < steps) return;
            ahead_step = 0;
            ahead = next_of(ahead + 1);
            row = row_after, row_after = row_of_x(next_of(ahead + 1));
            find_x();
        };
        float sum[PACKS][4] = {};
        auto multiply = [&](u32 stage, u32 packs) {
            const u32 from = load_from + stage * STAGE;
#pragma unroll
            for (u32 i = 0; i < STRIPS; i++)
#pragma unroll
                for (u32 h = 0; h < 2; h++) {
                    // A bit of the place.
                    const u32 half = (from ^ h * 32) + i * PIECE;
                    const uint2 a = read8(half + i * PIECE), b = read8(half + (i + 1) * PIECE);
#pragma unroll
                    for (u32 j = 0; j < PACKS; j++) {
                        if (j >= packs) break;
                        const uint2 v = read8(half + (OF_A + j * STRIPS) * PIECE);
                        Words<E>::mma(sum[j], a.x, b.x, a.y, b.y, v.x, v.y);
                    }
                }
        };
        // Adds up what the warps have of an item.
        auto finish = [&](const Item& item) {
            const u32 packs = div_ceil(item.rows, PACK), rank = threadIdx.x % RANKS;
            // Of no row of x nothing is read: 0 times infinity must not become a sum.
            bool none[OWN];
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                const u32 own = item.first + i * (ROWS / OWN) + threadIdx.x / RANKS;
                none[i] = p.x_rows_at && own < p.rows && x_row(p, batch, own) == NO_ROW;
            }
            // All have read the sums of the item before.
            __syncthreads();
#pragma unroll
            for (u32 j = 0; j < PACKS; j++) {
                if (j >= packs) break;
                // Ranks g and g + 8 of rows 2q and 2q + 1.
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    shared.sums[warp][place_of_sum(j * PACK + 2 * q + i % 2, g + i / 2 * 8)] = sum[j][i];
                    sum[j][i] = 0.0f;
                }
            }
            __syncthreads();
            if (!waited) wait_for_last();
            waited = true;
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                const u32 own = i * (ROWS / OWN) + threadIdx.x / RANKS;
                const u32 of_launch = item.first + own;
                if (own >= item.rows || of_launch >= p.rows || rank >= item.ranks) continue;
                const float* from = shared.sums[0] + place_of_sum(own, rank);
                float total = from[0];
#pragma unroll
                for (u32 w = 1; w < WARPS; w++) total = __fadd_rn(total, from[w * ROWS * RANKS]);
                z[(u64)of_launch * p.z_stride + item.z + rank] = none[i] ? 0.0f : total;
            }
        };

#pragma unroll 1
        for (u32 s = 0; s < STAGES; s++) fetch(s);
        u32 stage = 0, step = 0;
#pragma unroll 1
        while (now < count) {
            wait_groups<STAGES - 1>();
            __syncwarp();
            if (step < own_steps) multiply(stage, div_ceil(shared.list[now].rows, PACK));
            __syncwarp();
            fetch(stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            if (++step < steps) continue;
            finish(shared.list[now]);
            step = 0, now = next_of(now + 1);
        }
        wait_groups<0>();
        // The list has been read.
        __syncthreads();
    }
    if (!waited) {
        wait_for_last();
        if (p.z_parts == 0) launch_next();
    }
}

static_assert(sizeof(Shared) == 115456, "what launches count on");
#define ENTRY(name, E)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) lorapool_sgmv_shrink_##name##_##name(                  \
        const u32* __restrict__ batch, const u32* __restrict__ tables, const unsigned char* __restrict__ weights,      \
        const u16* x, float* z, const __grid_constant__ Params p) {                                                    \
        shrink<E>(batch, tables, weights, x, z, p);                                                                    \
    }
ENTRY(bf16, Bf16)
ENTRY(f16, F16)
