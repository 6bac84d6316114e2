// z[part][row][site][r] = sum over the part's k of A[slot(row)][r][k] * x[row][k], for r < rank: decode in bf16 or f16 for sm_90.
//
//   item   a pack of rows, a part of the columns, a site and RANKS ranks; one after the other in a block
//   step   STEP columns of an item, STRIPS strips of STRIP for each warp; its weights are asked for two steps ahead
//
// A is the 16-row side of the product, x the 8-column side. Order of a sum: a warp's strips in order, even and odd halves of
// strips apart, over the steps of a part; then warps in order. Parts are the expand's to add.
#include "packs.cuh"

// Floats from a row of a warp's sums to the next: so that neither side has bank conflicts.
constexpr u32 PITCH = RANKS + 4;

// A step, as a lane of each warp has looked it up. In shared memory, LIST at a time.
struct Step {
    u64 a;       // first rank and column
    u32 pack;
    u32 k;       // first column
    u32 z;       // where the item's sums go, from a row's first on
    u32 ranks;   // of the item that there are
    u32 whole;   // whether all its ranks and columns are there
    u32 last;    // whether it is the item's last
};
constexpr u32 LIST = 32;

template <class E>
DEVICE void shrink(const u32* batch, const u32* tables, const unsigned char* weights, const u16* x, float* z, const Params& p) {
    __shared__ float memory[2][SHRINK_WARPS][PACK_ROWS * PITCH];
    __shared__ Step lists[SHRINK_WARPS][LIST];
    launch_next();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const u32 chunks = div_ceil(p.max_rank, RANKS), parts = parts_of(p.in_features), steps = part_steps_of(p.in_features);
    const u32 each = parts * p.sites * chunks;
    const u32 items = live_packs(p, batch) * each;
    const Share share = share_of(items, blockIdx.x, working_blocks(p, items, BUSY_ITEMS));
    const ZStrides strides = z_strides(p);
    const bool x_wide = is_wide(x, p.x_stride);
    const u32 column = warp * (STRIPS * STRIP) + q * 8;
    Step* const list = lists[warp];

    // Puts the steps that have something to do, of LIST from `rest` on, in the list; how many.
    auto fill = [&](u32 rest) {
        const u32 index = rest + lane, item = index / steps;
        Step s;
        s.ranks = 0;
        if (item < share.end) {
            s.pack = item / each;
            const u32 own = item % each, chunk = own % chunks, site = own / chunks % p.sites;
            const u32 part = own / (chunks * p.sites), step = index % steps;
            s.k = (part * steps + step) * STEP;
            const Pair pair = pair_of(p, p.site[site], tables, slot_of(p, batch, s.pack));
            if (s.k < p.in_features) s.ranks = saturating(pair.rank, chunk * RANKS);
            s.a = (u64)weights + pair.offset + 2 * (chunk * RANKS * (u64)p.a_stride + s.k);
            s.z = (u32)(part * strides.part) + site * strides.site + chunk * RANKS;
            s.whole = s.ranks >= RANKS && s.k + STEP <= p.in_features;
            s.last = step + 1 == steps || s.k + STEP >= p.in_features;
        }
        const u32 live = __ballot_sync(~0u, s.ranks != 0);
        __syncwarp();
        if (s.ranks) list[__popc(live & ((1u << lane) - 1))] = s;
        __syncwarp();
        return __popc(live);
    };
    const u64 own_a = 2 * (g * (u64)p.a_stride + column), eight = 16 * (u64)p.a_stride;
    auto load_a = [&](const Step& s, uint4 (&w)[STRIPS][2]) {
        const u64 from = s.a + own_a;
        if (s.whole) {
#pragma unroll
            for (u32 i = 0; i < STRIPS; i++) {
                w[i][0] = weights16(from + i * STRIP * 2);
                w[i][1] = weights16(from + i * STRIP * 2 + eight);
            }
            return;
        }
#pragma unroll
        for (u32 i = 0; i < STRIPS; i++)
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                const u32 left = saturating(p.in_features, s.k + column + i * STRIP);
                w[i][h] = make_uint4(0, 0, 0, 0);
                if (g + h * 8 >= s.ranks || left == 0) continue;
                const u64 here = from + i * STRIP * 2 + h * eight;
                w[i][h] = left >= 8 ? weights16(here) : some8(reinterpret_cast<const u16*>(here), left);
            }
    };
    // This lane's row of x, and this thread's of z at rank `threadIdx.x % RANKS`; null: there is none.
    const u16* x_from = nullptr;
    float* z_to = nullptr;
    auto find_rows = [&](u32 pack) {
        u32 row = row_of(p, batch, pack, g);
        if (row != NO_ROW) row = x_row(p, batch, row);
        x_from = row == NO_ROW ? nullptr : x + ((u64)row * p.x_stride + column);
        const u32 own = row_of(p, batch, pack, threadIdx.x / RANKS % PACK_ROWS);
        z_to = threadIdx.x >= RANKS * PACK_ROWS || own == NO_ROW ? nullptr
                                                                 : z + (own * strides.row + place_of_rank(threadIdx.x % RANKS));
    };
    uint4 v[STRIPS];
    auto load_x = [&](u32 k) {
        if (x_wide && k + STEP <= p.in_features) {
#pragma unroll
            for (u32 i = 0; i < STRIPS; i++) v[i] = x_from ? shared_cache(x_from + k + i * STRIP) : make_uint4(0, 0, 0, 0);
            return;
        }
#pragma unroll
        for (u32 i = 0; i < STRIPS; i++) {
            const u32 left = x_from ? saturating(p.in_features, k + column + i * STRIP) : 0;
            const u16* from = x_from + k + i * STRIP;
            v[i] = x_wide && left >= 8 ? shared_cache(from) : some8(from, left);
        }
    };
    u32 buffer = 0;
    float sum[4] = {}, odd[4] = {};
    auto multiply = [&](const uint4 (&w)[STRIPS][2]) {
#pragma unroll
        for (u32 i = 0; i < STRIPS; i++) {
            Words<E>::mma(sum, w[i][0].x, w[i][1].x, w[i][0].y, w[i][1].y, v[i].x, v[i].y);
            Words<E>::mma(odd, w[i][0].z, w[i][1].z, w[i][0].w, w[i][1].w, v[i].z, v[i].w);
        }
    };
    // Adds up what the warps have of an item.
    auto finish = [&](float* to, u32 ranks) {
        // Ranks g and g + 8 of rows 2q and 2q + 1.
        float* mine = memory[buffer][warp] + 2 * q * PITCH + g;
#pragma unroll
        for (u32 i = 0; i < 4; i++) mine[i % 2 * PITCH + i / 2 * 8] = __fadd_rn(sum[i], odd[i]);
        __syncthreads();
        if (to) {
            const float* from = memory[buffer][0] + threadIdx.x / RANKS * PITCH + threadIdx.x % RANKS;
            float total = from[0];
#pragma unroll
            for (u32 w = 1; w < SHRINK_WARPS; w++) total = __fadd_rn(total, from[w * PACK_ROWS * PITCH]);
            // A rank past the last one is none: 0 times infinity must not become part of a sum.
            *to = threadIdx.x % RANKS < ranks ? total : 0.0f;
        }
        buffer ^= 1;
#pragma unroll
        for (u32 i = 0; i < 4; i++) sum[i] = odd[i] = 0.0f;
    };

    bool waited = false;
#pragma unroll 1
    for (u32 rest = share.first * steps; rest < share.end * steps; rest += LIST) {
        const u32 count = fill(rest);
        if (count == 0) continue;
        uint4 even[STRIPS][2], odds[STRIPS][2];
        load_a(list[0], even);
        if (count > 1) load_a(list[1], odds);
        find_rows(list[0].pack);
        settle(x_from), settle(z_to);
        if (!waited) wait_for_last();
        waited = true;
        load_x(list[0].k);
        u32 at = 0;
        // One step, from weights that are then asked for anew; false: it was the last one.
        auto turn = [&](uint4 (&w)[STRIPS][2]) {
            multiply(w);
            if (at + 2 < count) load_a(list[at + 2], w);
            const Step& now = list[at];
            float* const to = z_to ? z_to + now.z : nullptr;
            if (at + 1 < count) {
                const Step& next = list[at + 1];
                const bool other = next.pack != now.pack;
                if (other) find_rows(next.pack);
                if (other || next.k != now.k) load_x(next.k);
            }
            if (now.last) finish(to, now.ranks);
            return ++at < count;
        };
        while (turn(even) && turn(odds)) {
        }
    }
    // One thread that waits is enough for the end of this launch to be the end of all before it.
    if (!waited && blockIdx.x == 0) wait_for_last();
}

#define ENTRY(name, E)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(SHRINK_WARPS * 32, 2) lorapool_bgmv_shrink_##name##_##name(           \
        const u32* __restrict__ batch, const u32* __restrict__ tables, const unsigned char* __restrict__ weights,      \
        const u16* x, float* z, const __grid_constant__ Params p) {                                                    \
        shrink<E>(batch, tables, weights, x, z, p);                                                                    \
    }
ENTRY(bf16, Bf16)
ENTRY(f16, F16)
