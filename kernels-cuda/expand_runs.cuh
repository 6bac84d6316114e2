// How the decode expand for sm_90 works a run of tiles off: in whole rows of B, in groups of ranks, or as it comes.
#pragma once
#include "expand_sums.cuh"

// A warp's ring: places for units of B, and as many for y of tiles.
constexpr u32 AHEAD = 4;
constexpr u32 UNIT = 2048;
constexpr u32 Y_BYTES = 32 * 16;
constexpr u32 RING = AHEAD * (UNIT + 2 * Y_BYTES);

// y of a run's tiles, on its way from and to memory: of as many ahead as there are PLACES, all asked for in AHEAD groups of
// copies.
template <u32 ROWS, u32 PLACES> struct Stream {
    u16* y[ROWS];   // of the next tile
    bool is[ROWS];
    u32 left;       // tiles
    u32 at;         // this lane's part of the first place

    __device__ __forceinline__ void start(const Own<ROWS>& own, const Run& run, u32 places) {
        left = run.end - run.first, at = places + threadIdx.x % 32 * 16;
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) is[r] = own.y[r] != nullptr, y[r] = own.y[r] + run.first * TILE;
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
#pragma unroll
            for (u32 r = 0; r < ROWS; r++)
                copy16_if(is[r] && i < PLACES && i < left, at + (i * ROWS + r) * Y_BYTES, y[r] + i * TILE);
            end_group();
        }
    }
    // Takes row `r` of a tile from a place, hands it to `change`, writes it, and asks for what comes there next.
    template <class F> __device__ __forceinline__ void pass(u32 r, u32 place, F change) {
        const u32 here = at + (place * ROWS + r) * Y_BYTES;
        const uint4 after = change(read16(here));
        store16_if(is[r], y[r], after);
        copy16_if(is[r] && left > PLACES, here, y[r] + PLACES * TILE);
        y[r] += TILE;
    }
};

// Where this lane's part of the `n`-th 512 bytes of a unit goes, which is of eight outputs from 8 * `eight` on.
DEVICE u32 place_of_copy(u32 ring, u32 n, u32 eight) {
    const u32 lane = threadIdx.x % 32;
    return ring + n * 512 + lane / 8 * 128 + (lane % 8 ^ eight) * 16;
}

// Whole tiles, aligned rows, RANK ranks that fill the rows of B: nearly all runs. ROWS: of a lane. Unless `waited`, waits
// before it reads z and y. `ring`: this warp's.
//
// B of a tile is neighbours. A unit is, of each eight outputs, 256 bytes (all 128 of 8 ranks): that of outputs 8g.. lies in
// the g-th part of its place, in pieces of 16 bytes, of which those of 128 bytes change places by g: lines stay together,
// which copies take in one go, and what is read at once lies in different banks.
template <class E, u32 ROWS, u32 RANK>
DEVICE void dense_run(const Params& p, const u32* batch, const float* z, const Run& run, u32 ring, bool waited) {
    constexpr bool EIGHT = RANK == 8;
    // Groups of ranks, products of a unit for each, copies of a unit.
    constexpr u32 GROUPS = EIGHT ? 1 : RANK / RANKS, PRODUCTS = 4 / GROUPS, COPIES = EIGHT ? 2 : 4;
    static_assert(AHEAD % GROUPS == 0, "a turn of the loop is whole tiles");
    const u32 lane = threadIdx.x % 32;
    u32 left = (run.end - run.first) * GROUPS;
    u64 ask = run.b + ((u64)run.first * (TILE * RANK * 2) + lane / 16 * (256 * GROUPS) + lane % 16 * 16);
    u32 to[COPIES];
#pragma unroll
    for (u32 n = 0; n < COPIES; n++) {
        const u32 eight = EIGHT ? n * 4 + lane / 8 : n * 2 + lane / 16;
        to[n] = place_of_copy(ring, n, eight);
    }
    // The unit that is the tile's i-th, to a place.
    auto ask_b = [&](u32 i, u32 place) {
#pragma unroll
        for (u32 n = 0; n < COPIES; n++)
            copy16(to[n] + place * UNIT, reinterpret_cast<const void*>(ask + (n * 512 * GROUPS + i * 256)), 16);
        if (i + 1 == GROUPS) ask += TILE * RANK * 2;
    };
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        if (i < left) ask_b(i % GROUPS, i);
    end_group();
    const Own<ROWS> own = own_of<ROWS>(p, batch, z, run);
    if (!waited) wait_for_last();
    Stream<ROWS, AHEAD / GROUPS> stream;
    stream.start(own, run, ring + AHEAD * UNIT);
    Sides<E, ROWS> sides[GROUPS];
    {
        float4 sum[GROUPS];
        add_up(own, 0, GROUPS, sum);
#pragma unroll
        for (u32 c = 0; c < GROUPS; c++) sides[c] = Sides<E, ROWS>::of(sum[c]);
    }
    // A product takes two outputs of each eight, l / 8 % 2 the one that this lane points to, and half l / 16 of a group of
    // ranks (of 8 ranks, two products take output l / 8 of four). Its piece of a unit, of which the lower three bits are
    // changed by the eight.
    const u32 piece = EIGHT ? lane / 8 : lane / 8 % 2 * (2 * GROUPS) + lane / 16, part = EIGHT ? 128 : 256;
    u32 read[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) read[i] = ring + lane % 8 * part + piece / 8 * 128 + ((piece % 8 ^ i * 2) ^ lane % 8) * 16;
    Sums<E, ROWS> sums;
    auto turn = [&](u32 i) {
            const u32 unit = i % GROUPS;
            wait_groups<AHEAD - 1>();
            __syncwarp();
            if (EIGHT) {
                u32 m[2][4];
#pragma unroll
                for (u32 n = 0; n < 2; n++) load_matrices(read[n * 2] + i * UNIT, m[n]);
                const u32 w[4][4] = {{m[0][0], m[0][1]}, {m[0][2], m[0][3]}, {m[1][0], m[1][1]}, {m[1][2], m[1][3]}};
                sums.set(sides[0], w);
            } else {
                u32 w[GROUPS][PRODUCTS][4];
#pragma unroll
                for (u32 c = 0; c < GROUPS; c++)
#pragma unroll
                    for (u32 m = 0; m < PRODUCTS; m++) {
                        // Pieces before those of this product and group.
                        const u32 at = m * 4 * GROUPS + c * 2;
                        load_matrices(read[at / 2 % 4] + at / 8 * 128 + i * UNIT, w[c][m]);
                    }
#pragma unroll
                for (u32 c = 0; c < GROUPS; c++) sums.add(unit * PRODUCTS, c == 0, sides[c], w[c]);
            }
            // All lanes have read the unit.
            if (left > AHEAD) ask_b(unit, i);
            if (unit + 1 == GROUPS) {
#pragma unroll
                for (u32 r = 0; r < ROWS; r++)
                    stream.pass(r, i / GROUPS, [&](const uint4& y) { return plain8(run.scale, own, r, y, sums); });
                stream.left--;
            }
            end_group();
            return --left != 0;
    };
    static_assert(AHEAD == 4, "turns");
    while (turn(0) && turn(1) && turn(2) && turn(3)) {
    }
}

// The same of any ranks, in units of RANKS ranks of all outputs; VECTORS: there are gains and offsets. `z_kept`: where this
// warp keeps z.
template <class E, u32 ROWS, bool VECTORS>
DEVICE void even_run(const Params& p, const u32* batch, const float* z, const Run& run, u32 ring, u32 z_kept, bool waited) {
    const u32 lane = threadIdx.x % 32;
    const u32 groups = div_ceil(run.rank, RANKS);
    const u64 offsets = vector_len(p.site[run.site]);
    u32 left = (run.end - run.first) * groups;
    // This lane copies half l % 2 of output l / 2 and of the 16th, 32nd and 48th after it. Half h of output o lies in piece
    // (o % 4 * 2 + h) ^ (o / 8) of the o/4-th 128 bytes.
    u64 ask = run.b + (run.first * TILE + lane / 2) * run.b_row + lane % 2 * 16;
    u32 to[4];
#pragma unroll
    for (u32 n = 0; n < 4; n++) to[n] = place_of_copy(ring, n, n * 2 + lane / 16);
    u32 ask_group = 0;
    // Of the ranks that there are in the last group.
    const u32 there = 2 * saturating(run.rank, (groups - 1) * RANKS + lane % 2 * 8), rest = there < 16 ? there : 16;
    auto ask_b = [&](u32 place) {
        const u32 bytes = ask_group + 1 != groups ? 16 : rest;
        // What isn't read may lie past the matrix: name what does not.
        const u64 from = bytes ? ask : ask - 16;
#pragma unroll
        for (u32 n = 0; n < 4; n++)
            copy16(to[n] + place * UNIT, reinterpret_cast<const void*>(from + n * (16 * run.b_row)), bytes);
        ask += 2 * RANKS;
        if (++ask_group == groups) {
            ask += TILE * run.b_row - groups * (2 * RANKS);
            ask_group = 0;
        }
    };
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        if (i < left) ask_b(i);
    end_group();
    const Own<ROWS> own = own_of<ROWS>(p, batch, z, run);
    if (!waited) wait_for_last();
    Stream<ROWS, AHEAD> stream;
    stream.start(own, run, ring + AHEAD * UNIT);
    keep_all<E, ROWS>(own, groups, z_kept);
    // Where this lane points, of eight outputs from 8 (l % 8) on: to half l / 16 of the first two or the third and fourth.
    u32 read[2];
#pragma unroll
    for (u32 m = 0; m < 2; m++) read[m] = ring + lane % 8 * 256 + ((m * 4 + lane / 8 % 2 * 2 + lane / 16) ^ lane % 8) * 16;
    u32 group = 0, tile_place = 0, n = run.first * TILE + lane / 4 * 8;
    Sums<E, ROWS> sums = {};
#pragma unroll 1
    for (;;) {
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            wait_groups<AHEAD - 1>();
            __syncwarp();
            u32 w[4][4];
#pragma unroll
            for (u32 m = 0; m < 4; m++) load_matrices(read[m % 2] + m / 2 * 128 + i * UNIT, w[m]);
            sums.add(0, false, Sides<E, ROWS>::kept(z_kept + group * KEPT), w);
            // All lanes have read the unit.
            if (left > AHEAD) ask_b(i);
            if (++group == groups) {
#pragma unroll
                for (u32 r = 0; r < ROWS; r++)
                    stream.pass(r, tile_place, [&](const uint4& y) {
                        if (VECTORS) return shaped8(run, offsets, own, r, n, 8, y, sums);
                        return plain8(run.scale, own, r, y, sums);
                    });
                stream.left--;
                tile_place = tile_place + 1 == AHEAD ? 0 : tile_place + 1;
                n += TILE;
                group = 0;
                sums = {};
            }
            end_group();
            if (--left == 0) return;
        }
    }
}

// A run of any kind: ragged outputs, rows of y at odd places, vectors. Its weights go straight to registers. `wide`: y is
// aligned, and no eighth of a tile ragged.
template <class E>
DEVICE void odd_run(const Params& p, const u32* batch, const float* z, const Run& run, bool wide, u32 z_kept, bool waited) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 groups = div_ceil(run.rank, RANKS), out = p.site[run.site].out_features;
    const Own<2> own = own_of<2>(p, batch, z, run);
    if (!waited) wait_for_last();
    keep_all<E, 2>(own, groups, z_kept);
#pragma unroll 1
    for (u32 tile = run.first; tile < run.end; tile++) {
        const u32 n = tile * TILE + g * 8, left = saturating(out, n);
        Sums<E, 2> sums = {};
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
            sums.add(0, false, Sides<E, 2>::kept(z_kept + c * KEPT), w);
        }
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            if (!own.y[r] || left == 0) continue;
            u16* const y = own.y[r] + tile * TILE;
            const uint4 before = wide ? shared_cache(y) : some8(y, left);
            const uint4 done = run.gains ? shaped8(run, vector_len(p.site[run.site]), own, r, n, left, before, sums)
                                         : plain8(run.scale, own, r, before, sums);
            if (wide) *reinterpret_cast<uint4*>(y) = done;
            else keep_some8(y, left, done);
        }
    }
}

// A run's whole tiles, without vectors.
template <class E, u32 ROWS>
DEVICE void plain_run(const Params& p, const u32* batch, const float* z, const Run& run, u32 ring, u32 z_kept, bool waited) {
    // Ranks that fill the rows of B.
    const u32 filling = run.rank * 2 == run.b_row ? run.rank : 0;
    if (filling == 16) dense_run<E, ROWS, 16>(p, batch, z, run, ring, waited);
    else if (filling == 64) dense_run<E, ROWS, 64>(p, batch, z, run, ring, waited);
    else if (filling == 32) dense_run<E, ROWS, 32>(p, batch, z, run, ring, waited);
    else if (filling == 8) dense_run<E, ROWS, 8>(p, batch, z, run, ring, waited);
    else even_run<E, ROWS, false>(p, batch, z, run, ring, z_kept, waited);
}
