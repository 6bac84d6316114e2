// y[row][n] += scale * sum_r B[slot(row)][n][r] * z[row][r], z the sum of its parts, rounded once: decode in bf16 for sm_90.
//
//   warp   works by itself on a run of neighbouring tiles
//   tile   TILE outputs of a pack of rows at a site; in units of 2 KB of B, which are asked for some units ahead
//
// B is the 16-row side of the product, z the 8-column side. z is taken as the sum of three bf16, which it is exactly: two
// columns for each row of a pack of up to 4, low and then high parts in one and middle parts in the other; in a larger pack
// a column for each row, and the middle parts have a product of their own. Order of a sum: ranks ascending in groups of
// RANKS, of each the low parts before the high ones in one sum, the middle parts in another, added at the end.
#include "copies.cuh"
#include "packs.cuh"

constexpr u32 TILE = 64;
// Bytes that a warp keeps of a group of ranks: a lane's six words, as it multiplies them.
constexpr u32 KEPT = 32 * 24;

// Tiles of a pack and a site.
struct Run {
    u64 b;              // address of the matrix
    u64 b_row;          // bytes from an output to the next
    u16* y;             // output 0 of row 0
    const float* gains; // of the site; null: none
    u32 pack, site, rows, first, end, rank;
    float scale;
};

// What is a lane's own in a run.
template <u32 ROWS> struct Own {
    const float* z;     // of its column's row, this lane's ranks: 2q, 2q + 1, 2q + 8 and 2q + 9; null: there is none
    u16* y[ROWS];       // output 8g of tile 0 of its rows; null: no such row
    float scale[ROWS];  // the row's
    u32 parts;          // of z
    u64 part;           // floats from one to the next
};
template <u32 ROWS> DEVICE Own<ROWS> own_of(const Params& p, const u32* batch, const float* z, const Run& run) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const ZStrides strides = z_strides(p);
    Own<ROWS> own;
    const u32 column = row_of(p, batch, run.pack, ROWS == 1 ? g / 2 : g);
    own.z = column == NO_ROW ? nullptr : z + ((u64)column * strides.row + run.site * strides.site + q * 4);
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        const u32 row = row_of(p, batch, run.pack, q * ROWS + r);
        own.y[r] = row == NO_ROW ? nullptr : run.y + ((u64)row * p.site[run.site].y_stride + g * 8);
        own.scale[r] = row_scale(p, batch, row == NO_ROW ? 0 : row);
        settle(own.y[r]), settle(own.scale[r]);
    }
    own.parts = parts_of(p.in_features), own.part = strides.part;
    settle(own.z);
    return own;
}

// This lane's ranks of COUNT groups from `group` on: the first half of z's parts added up in order, then the others, all of
// which are asked for at once if a lane has one row. Groups from `groups` on are zero.
template <u32 COUNT, u32 ROWS> DEVICE void add_up(const Own<ROWS>& own, u32 group, u32 groups, float4 (&z)[COUNT]) {
    constexpr u32 HALF = Z_PARTS / 2;
    // Two lanes share a row if each has one: one half each.
    const u32 begin = ROWS == 1 ? threadIdx.x / 4 % 2 * HALF : 0;
#pragma unroll
    for (u32 c = 0; c < COUNT; c++) z[c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (u32 first = begin; first < begin + HALF * ROWS; first += HALF) {
        float4 part[COUNT][HALF];
#pragma unroll
        for (u32 c = 0; c < COUNT; c++)
#pragma unroll
            for (u32 i = 0; i < HALF; i++)
                part[c][i] = shared_cache_if(own.z && first + i < own.parts && group + c < groups,
                                             own.z + ((group + c) * RANKS + (first + i) * own.part));
#pragma unroll
        for (u32 c = 0; c < COUNT; c++) {
#pragma unroll
            for (u32 i = 1; i < HALF; i++) part[c][0] = add4(part[c][0], part[c][i]);
            z[c] = add4(z[c], part[c][0]);
        }
    }
    if (ROWS == 1)
#pragma unroll
        for (u32 c = 0; c < COUNT; c++) z[c] = add4(z[c], of_other_lane(z[c], 4));
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
template <u32 ROWS> DEVICE void keep_all(const Own<ROWS>& own, u32 groups, u32 at) {
    constexpr u32 COUNT = 4;
#pragma unroll 1
    for (u32 first = 0; first < groups; first += COUNT) {
        float4 z[COUNT];
        add_up(own, first, groups, z);
#pragma unroll
        for (u32 c = 0; c < COUNT; c++)
            if (first + c < groups) keep<ROWS>(at + (first + c) * KEPT, sides_of<ROWS>(z[c]));
    }
}

// Sums of outputs 8g + 2m and the next in [m]: of one row a lane, high and low parts in [0] and [2], middle ones in [1] and
// [3]; of two, high and low parts in [0][m], middle ones in [1][m], of the first row in [0] and [2].
template <u32 ROWS> struct Sums {
    float of[ROWS][4][4];

    // Adds COUNT products from the `first`-th on; w: this lane's share of each two outputs of B, as a product takes it.
    // `fresh`: to nothing.
    template <u32 COUNT> __device__ __forceinline__ void add(u32 first, bool fresh, const Sides& z, const u32 (&w)[COUNT][4]) {
#pragma unroll
        for (u32 m = 0; m < COUNT; m++) product(of[0][first + m], fresh, w[m], z.lower);
        if (ROWS == 2)
#pragma unroll
            for (u32 m = 0; m < COUNT; m++) product(of[ROWS - 1][first + m], fresh, w[m], z.middle);
#pragma unroll
        for (u32 m = 0; m < COUNT; m++) product(of[0][first + m], false, w[m], z.upper);
    }
    // The same of eight ranks and all outputs, to nothing.
    __device__ __forceinline__ void set(const Sides& z, const u32 (&w)[4][2]) {
#pragma unroll
        for (u32 m = 0; m < 4; m++) first_mma8(of[0][m], w[m][0], w[m][1], z.lower[0]);
        if (ROWS == 2)
#pragma unroll
            for (u32 m = 0; m < 4; m++) first_mma8(of[ROWS - 1][m], w[m][0], w[m][1], z.middle[0]);
#pragma unroll
        for (u32 m = 0; m < 4; m++) mma8(of[0][m], w[m][0], w[m][1], z.upper[0]);
    }
    DEVICE void product(float (&sum)[4], bool fresh, const u32 (&w)[4], const u32 (&z)[2]) {
        if (fresh) first_mma(sum, w[0], w[1], w[2], w[3], z[0], z[1]);
        else mma(sum, w[0], w[1], w[2], w[3], z[0], z[1]);
    }
    // Of row `i`, output 8g + n.
    __device__ __forceinline__ float total(u32 i, u32 n) const {
        const u32 m = n / 2, odd = n % 2 * 2;
        return ROWS == 1 ? __fadd_rn(of[0][m][odd], of[0][m][odd + 1]) : __fadd_rn(of[0][m][odd + i], of[ROWS - 1][m][odd + i]);
    }
};

// Eight outputs of a lane's row `i`; `scale`: the site's.
template <u32 ROWS> DEVICE uint4 plain8(float scale, const Own<ROWS>& own, u32 i, const uint4& y, const Sums<ROWS>& sums) {
    const u32 word[4] = {y.x, y.y, y.z, y.w};
    const float both = __fmul_rn(scale, own.scale[i]);
    u32 done[4];
#pragma unroll
    for (u32 m = 0; m < 4; m++) done[m] = add2(word[m], both, sums.total(i, 2 * m), sums.total(i, 2 * m + 1));
    return make_uint4(done[0], done[1], done[2], done[3]);
}
// The same with gains and, `offsets` floats after them, offsets: of outputs from `n` on, `left` of them.
template <u32 ROWS>
DEVICE uint4 shaped8(const Run& run, u64 offsets, const Own<ROWS>& own, u32 i, u32 n, u32 left, const uint4& y,
                     const Sums<ROWS>& sums) {
    u32 word[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (u32 m = 0; m < 4; m++)
        if (2 * m < left) {
            // Pairs begin at even outputs, and vectors are padded past odd ends.
            const float* from = run.gains + n + 2 * m;
            word[m] = shape2(word[m], run.scale, own.scale[i], sums.total(i, 2 * m), sums.total(i, 2 * m + 1),
                             *reinterpret_cast<const float2*>(from), *reinterpret_cast<const float2*>(from + offsets));
        }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

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

// Whole tiles, aligned rows, RANK ranks that fill the rows of B: nearly all runs. ROWS: of a lane. Unless `waited`, waits
// before it reads z and y. `ring`: this warp's.
//
// B of a tile is neighbours. A unit is, of each eight outputs, 256 bytes (all 128 of 8 ranks): that of outputs 8g.. lies in
// the g-th part of its place, in pieces of 16 bytes, of which those of 128 bytes change places by g: lines stay together,
// which copies take in one go, and what is read at once lies in different banks.
template <u32 ROWS, u32 RANK>
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
        to[n] = ring + n * 512 + lane / 8 * 128 + (lane % 8 ^ eight) * 16;
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
    Sides sides[GROUPS];
    {
        float4 sum[GROUPS];
        add_up(own, 0, GROUPS, sum);
#pragma unroll
        for (u32 c = 0; c < GROUPS; c++) sides[c] = sides_of<ROWS>(sum[c]);
    }
    // A product takes two outputs of each eight, l / 8 % 2 the one that this lane points to, and half l / 16 of a group of
    // ranks (of 8 ranks, two products take output l / 8 of four). Its piece of a unit, of which the lower three bits are
    // changed by the eight.
    const u32 piece = EIGHT ? lane / 8 : lane / 8 % 2 * (2 * GROUPS) + lane / 16, part = EIGHT ? 128 : 256;
    u32 read[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) read[i] = ring + lane % 8 * part + piece / 8 * 128 + ((piece % 8 ^ i * 2) ^ lane % 8) * 16;
    Sums<ROWS> sums;
#pragma unroll 1
    for (;;) {
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            const u32 unit = i % GROUPS;
            wait_groups<AHEAD - 1>();
            __syncwarp();
            if (EIGHT) {
                u32 m[2][4];
#pragma unroll
                for (u32 n = 0; n < 2; n++) load_matrices(read[n * 2] + i * UNIT, m[n]);
                const u32 w[4][2] = {{m[0][0], m[0][1]}, {m[0][2], m[0][3]}, {m[1][0], m[1][1]}, {m[1][2], m[1][3]}};
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
            if (--left == 0) return;
        }
    }
}

// The same of any ranks, in units of RANKS ranks of all outputs; VECTORS: there are gains and offsets. `z_kept`: where this
// warp keeps z.
template <u32 ROWS, bool VECTORS>
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
    for (u32 n = 0; n < 4; n++) to[n] = ring + n * 512 + lane / 8 * 128 + (lane % 8 ^ (n * 2 + lane / 16)) * 16;
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
    keep_all<ROWS>(own, groups, z_kept);
    // Where this lane points, of eight outputs from 8 (l % 8) on: to half l / 16 of the first two or the third and fourth.
    u32 read[2];
#pragma unroll
    for (u32 m = 0; m < 2; m++) read[m] = ring + lane % 8 * 256 + ((m * 4 + lane / 8 % 2 * 2 + lane / 16) ^ lane % 8) * 16;
    u32 group = 0, tile_place = 0, n = run.first * TILE + lane / 4 * 8;
    Sums<ROWS> sums = {};
#pragma unroll 1
    for (;;) {
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            wait_groups<AHEAD - 1>();
            __syncwarp();
            u32 w[4][4];
#pragma unroll
            for (u32 m = 0; m < 4; m++) load_matrices(read[m % 2] + m / 2 * 128 + i * UNIT, w[m]);
            sums.add(0, false, kept<ROWS>(z_kept + group * KEPT), w);
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
DEVICE void odd_run(const Params& p, const u32* batch, const float* z, const Run& run, bool wide, u32 z_kept, bool waited) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 groups = div_ceil(run.rank, RANKS), out = p.site[run.site].out_features;
    const Own<2> own = own_of<2>(p, batch, z, run);
    if (!waited) wait_for_last();
    keep_all<2>(own, groups, z_kept);
#pragma unroll 1
    for (u32 tile = run.first; tile < run.end; tile++) {
        const u32 n = tile * TILE + g * 8, left = saturating(out, n);
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
            sums.add(0, false, kept<2>(z_kept + c * KEPT), w);
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
template <u32 ROWS>
DEVICE void plain_run(const Params& p, const u32* batch, const float* z, const Run& run, u32 ring, u32 z_kept, bool waited) {
    // Ranks that fill the rows of B.
    const u32 filling = run.rank * 2 == run.b_row ? run.rank : 0;
    if (filling == 16) dense_run<ROWS, 16>(p, batch, z, run, ring, waited);
    else if (filling == 64) dense_run<ROWS, 64>(p, batch, z, run, ring, waited);
    else if (filling == 32) dense_run<ROWS, 32>(p, batch, z, run, ring, waited);
    else if (filling == 8) dense_run<ROWS, 8>(p, batch, z, run, ring, waited);
    else even_run<ROWS, false>(p, batch, z, run, ring, z_kept, waited);
}

// Tiles that a pack has at a site; of those past the last, none.
DEVICE u32 tiles_of(const Params& p, u32 site) { return site < p.sites ? div_ceil(p.site[site].out_features, TILE) : 0; }

// A warp's share of the packs' tiles, `each` of a pack. While there are warps for it, tiles of one pack and site, since
// another run begins only when the last has ended: as few as let all tiles be some warp's.
DEVICE Share share_of_tiles(const Params& p, u32 packs, u32 each, u32 own, u32 all) {
    if (packs == 0 || packs * p.sites > all) return share_of(packs * each, own, all);
    u32 most = div_ceil(packs * each, all), pieces = 0;
    for (;; most += div_ceil(most, 8)) {
        pieces = 0;
#pragma unroll
        for (u32 s = 0; s < MAX_SITES; s++) pieces += div_ceil(tiles_of(p, s), most);
        if (packs * pieces <= all) break;
    }
    const u32 pack = own / pieces;
    if (pack >= packs || own >= all) return {0, 0};
    u32 piece = own % pieces, first = pack * each, end = first;
#pragma unroll
    for (u32 s = 0; s < MAX_SITES; s++) {
        const u32 tiles = tiles_of(p, s), here = div_ceil(tiles, most);
        end += tiles;
        if (piece < here) break;
        piece -= here, first += tiles;
    }
    first += piece * most;
    return {first, first + most < end ? first + most : end};
}

// What a pack and a site's tiles have in common, in the lane that looked them up.
struct Found {
    u64 b, gains;       // addresses; gains 0: none
    u32 rank;           // 0: nothing to do, and nothing else here means anything
    u32 rows;           // of the pack
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
        Found mine;
        mine.rank = 0;
        const u32 own = base + lane;
        if (own < sources) {
            const u32 pack = own / p.sites, s = own % p.sites;
            const int slot = slot_of(p, batch, pack);
            mine.rows = rows_of(p, batch, pack);
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
            const u32 from = __ffs(live) - 1;
            Run run;
            run.pack = (base + from) / p.sites, run.site = (base + from) % p.sites;
            run.first = from_lane(mine.first, from), run.end = from_lane(mine.end, from);
            run.rank = from_lane(mine.rank, from), run.rows = from_lane(mine.rows, from);
            run.scale = from_lane(mine.scale, from);
            run.gains = reinterpret_cast<const float*>(from_lane(mine.gains, from));
            run.b = from_lane(mine.b, from), run.b_row = 2 * (u64)p.b_stride;
            const SiteParams& site = p.site[run.site];
            run.y = reinterpret_cast<u16*>(y_of(site.y_operand, y0, y1, y2, y3)) + site.y_offset;
            const bool aligned = is_wide(run.y, site.y_stride);
            const u32 whole = aligned ? site.out_features / TILE : 0, end = run.end < whole ? run.end : whole;
            if (PLAIN) {
                others |= run.gains || run.end > end;
                if (run.gains || run.first >= end) continue;
                run.end = end;
                if (run.rows > PACK_ROWS / 2) plain_run<2>(p, batch, z, run, ring, z_kept, waited);
                else plain_run<1>(p, batch, z, run, ring, z_kept, waited);
                waited = true;
                continue;
            }
            if (run.gains && run.first < end) {
                Run even = run;
                even.end = end;
                even_run<2, true>(p, batch, z, even, ring, z_kept, waited);
                waited = true;
            }
            if (run.first < end) run.first = end;
            if (run.first < run.end) {
                odd_run(p, batch, z, run, aligned && site.out_features % 8 == 0, z_kept, waited);
                waited = true;
            }
        }
    }
    return others;
}

extern "C" __global__ void __launch_bounds__(EXPAND_WARPS * 32, 4)
    lorapool_bgmv_expand_bf16_bf16(const u32* __restrict__ batch, const u32* __restrict__ tables,
                                   const unsigned char* __restrict__ weights, const float* z, u16* y0, u16* y1, u16* y2,
                                   u16* y3, const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char memory[];
    launch_next();
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
    u32 each = 0;
#pragma unroll
    for (u32 s = 0; s < MAX_SITES; s++) each += tiles_of(p, s);
    const u32 packs = live_packs(p, batch), blocks = working_blocks(p, packs * each, BUSY_TILES);
    // The first warps of all blocks come first.
    const u32 own = blockIdx.x < blocks ? warp * blocks + blockIdx.x : blocks * warps;
    const Share share = share_of_tiles(p, packs, each, own, blocks * warps);
    bool waited = false;
    if (share.first < share.end) {
        const u32 ring = shared_address(memory) + warp * (RING + div_ceil(p.max_rank, RANKS) * KEPT), kept = ring + RING;
        if (runs<true>(p, batch, tables, weights, z, y0, y1, y2, y3, share, each, ring, kept, waited))
            runs<false>(p, batch, tables, weights, z, y0, y1, y2, y3, share, each, ring, kept, waited);
    }
    // One thread that waits is enough for the end of this launch to be the end of all before it.
    if (!waited && warp == 0 && blockIdx.x == 0) wait_for_last();
}
