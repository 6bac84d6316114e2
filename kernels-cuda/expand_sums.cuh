// What the decode expand for sm_90 multiplies and adds up: a lane's rows of z and y, and the sums of a tile.
#pragma once
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
        for (u32 m = 0; m < 4; m++) Words<Bf16>::first_mma8(of[0][m], w[m][0], w[m][1], z.lower[0]);
        if (ROWS == 2)
#pragma unroll
            for (u32 m = 0; m < 4; m++) Words<Bf16>::first_mma8(of[ROWS - 1][m], w[m][0], w[m][1], z.middle[0]);
#pragma unroll
        for (u32 m = 0; m < 4; m++) Words<Bf16>::mma8(of[0][m], w[m][0], w[m][1], z.upper[0]);
    }
    DEVICE void product(float (&sum)[4], bool fresh, const u32 (&w)[4], const u32 (&z)[2]) {
        if (fresh) Words<Bf16>::first_mma(sum, w[0], w[1], w[2], w[3], z[0], z[1]);
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
        if (2 * m < left)
            word[m] = shape2(word[m], run.scale, own.scale[i], sums.total(i, 2 * m), sums.total(i, 2 * m + 1),
                             run.gains + n + 2 * m, offsets);
    return make_uint4(word[0], word[1], word[2], word[3]);
}
