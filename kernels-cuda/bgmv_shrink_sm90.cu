// z[part][row][site][r] = sum over the part's k of A[slot(row)][r][k] * x[row][k], for r < rank: decode in bf16 for
// sm_90.
//
//   part     some stages of columns, each STAGE_COLUMNS
//   run      neighbouring parts of one pack of rows, one site and RANKS ranks
//   warp     a run after the other, whose weights and x it asks for SLOTS stages ahead
//
// A is the 16-row side of the product, x the 8-column side. Order of a sum: chunks of COLUMNS columns in four sums by
// turns, the first two and the last two of these added first.
#include "decode.cuh"

// Most warps of a block.
constexpr u32 WARPS = 4;
constexpr u32 SLOTS = 2;
constexpr u32 COLUMNS = 32;
constexpr u32 CHUNKS = STAGE_COLUMNS / COLUMNS;
constexpr u32 STAGE_LINE = STAGE_COLUMNS * 2;
// A rank's or a row's columns in shared memory: 16 bytes more, so that what is read at once lies in different banks.
constexpr u32 LINE = STAGE_LINE + 16;
constexpr u32 SLOT_BYTES = (RANKS + PACK_ROWS) * LINE;
// A copy instruction takes 128 bytes of each of 4 lines.
constexpr u32 PIECES = STAGE_LINE / 128;

// What the runs of a pack, a site and RANKS ranks have in common, in the lane that looked it up.
struct Source {
    u64 a;       // first rank, column 0
    u32 ranks;   // 0: nothing to do
    u32 pack;
    u32 z;       // of the first rank in part 0 of row 0
};

DEVICE Source find(const Params& p, const u32* batch, const u32* tables, const unsigned char* weights, u32 index,
                   bool valid) {
    Source source = {0, 0, 0, 0};
    if (!valid) return source;
    const u32 chunks = div_ceil(p.max_rank, RANKS);
    const u32 rank_first = index % chunks * RANKS;
    index /= chunks;
    const u32 site = index % p.sites;
    source.pack = p.packs_at + PACK_WORDS * (index / p.sites);
    const Pair pair = pair_of(p, p.site[site], tables, (int)batch[source.pack]);
    if (rank_first >= pair.rank) return source;
    source.ranks = pair.rank - rank_first < RANKS ? pair.rank - rank_first : RANKS;
    source.z = z_strides(p).site * site + rank_first;
    source.a = (u64)weights + pair.offset + 2 * (u64)rank_first * p.a_stride;
    return source;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    lorapool_bgmv_shrink_bf16_bf16(const u32* __restrict__ batch, const u32* __restrict__ tables,
                                   const unsigned char* __restrict__ weights, const u16* x, float* z,
                                   const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char memory[];
    launch_next();
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 slots = shared_address(memory) + threadIdx.x / 32 * (SLOTS * SLOT_BYTES);
    const u32 to_lane = slots + lane / 8 * LINE + lane % 8 * 16;
    // Rows of the matrices that this lane names: of A, and of x.
    const u32 a_row = slots + (lane / 8 % 2 * 8 + lane % 8) * LINE + lane / 16 * 16;
    const u32 x_row = slots + (RANKS + lane % 8) * LINE + lane / 8 * 16;
    const ZStrides strides = z_strides(p);
    const u32 parts = parts_of(p.in_features), part_stages = part_stages_of(p.in_features);
    const u32 stages = stages_of(p.in_features);
    const bool x_wide = is_wide(x, p.x_stride);
    const u32 each = p.sites * div_ceil(p.max_rank, RANKS) * parts;
    Share share = {0, 0};
    // Unless this warp has nothing to do in any batch.
    if (threadIdx.x / 32 * gridDim.x + blockIdx.x < p.tiles * each) share = share_of(live_packs(p, batch) * each);
    bool waited = false;

    for (u32 at = share.first; at < share.end;) {
        const u32 source_first = at / parts;
        const u32 own = source_first + lane;
        const Source mine = find(p, batch, tables, weights, own, own * parts < share.end);
        u32 sources = __ballot_sync(~0u, mine.ranks != 0);
        const u32 batch_end = (source_first + 32) * parts < share.end ? (source_first + 32) * parts : share.end;

        // The run that is asked for: its next stage and its end, this lane's part of lines 0 to 3 of A, and rows.
        u32 ask_sources = sources, ask_stage = 0, ask_end = 0, ask_slot = 0, ask_ranks = 0;
        u64 a_from = 0;
        u64 x_from[2] = {0, 0};   // 0: no such row
        auto begin = [&]() {
            const u32 from = __ffs(ask_sources) - 1;
            ask_sources &= ask_sources - 1;
            const u32 zero = (source_first + from) * parts;
            ask_stage = at > zero ? (at - zero) * part_stages : 0;
            ask_end = batch_end - zero < parts ? (batch_end - zero) * part_stages : stages;
            ask_ranks = from_lane(mine.ranks, from);
            a_from = from_lane(mine.a, from) + ask_stage * STAGE_LINE;
            a_from += lane / 8 * (2 * (u64)p.a_stride) + lane % 8 * 16;
            const u32* pack = batch + from_lane(mine.pack, from);
            const u32 rows = pack[1];
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                const u32 i = lane / 8 + 4 * h, row = pack[2 + i] - p.row_first;
                const bool live = i < rows && row < p.rows;
                x_from[h] = live ? (u64)(x + ((u64)row * p.x_stride + ask_stage * STAGE_COLUMNS + lane % 8 * 8)) : 0;
            }
        };
        // Bytes of the lane's piece `i` of a stage.
        auto bytes_of = [&](u32 stage, u32 i) {
            return clamp16(saturating(2 * p.in_features, stage * STAGE_LINE + i * 128 + lane % 8 * 16));
        };
        auto ask_a = [&](u32 stage, u32 slot) {
            const u32 to = to_lane + slot * SLOT_BYTES;
            const u64 four = 8 * (u64)p.a_stride;
            const bool whole = (stage + 1) * STAGE_COLUMNS <= p.in_features && ask_ranks == RANKS;
            u64 from = a_from;
            if (whole) {
#pragma unroll
                for (u32 r = 0; r < RANKS / 4; r++, from += four)
#pragma unroll
                    for (u32 i = 0; i < PIECES; i++) copy16(to + r * 4 * LINE + i * 128, from + i * 128, 16);
            } else {
#pragma unroll 1
                for (u32 r = lane / 8; r < ask_ranks; r += 4, from += four)
#pragma unroll 1
                    for (u32 i = 0; i < PIECES; i++) {
                        const u32 bytes = bytes_of(stage, i), line = to + (r - lane / 8) * LINE + i * 128;
                        if (bytes) copy16(line, from + i * 128, bytes);
                        else keep16(line, make_uint4(0, 0, 0, 0));
                    }
            }
            a_from += STAGE_LINE;
        };
        auto ask_x = [&](u32 stage, u32 slot) {
            const u32 to = to_lane + slot * SLOT_BYTES + RANKS * LINE;
            if ((stage + 1) * STAGE_COLUMNS <= p.in_features && x_wide) {
#pragma unroll
                for (u32 h = 0; h < 2; h++)
                    if (x_from[h])
#pragma unroll
                        for (u32 i = 0; i < PIECES; i++)
                            copy16(to + h * 4 * LINE + i * 128, x_from[h] + i * 128, 16);
            } else {
#pragma unroll 1
                for (u32 i = 0; i < 2 * PIECES; i++) {
                    const u64 from = i < PIECES ? x_from[0] : x_from[1];
                    const u32 piece = i % PIECES;
                    if (from)
                        keep16(to + i / PIECES * 4 * LINE + piece * 128,
                               some8(reinterpret_cast<const u16*>(from + piece * 128), bytes_of(stage, piece) / 2));
                }
            }
#pragma unroll
            for (u32 h = 0; h < 2; h++) x_from[h] += x_from[h] ? STAGE_LINE : 0;
        };

        // The weights are no one's to write: only x and z wait for the launch before.
        u32 asked = 0;
        if (ask_sources) begin();
        const u32 first_stage = ask_stage;
#pragma unroll 1
        for (; asked < SLOTS && ask_stage < ask_end; asked++) ask_a(ask_stage++, asked);
        if (!waited) wait_for_last();
        waited = true;
#pragma unroll 1
        for (u32 i = 0; i < asked; i++) ask_x(first_stage + i, i);
        ask_slot = asked % SLOTS;
        auto ask = [&]() {
            if (ask_stage == ask_end && ask_sources) begin();
            if (ask_stage < ask_end) {
                ask_a(ask_stage, ask_slot);
                ask_x(ask_stage, ask_slot);
                ask_stage++;
                ask_slot = after<SLOTS>(ask_slot);
            }
        };
#pragma unroll 1
        for (; asked < SLOTS; asked++) ask();
        commit();
        // A stage is in the commit that is SLOTS - 1 before the last one when it is waited for.
#pragma unroll
        for (u32 i = 1; i < SLOTS; i++) commit();

        u32 slot = 0;
        for (; sources; sources &= sources - 1) {
            const u32 from = __ffs(sources) - 1, zero = (source_first + from) * parts;
            u32 part = at > zero ? at - zero : 0;
            const u32 part_end = batch_end - zero < parts ? batch_end - zero : parts;
            const u32 ranks = from_lane(mine.ranks, from);
            const u32* pack = batch + from_lane(mine.pack, from);
            float* const first = z + (part * strides.part + from_lane(mine.z, from) + place_of(g));
            // Where ranks g and g+8 of rows 2q and 2q+1 go; null for no such row.
            float* to[2];
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                const u32 row = pack[2 + 2 * q + h] - p.row_first;
                const bool live = 2 * q + h < pack[1] && row < p.rows;
                to[h] = live ? first + row * strides.row : nullptr;
            }
#pragma unroll 1
            for (; part < part_end; part++) {
                float sum[4][4] = {};
                const u32 left = stages - part * part_stages;
#pragma unroll 1
                for (u32 s = left < part_stages ? left : part_stages; s; s--) {
                    arrived<SLOTS - 1>();
                    const u32 a = a_row + slot * SLOT_BYTES, v = x_row + slot * SLOT_BYTES;
#pragma unroll
                    for (u32 c = 0; c < CHUNKS; c++) {
                        const uint4 low = matrices(a + c * COLUMNS * 2), high = matrices(a + c * COLUMNS * 2 + 32);
                        const uint4 columns = matrices(v + c * COLUMNS * 2);
                        mma(sum[c % 4], low.x, low.y, low.z, low.w, columns.x, columns.y);
                        mma(sum[c % 4], high.x, high.y, high.z, high.w, columns.z, columns.w);
                    }
                    slot = after<SLOTS>(slot);
                    __syncwarp();
                    ask();
                    commit();
                }
#pragma unroll
                for (u32 h = 0; h < 2; h++) {
                    if (!to[h]) continue;
#pragma unroll
                    for (u32 i = 0; i < 2; i++) {
                        const u32 e = 2 * i + h;
                        const float total = __fadd_rn(__fadd_rn(sum[0][e], sum[1][e]), __fadd_rn(sum[2][e], sum[3][e]));
                        if (g + 8 * i < ranks) to[h][2 * i] = total;
                    }
                    to[h] += strides.part;
                }
            }
        }
        at = batch_end;
    }
    if (!waited && blockIdx.x == 0) wait_for_last();
}
