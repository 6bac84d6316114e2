// y[row][n] += scale * sum_r B[slot(row)][n][r] * z[row][r], z the sum of its parts, rounded once: decode in bf16 for sm_90.
//
//   warp   works by itself on a run of neighbouring tiles
//   tile   TILE outputs of a pack of rows at a site; in units of RANKS ranks, whose weights are asked for AHEAD units ahead
//
// z is taken as the sum of three bf16, which it is exactly: the high and the middle parts of 8 rows are the 16-row side of one
// product, the low parts of another, before it. Order of a sum: ranks ascending in groups of RANKS, high and low parts in one
// sum, middle parts in another, added at the end.
#include "copies.cuh"
#include "packs.cuh"

constexpr u32 TILE = 32;
constexpr u32 AHEAD = 6;
// Parts of z that are asked for at once.
constexpr u32 Z_AT_ONCE = 4;
// Bytes that a warp keeps of a group of ranks: a lane's twelve parts, as it multiplies them.
constexpr u32 KEPT = 32 * 32;

// Tiles of a pack and a site.
struct Run {
    u64 b;              // address of the matrix
    u64 b_row;          // bytes from an output to the next
    const float* z;     // this lane's ranks of its row; null: it has none
    u16* y;             // output 8q of tile 0 of its row
    const float* gains; // of the site; null: none
    u64 offsets;        // floats from gains to offsets
    u64 part;           // floats from a part of z to the next
    u32 parts, first, end, rank, out, zero;
    float site_scale, row_scale;
    bool wide;          // y is aligned, and no eighth of a tile ragged
};

// A group of ranks of z as a lane multiplies it: its four ranks' high, middle and low parts.
struct Ranks {
    u32 high[2], middle[2], low[2];
};
DEVICE Ranks ranks_of(const Run& run, u32 group) {
    float4 f = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (run.z) {
        const float* from = run.z + group * RANKS;
        float4 part[Z_AT_ONCE];
#pragma unroll 1
        for (u32 first = 0; first < run.parts; first += Z_AT_ONCE) {
#pragma unroll
            for (u32 i = 0; i < Z_AT_ONCE; i++)
                if (first + i < run.parts) part[i] = shared_cache(from + (first + i) * run.part);
#pragma unroll
            for (u32 i = 0; i < Z_AT_ONCE; i++)
                if (first + i < run.parts) {
                    f.x = __fadd_rn(f.x, part[i].x);
                    f.y = __fadd_rn(f.y, part[i].y);
                    f.z = __fadd_rn(f.z, part[i].z);
                    f.w = __fadd_rn(f.w, part[i].w);
                }
        }
    }
    Ranks r;
    r.high[0] = take_high(f.x, f.y), r.high[1] = take_high(f.z, f.w);
    r.middle[0] = take_high(f.x, f.y), r.middle[1] = take_high(f.z, f.w);
    r.low[0] = take_high(f.x, f.y), r.low[1] = take_high(f.z, f.w);
    return r;
}
DEVICE void keep(u32 to, const Ranks& r) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r.high[0]), "r"(r.middle[0]), "r"(r.high[1]),
                 "r"(r.middle[1])
                 : "memory");
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%2};" ::"r"(to + KEPT / 2), "r"(r.low[0]), "r"(0), "r"(r.low[1]) : "memory");
}
// The same as the two products' operands: high and middle parts, low ones.
struct Sides {
    uint4 upper, lower;
};
// `zero`: of which the compiler doesn't know that it is; it would build the operand anew for each product.
DEVICE Sides sides_of(const Ranks& r, u32 zero) {
    return {make_uint4(r.high[0], r.middle[0], r.high[1], r.middle[1]), make_uint4(r.low[0], zero, r.low[1], zero)};
}

// Adds a unit's products to the sums: of outputs 8q + 2j and the next, high and low parts in [j][0] and [j][1], middle ones in
// [j][2] and [j][3].
DEVICE void multiply(float (&sum)[4][4], const Sides& z, const uint2 (&w)[4]) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) mma(sum[j], z.lower.x, z.lower.y, z.lower.z, z.lower.w, w[j].x, w[j].y);
#pragma unroll
    for (u32 j = 0; j < 4; j++) mma(sum[j], z.upper.x, z.upper.y, z.upper.z, z.upper.w, w[j].x, w[j].y);
}

DEVICE uint4 plain8(const uint4& y, float scale, const float (&sum)[4][4]) {
    const u32 word[4] = {y.x, y.y, y.z, y.w};
    u32 done[4];
#pragma unroll
    for (u32 j = 0; j < 4; j++)
        done[j] = add2(word[j], scale, __fadd_rn(sum[j][0], sum[j][2]), __fadd_rn(sum[j][1], sum[j][3]));
    return make_uint4(done[0], done[1], done[2], done[3]);
}

// The same with gains and offsets, of outputs from `n` on, `left` of them.
DEVICE uint4 shaped8(const Run& run, u32 n, u32 left, const uint4& y, const float (&sum)[4][4]) {
    u32 word[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (u32 j = 0; j < 4; j++)
        if (2 * j < left) {
            // Pairs begin at even outputs, and vectors are padded past odd ends.
            const float* from = run.gains + n + 2 * j;
            word[j] = shape2(word[j], run.site_scale, run.row_scale, __fadd_rn(sum[j][0], sum[j][2]),
                             __fadd_rn(sum[j][1], sum[j][3]), *reinterpret_cast<const float2*>(from),
                             *reinterpret_cast<const float2*>(from + run.offsets));
        }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

DEVICE uint2 shared8(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
// What this lane has kept of a group.
DEVICE Sides kept(u32 from) { return {read16(from), read16(from + KEPT / 2)}; }

// A warp's ring: units of B, and y of tiles.
constexpr u32 UNIT_BYTES = TILE * RANKS * 2;
constexpr u32 Y_BYTES = PACK_ROWS * TILE * 2;
constexpr u32 RING_BYTES = AHEAD * (UNIT_BYTES + Y_BYTES);

// Whole tiles, aligned rows: nearly all runs. ONE: group of ranks. VECTORS: there are gains and offsets. Unless
// `waited`, waits before it reads z and y. `ring`: this warp's; `z_kept`: where this lane keeps z.
template <bool ONE, bool VECTORS> DEVICE void even_run(const Run& run, u32 ring, u32 z_kept, bool waited) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 groups = ONE ? 1 : div_ceil(run.rank, RANKS);
    const bool live = run.z != nullptr;
    u32 left = (run.end - run.first) * groups;
    // B as it is asked for: this lane copies half l % 2 of output l / 2 and of the 16th after it. In every other eight outputs
    // the halves of 128 bytes are changed over, so that what is read at once lies in different banks.
    u64 ask = run.b + (run.first * TILE + lane / 2) * run.b_row + lane % 2 * 16;
    const u64 sixteen = 16 * run.b_row;
    const u32 to = ring + ((lane * 16) ^ (lane / 16 * 64)), y_at = ring + AHEAD * UNIT_BYTES + lane * 16;
    u32 ask_group = 0;
    // Of the ranks that there are in the last group.
    const u32 there = 2 * saturating(run.rank, (groups - 1) * RANKS + lane % 2 * 8), rest = there < 16 ? there : 16;
    auto ask_b = [&](u32 i) {
        const u32 bytes = ONE || ask_group + 1 == groups ? rest : 16;
        // What isn't read may lie past the matrix: name what does not.
        const u64 from = bytes ? ask : ask - 16;
        copy16(to + i * UNIT_BYTES, reinterpret_cast<const void*>(from), bytes);
        copy16(to + i * UNIT_BYTES + UNIT_BYTES / 2, reinterpret_cast<const void*>(from + sixteen), bytes);
        ask += ONE ? 2 * sixteen : 2 * RANKS;
        if (!ONE && ++ask_group == groups) {
            ask += 2 * sixteen - groups * (2 * RANKS);
            ask_group = 0;
        }
    };
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        if (i < left) ask_b(i);
    end_group();
    if (!waited) wait_for_last();
    // y of the next tiles: of as many as there can be in the ring.
    u16* y = run.y + run.first * TILE;
    u32 y_left = run.end - run.first, y_place = 0;
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) {
        copy16_if(live && i < y_left, y_at + i * Y_BYTES, y + i * TILE);
        end_group();
    }
    Sides z;
    if (ONE) {
        z = sides_of(ranks_of(run, 0), run.zero);
    } else {
#pragma unroll 2
        for (u32 c = 0; c < groups; c++) keep(z_kept + c * KEPT, ranks_of(run, c));
    }
    const u32 odd = g / 2 % 2 * 64, at = ring + g / 2 * 256 + g % 2 * 32 + q * 8;
    const float scale = __fmul_rn(run.site_scale, run.row_scale);
    u32 group = 0, vectors = run.first * TILE + q * 8;
    float sum[4][4];
    clear(sum);
#pragma unroll 1
    for (;;) {
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            wait_groups<AHEAD - 1>();
            __syncwarp();
            const u32 from = at + i * UNIT_BYTES;
            const uint2 w[4] = {shared8(from + odd), shared8(from + 64 - odd), shared8(from + 128 + odd),
                                shared8(from + 192 - odd)};
            if (!ONE) z = kept(z_kept + group * KEPT);
            if (ONE) clear(sum);
            multiply(sum, z, w);
            // All lanes have read the unit.
            if (left > AHEAD) ask_b(i);
            if (ONE || ++group == groups) {
                const u32 place = y_at + (ONE ? i : y_place) * Y_BYTES;
                const uint4 before = read16(place);
                uint4 after;
                if (VECTORS) after = shaped8(run, vectors, TILE, before, sum);
                else after = plain8(before, scale, sum);
                store16_if(live, y, after);
                if (VECTORS) vectors += TILE;
                copy16_if(live && y_left > AHEAD, place, y + AHEAD * TILE);
                y += TILE;
                y_left--;
                if (!ONE) {
                    y_place = y_place + 1 == AHEAD ? 0 : y_place + 1;
                    clear(sum);
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
#pragma unroll 1
    for (u32 c = 0; c < groups; c++) keep(z_kept + c * KEPT, ranks_of(run, c));
#pragma unroll 1
    for (u32 tile = run.first; tile < run.end; tile++) {
        const u32 n = tile * TILE + q * 8, left = run.z ? saturating(run.out, n) : 0;
        u16* y = run.y + tile * TILE;
        uint4 before = make_uint4(0, 0, 0, 0);
        if (left) before = run.wide ? shared_cache(y) : some8(y, left);
        float sum[4][4];
        clear(sum);
#pragma unroll 1
        for (u32 c = 0; c < groups; c++) {
            const u32 count = saturating(run.rank, c * RANKS + q * 4);
            uint2 w[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 o = tile * TILE + g / 2 * 8 + g % 2 + j * 2;
                const u16* e = reinterpret_cast<const u16*>(run.b + o * run.b_row) + c * RANKS + q * 4;
                w[j] = make_uint2(0, 0);
                if (o >= run.out || count == 0) continue;
                w[j].x = e[0] | (count > 1 ? (u32)e[1] << 16 : 0);
                if (count > 2) w[j].y = e[2] | (count > 3 ? (u32)e[3] << 16 : 0);
            }
            multiply(sum, kept(z_kept + c * KEPT), w);
        }
        if (left == 0) continue;
        const uint4 done = run.gains ? shaped8(run, n, left, before, sum)
                                     : plain8(before, __fmul_rn(run.site_scale, run.row_scale), sum);
        if (run.wide) *reinterpret_cast<uint4*>(y) = done;
        else keep_some8(y, left, done);
    }
}

// What a pack and a site's tiles have in common, in the lane that looked them up.
struct Found {
    u64 b, gains;       // addresses; gains 0: none
    u32 rank;           // 0: nothing to do
    float scale;
    u32 first, end;     // tiles of the site that are this warp's
};

// The warp's runs that are even and without vectors, or those that aren't: apart, so that the latter cost the former no
// registers. Whether there are any of the other kind.
template <bool PLAIN>
DEVICE bool runs(const Params& p, const u32* batch, const u32* tables, const unsigned char* weights, const float* z, u16* y0,
                 u16* y1, u16* y2, u16* y3, const Share& share, u32 each, u32 ring, u32 z_kept, bool& waited) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const ZStrides strides = z_strides(p);
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
            run.wide = is_wide(y, site.y_stride) && run.out % 8 == 0;
            const bool even = run.wide && run.end * TILE <= run.out;
            if ((even && !run.gains) != PLAIN) {
                others = true;
                continue;
            }
            const u32 row = row_of(p, batch, pack, g);
            run.b_row = 2 * (u64)p.b_stride;
            run.b = from_lane(mine.b, from);
            run.offsets = vector_len(site);
            run.zero = p.max_rank >> 16;
            run.parts = parts_of(p.in_features), run.part = strides.part;
            run.z = row == NO_ROW ? nullptr : z + ((u64)row * strides.row + s * strides.site + q * 4);
            run.y = y + (u64)(row == NO_ROW ? 0 : row) * site.y_stride + q * 8;
            run.site_scale = from_lane(mine.scale, from);
            run.row_scale = row == NO_ROW ? 0.0f : row_scale(p, batch, row);
            if (!PLAIN && even) even_run<false, true>(run, ring, z_kept, waited);
            else if (!PLAIN) odd_run(run, z_kept, waited);
            else if (run.rank <= RANKS) even_run<true, false>(run, ring, z_kept, waited);
            else even_run<false, false>(run, ring, z_kept, waited);
            waited = true;
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
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 each = 0;
#pragma unroll
    for (u32 s = 0; s < MAX_SITES; s++) each += s < p.sites ? div_ceil(p.site[s].out_features, TILE) : 0;
    // The first warps of all blocks come first.
    const Share share = share_of(live_packs(p, batch) * each, warp * gridDim.x + blockIdx.x, gridDim.x * (blockDim.x / 32));
    bool waited = false;
    if (share.first < share.end) {
        const u32 ring = shared_address(memory) + warp * (RING_BYTES + div_ceil(p.max_rank, RANKS) * KEPT);
        const u32 z_kept = ring + RING_BYTES + lane * 16;
        if (runs<true>(p, batch, tables, weights, z, y0, y1, y2, y3, share, each, ring, z_kept, waited))
            runs<false>(p, batch, tables, weights, z, y0, y1, y2, y3, share, each, ring, z_kept, waited);
    }
    // One thread that waits is enough for the end of this launch to be the end of all before it.
    if (!waited && warp == 0 && blockIdx.x == 0) wait_for_last();
}
