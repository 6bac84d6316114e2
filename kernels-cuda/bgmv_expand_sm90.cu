// y[row][n] += scale * sum_r B[slot(row)][n][r] * z[row][r], z the sum of its parts, rounded once: decode in bf16 for sm_90.
//
//   warp   works by itself on a run of neighbouring tiles
//   tile   TILE outputs of a pack of rows at a site; in units of RANKS ranks, whose weights are asked for AHEAD units ahead
//
// B is the 16-row side of the product, z the 8-column side. z is taken as the sum of three bf16, which it is exactly: two
// columns for each row of a pack of up to 4, low and then high parts in one and middle parts in the other; in a larger pack
// a column for each row, and the middle parts have a product of their own. Order of a sum: ranks ascending in groups of
// RANKS, of each the low parts before the high ones in one sum, the middle parts in another, added at the end.
#include "copies.cuh"
#include "packs.cuh"

constexpr u32 TILE = 64;
constexpr u32 AHEAD = 3;
// Bytes of a row of B that a group of ranks fills.
constexpr u32 DENSE = 2 * RANKS;
// Bytes that a warp keeps of a group of ranks: a lane's six words, as it multiplies them.
constexpr u32 KEPT = 32 * 24;

// Tiles of a pack and a site.
struct Run {
    u64 b;              // address of the matrix
    u64 b_row;          // bytes from an output to the next
    const float* z;     // of its column's row, this lane's ranks: 2q, 2q + 1, 2q + 8 and 2q + 9; null: there is none
    u16* y[2];          // output 8g of tile 0 of this lane's rows; null: no such row
    const float* gains; // of the site; null: none
    u64 offsets;        // floats from gains to offsets
    u64 part;           // floats from a part of z to the next
    u32 parts, first, end, rank, out;
    float site_scale, row_scale[2];
    bool wide;          // y is aligned, and no eighth of a tile ragged
};

// This lane's ranks of COUNT groups from `group` on: z's parts, added up in order, AT_ONCE of them asked for at once. Groups from
// `groups` on are zero.
template <u32 COUNT, u32 AT_ONCE> DEVICE void add_up(const Run& run, u32 group, u32 groups, float4 (&z)[COUNT]) {
#pragma unroll
    for (u32 c = 0; c < COUNT; c++) z[c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (u32 first = 0; first < run.parts; first += AT_ONCE) {
        float4 part[COUNT][AT_ONCE];
#pragma unroll
        for (u32 c = 0; c < COUNT; c++)
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++)
                part[c][i] = shared_cache_if(run.z && first + i < run.parts && group + c < groups,
                                             run.z + ((group + c) * RANKS + (first + i) * run.part));
#pragma unroll
        for (u32 c = 0; c < COUNT; c++)
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                z[c].x = __fadd_rn(z[c].x, part[c][i].x);
                z[c].y = __fadd_rn(z[c].y, part[c][i].y);
                z[c].z = __fadd_rn(z[c].z, part[c][i].z);
                z[c].w = __fadd_rn(z[c].w, part[c][i].w);
            }
    }
}

// A group of ranks of z as a lane multiplies it. Of one row a lane, `upper` is the high or the middle parts, by its column,
// and `lower` the low ones or none; of two, they are the high and the low ones.
struct Sides {
    u32 upper[2], lower[2], middle[2];
};
template <u32 ROWS> DEVICE Sides sides_of(float4 z) {
    const u32 high[2] = {take_high(z.x, z.y), take_high(z.z, z.w)};
    const u32 middle[2] = {take_high(z.x, z.y), take_high(z.z, z.w)};
    const u32 low[2] = {take_high(z.x, z.y), take_high(z.z, z.w)};
    const bool second = ROWS == 1 && threadIdx.x / 4 % 2;
    Sides sides;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        sides.upper[i] = second ? middle[i] : high[i];
        sides.lower[i] = second ? 0 : low[i];
        sides.middle[i] = middle[i];
    }
    return sides;
}
// What this lane keeps of a group, where the warp's begins.
template <u32 ROWS> DEVICE void keep(u32 at, const Sides& z) {
    const u32 lane = threadIdx.x % 32;
    write16(at + lane * 16, make_uint4(z.upper[0], z.upper[1], z.lower[0], z.lower[1]));
    if (ROWS == 2) write8(at + 512 + lane * 8, make_uint2(z.middle[0], z.middle[1]));
}
template <u32 ROWS> DEVICE Sides kept(u32 at) {
    const u32 lane = threadIdx.x % 32;
    const uint4 v = read16(at + lane * 16);
    const uint2 m = ROWS == 2 ? read8(at + 512 + lane * 8) : make_uint2(0, 0);
    return {{v.x, v.y}, {v.z, v.w}, {m.x, m.y}};
}
// Keeps all groups.
template <u32 ROWS> DEVICE void keep_all(const Run& run, u32 at) {
    constexpr u32 COUNT = 4;
    const u32 groups = div_ceil(run.rank, RANKS);
#pragma unroll 1
    for (u32 first = 0; first < groups; first += COUNT) {
        float4 z[COUNT];
        add_up<COUNT, 4>(run, first, groups, z);
#pragma unroll
        for (u32 c = 0; c < COUNT; c++)
            if (first + c < groups) keep<ROWS>(at + (first + c) * KEPT, sides_of<ROWS>(z[c]));
    }
}

// Sums of outputs 8g + 2m and the next in [m]: of one row a lane, high and low parts in [0] and [2], middle ones in [1] and
// [3]; of two, high and low parts in [0][m], middle ones in [1][m], of the first row in [0] and [2].
template <u32 ROWS> struct Sums {
    float of[ROWS][4][4];

    // Adds a unit's products; w[m]: this lane's share of outputs 8g + 2m and 8g + 2m + 1, as the product takes it. FRESH: to nothing.
    template <bool FRESH> __device__ __forceinline__ void add(const Sides& z, const u32 (&w)[4][4]) {
#pragma unroll
        for (u32 m = 0; m < 4; m++) product<FRESH>(of[0][m], w[m], z.lower);
        if (ROWS == 2)
#pragma unroll
            for (u32 m = 0; m < 4; m++) product<FRESH>(of[ROWS - 1][m], w[m], z.middle);
#pragma unroll
        for (u32 m = 0; m < 4; m++) product<false>(of[0][m], w[m], z.upper);
    }
    template <bool FRESH> DEVICE void product(float (&sum)[4], const u32 (&w)[4], const u32 (&z)[2]) {
        if (FRESH) first_mma(sum, w[0], w[1], w[2], w[3], z[0], z[1]);
        else mma(sum, w[0], w[1], w[2], w[3], z[0], z[1]);
    }
    // Of row `i`, output 8g + n.
    __device__ __forceinline__ float total(u32 i, u32 n) const {
        const u32 m = n / 2, odd = n % 2 * 2;
        return ROWS == 1 ? __fadd_rn(of[0][m][odd], of[0][m][odd + 1]) : __fadd_rn(of[0][m][odd + i], of[ROWS - 1][m][odd + i]);
    }
};

// Eight outputs of a lane's row `i`.
template <u32 ROWS> DEVICE uint4 plain8(const Run& run, u32 i, const uint4& y, const Sums<ROWS>& sums) {
    const u32 word[4] = {y.x, y.y, y.z, y.w};
    const float scale = __fmul_rn(run.site_scale, run.row_scale[i]);
    u32 done[4];
#pragma unroll
    for (u32 m = 0; m < 4; m++) done[m] = add2(word[m], scale, sums.total(i, 2 * m), sums.total(i, 2 * m + 1));
    return make_uint4(done[0], done[1], done[2], done[3]);
}
// The same with gains and offsets, of outputs from `n` on, `left` of them.
template <u32 ROWS> DEVICE uint4 shaped8(const Run& run, u32 i, u32 n, u32 left, const uint4& y, const Sums<ROWS>& sums) {
    u32 word[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (u32 m = 0; m < 4; m++)
        if (2 * m < left) {
            // Pairs begin at even outputs, and vectors are padded past odd ends.
            const float* from = run.gains + n + 2 * m;
            word[m] = shape2(word[m], run.site_scale, run.row_scale[i], sums.total(i, 2 * m), sums.total(i, 2 * m + 1),
                             *reinterpret_cast<const float2*>(from), *reinterpret_cast<const float2*>(from + run.offsets));
        }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

// A warp's ring: units of B, and y of tiles.
constexpr u32 UNIT_BYTES = TILE * RANKS * 2;
constexpr u32 Y_BYTES = 32 * 16;
constexpr u32 RING_BYTES = AHEAD * (UNIT_BYTES + 2 * Y_BYTES);

// Whole tiles, aligned rows: nearly all runs. ROWS: of a lane. ONE: the only group of ranks fills the rows of B. VECTORS: there
// are gains and offsets. Unless `waited`, waits before it reads z and y. `ring`: this warp's; `z_kept`: where it keeps z.
template <u32 ROWS, bool ONE, bool VECTORS> DEVICE void even_run(const Run& run, u32 ring, u32 z_kept, bool waited) {
    const u32 lane = threadIdx.x % 32, g = lane / 4;
    const u32 groups = ONE ? 1 : div_ceil(run.rank, RANKS);
    const u64 b_row = ONE ? DENSE : run.b_row;
    u32 left = (run.end - run.first) * groups;
    // B as it is asked for: this lane copies half l % 2 of output l / 2 and of the 16th, 32nd and 48th after it. Half h of output
    // o of a unit lies in piece (o % 4 * 2 + h) ^ (o / 8) of the o/4-th 128 bytes: those of a line stay together, which copies take
    // in one go, and what is read at once lies in different banks.
    u64 ask = run.b + (run.first * TILE + lane / 2) * b_row + lane % 2 * 16;
    u32 to[4];
#pragma unroll
    for (u32 n = 0; n < 4; n++) to[n] = ring + n * 512 + lane / 8 * 128 + (lane % 8 ^ (n * 2 + lane / 16)) * 16;
    const u32 y_at = ring + AHEAD * UNIT_BYTES + lane * 16;
    u32 ask_group = 0;
    // Of the ranks that there are in the last group.
    const u32 there = 2 * saturating(run.rank, (groups - 1) * RANKS + lane % 2 * 8), rest = there < 16 ? there : 16;
    auto ask_b = [&](u32 i) {
        const u32 bytes = ONE || ask_group + 1 != groups ? 16 : rest;
        // What isn't read may lie past the matrix: name what does not.
        const u64 from = ONE || bytes ? ask : ask - 16;
#pragma unroll
        for (u32 n = 0; n < 4; n++) copy16(to[n] + i * UNIT_BYTES, reinterpret_cast<const void*>(from + n * (16 * b_row)), bytes);
        ask += ONE ? TILE * DENSE : DENSE;
        if (!ONE && ++ask_group == groups) {
            ask += TILE * b_row - groups * DENSE;
            ask_group = 0;
        }
    };
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        if (i < left) ask_b(i);
    end_group();
    if (!waited) wait_for_last();
    // y of the next tiles: of as many as there can be in the ring.
    u16* y[ROWS];
    bool live[ROWS];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) live[r] = run.y[r] != nullptr, y[r] = run.y[r] + run.first * TILE;
    u32 y_left = run.end - run.first, y_place = 0;
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) {
#pragma unroll
        for (u32 r = 0; r < ROWS; r++)
            copy16_if(live[r] && i < y_left, y_at + (i * ROWS + r) * Y_BYTES, y[r] + i * TILE);
        end_group();
    }
    Sides z;
    if (ONE) {
        float4 sum[1];
        add_up<1, Z_PARTS>(run, 0, 1, sum);
        z = sides_of<ROWS>(sum[0]);
    } else {
        keep_all<ROWS>(run, z_kept);
    }
    // Where this lane points, of eight outputs from 8 (l % 8) on: to half l / 16 of the first two or the third and fourth.
    u32 read[2];
#pragma unroll
    for (u32 m = 0; m < 2; m++) read[m] = ring + lane % 8 * 256 + ((m * 4 + lane / 8 % 2 * 2 + lane / 16) ^ lane % 8) * 16;
    u32 group = 0, vectors = run.first * TILE + g * 8;
    Sums<ROWS> sums = {};
#pragma unroll 1
    for (;;) {
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            wait_groups<AHEAD - 1>();
            __syncwarp();
            u32 w[4][4];
#pragma unroll
            for (u32 m = 0; m < 4; m++) load_matrices(read[m % 2] + i * UNIT_BYTES + m / 2 * 128, w[m]);
            if (!ONE) z = kept<ROWS>(z_kept + group * KEPT);
            sums.template add<ONE>(z, w);
            // All lanes have read the unit.
            if (left > AHEAD) ask_b(i);
            if (ONE || ++group == groups) {
                const u32 place = y_at + (ONE ? i : y_place) * (ROWS * Y_BYTES);
#pragma unroll
                for (u32 r = 0; r < ROWS; r++) {
                    const uint4 before = read16(place + r * Y_BYTES);
                    const uint4 after = VECTORS ? shaped8(run, r, vectors, 8, before, sums) : plain8(run, r, before, sums);
                    store16_if(live[r], y[r], after);
                    copy16_if(live[r] && y_left > AHEAD, place + r * Y_BYTES, y[r] + AHEAD * TILE);
                    y[r] += TILE;
                }
                if (VECTORS) vectors += TILE;
                y_left--;
                if (!ONE) {
                    y_place = y_place + 1 == AHEAD ? 0 : y_place + 1;
                    sums = {};
                }
                group = 0;
            }
            end_group();
            if (--left == 0) return;
        }
    }
}

// A run of any kind: ragged outputs, rows of y at odd places, vectors. Its weights go straight to registers.
DEVICE void odd_run(const Run& run, u32 z_kept, bool waited) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 groups = div_ceil(run.rank, RANKS);
    if (!waited) wait_for_last();
    keep_all<2>(run, z_kept);
#pragma unroll 1
    for (u32 tile = run.first; tile < run.end; tile++) {
        const u32 n = tile * TILE + g * 8, left = saturating(run.out, n);
        Sums<2> sums = {};
#pragma unroll 1
        for (u32 c = 0; c < groups; c++) {
            u32 w[4][4];
#pragma unroll
            for (u32 i = 0; i < 16; i++) {
                const u32 t = i / 4 * 2 + i % 2, rank = c * RANKS + i / 2 % 2 * 8 + q * 2;
                const u16* e = reinterpret_cast<const u16*>(run.b + (n + t) * run.b_row) + rank;
                w[i / 4][i % 4] = 0;
                if (t < left && rank < run.rank) w[i / 4][i % 4] = e[0] | (rank + 1 < run.rank ? (u32)e[1] << 16 : 0);
            }
            sums.add<false>(kept<2>(z_kept + c * KEPT), w);
        }
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            if (!run.y[r] || left == 0) continue;
            u16* const y = run.y[r] + tile * TILE;
            const uint4 before = run.wide ? shared_cache(y) : some8(y, left);
            const uint4 done = run.gains ? shaped8(run, r, n, left, before, sums) : plain8(run, r, before, sums);
            if (run.wide) *reinterpret_cast<uint4*>(y) = done;
            else keep_some8(y, left, done);
        }
    }
}

// Tells a run what this lane has of it, and works it off: ROWS a lane. PLAIN: its whole tiles, without vectors; else what is left.
template <u32 ROWS, bool PLAIN>
DEVICE void work(const Params& p, const u32* batch, const float* z, u32 pack, u32 s, u16* y, Run& run, u32 whole, u32 ring,
                 u32 z_kept, bool& waited) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const SiteParams& site = p.site[s];
    const ZStrides strides = z_strides(p);
    const u32 column = row_of(p, batch, pack, ROWS == 1 ? g / 2 : g);
    run.z = column == NO_ROW ? nullptr : z + ((u64)column * strides.row + s * strides.site + q * 4);
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        const u32 row = row_of(p, batch, pack, q * ROWS + r);
        run.y[r] = row == NO_ROW ? nullptr : y + ((u64)row * site.y_stride + g * 8);
        run.row_scale[r] = row == NO_ROW ? 0.0f : row_scale(p, batch, row);
    }
    if (PLAIN) {
        if (run.rank == RANKS && run.b_row == DENSE) even_run<ROWS, true, false>(run, ring, z_kept, waited);
        else even_run<ROWS, false, false>(run, ring, z_kept, waited);
        waited = true;
        return;
    }
    const u32 end = run.end;
    if (run.gains && run.first < whole) {
        run.end = end < whole ? end : whole;
        even_run<ROWS, false, true>(run, ring, z_kept, waited);
        waited = true;
        run.end = end;
    }
    if (run.first < whole) run.first = whole;
    if (run.first < end) {
        odd_run(run, z_kept, waited);
        waited = true;
    }
}

// What a pack and a site's tiles have in common, in the lane that looked them up.
struct Found {
    u64 b, gains;       // addresses; gains 0: none
    u32 rank;           // 0: nothing to do
    float scale;
    u32 first, end;     // tiles of the site that are this warp's
};

// Whole tiles of the warp's runs without vectors, or all that is left: apart, so that the latter costs the former no registers.
// Whether there is any of the other kind.
template <bool PLAIN>
DEVICE bool runs(const Params& p, const u32* batch, const u32* tables, const unsigned char* weights, const float* z, u16* y0,
                 u16* y1, u16* y2, u16* y3, const Share& share, u32 each, u32 ring, u32 z_kept, bool& waited) {
    const u32 lane = threadIdx.x % 32;
    const u32 sources = div_ceil(share.end, each) * p.sites;
    bool others = false;
#pragma unroll 1
    for (u32 base = share.first / each * p.sites; base < sources; base += 32) {
        // Lane l looks up site (base + l) % sites of a pack.
        Found mine = {0, 0, 0, 0.0f, 0, 0};
        const u32 own = base + lane;
        if (own < sources) {
            const u32 pack = own / p.sites, s = own % p.sites;
            const int slot = slot_of(p, batch, pack);
            u32 tile = pack * each;
#pragma unroll
            for (u32 i = 0; i < MAX_SITES - 1; i++)
                if (i < s) tile += div_ceil(p.site[i].out_features, TILE);
            const u32 count = div_ceil(p.site[s].out_features, TILE);
            mine.first = saturating(share.first, tile);
            mine.end = saturating(share.end, tile) < count ? saturating(share.end, tile) : count;
            if (mine.first < mine.end) {
                const Pair pair = expand_pair_of<u16>(p, p.site[s], tables, slot);
                mine.rank = pair.rank;
                mine.scale = pair.scale;
                mine.b = (u64)weights + pair.offset;
                mine.gains = pair.vectors ? (u64)weights + pair.vectors : 0;
            }
        }
#pragma unroll 1
        for (u32 live = __ballot_sync(~0u, mine.rank != 0); live; live &= live - 1) {
            const u32 from = __ffs(live) - 1, pack = (base + from) / p.sites, s = (base + from) % p.sites;
            const SiteParams& site = p.site[s];
            Run run;
            run.first = from_lane(mine.first, from), run.end = from_lane(mine.end, from);
            run.rank = from_lane(mine.rank, from), run.out = site.out_features;
            run.gains = reinterpret_cast<const float*>(from_lane(mine.gains, from));
            u16* y = reinterpret_cast<u16*>(y_of(site.y_operand, y0, y1, y2, y3)) + site.y_offset;
            const bool aligned = is_wide(y, site.y_stride);
            run.wide = aligned && run.out % 8 == 0;
            // Tiles of the site that are whole.
            const u32 whole = aligned ? run.out / TILE : 0;
            run.b_row = 2 * (u64)p.b_stride;
            run.b = from_lane(mine.b, from);
            run.offsets = vector_len(site);
            run.parts = parts_of(p.in_features), run.part = z_strides(p).part;
            run.site_scale = from_lane(mine.scale, from);
            if (PLAIN) {
                others |= run.gains || run.end > whole;
                if (run.gains || run.first >= whole) continue;
                if (run.end > whole) run.end = whole;
                if (rows_of(p, batch, pack) <= PACK_ROWS / 2)
                    work<1, true>(p, batch, z, pack, s, y, run, whole, ring, z_kept, waited);
                else work<2, true>(p, batch, z, pack, s, y, run, whole, ring, z_kept, waited);
            } else if (run.gains || run.end > whole) {
                work<2, false>(p, batch, z, pack, s, y, run, whole, ring, z_kept, waited);
            }
        }
    }
    return others;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 2)
    lorapool_bgmv_expand_bf16_bf16(const u32* __restrict__ batch, const u32* __restrict__ tables,
                                   const unsigned char* __restrict__ weights, const float* z, u16* y0, u16* y1, u16* y2,
                                   u16* y3, const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    launch_next();
    const u32 warp = threadIdx.x / 32;
    u32 each = 0;
#pragma unroll
    for (u32 s = 0; s < MAX_SITES; s++) each += s < p.sites ? div_ceil(p.site[s].out_features, TILE) : 0;
    // The first warps of all blocks come first.
    const Share share = share_of(live_packs(p, batch) * each, warp * gridDim.x + blockIdx.x, gridDim.x * (blockDim.x / 32));
    bool waited = false;
    if (share.first < share.end) {
        const u32 ring = shared_address(memory) + warp * (RING_BYTES + div_ceil(p.max_rank, RANKS) * KEPT);
        const u32 z_kept = ring + RING_BYTES;
        if (runs<true>(p, batch, tables, weights, z, y0, y1, y2, y3, share, each, ring, z_kept, waited))
            runs<false>(p, batch, tables, weights, z, y0, y1, y2, y3, share, each, ring, z_kept, waited);
    }
    // One thread that waits is enough for the end of this launch to be the end of all before it.
    if (!waited && warp == 0 && blockIdx.x == 0) wait_for_last();
}
