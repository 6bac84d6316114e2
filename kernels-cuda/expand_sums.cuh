// What the decode expand for sm_90 multiplies and adds up: a lane's rows of z and y, and the sums of a tile.
#pragma once
#include "expand_factors.cuh"

constexpr u32 TILE = 64;

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

// Keeps all groups.
template <class E, u32 ROWS> DEVICE void keep_all(const Own<ROWS>& own, u32 groups, u32 at) {
    constexpr u32 COUNT = 4;
#pragma unroll 1
    for (u32 first = 0; first < groups; first += COUNT) {
        float4 z[COUNT];
        add_up(own, first, groups, z);
#pragma unroll
        for (u32 c = 0; c < COUNT; c++)
            if (first + c < groups) Sides<E, ROWS>::keep(at + (first + c) * KEPT, Sides<E, ROWS>::of(z[c]));
    }
}

// Sums of outputs 8g + 2m and the next in [m]: of one row a lane, high and low parts in [0] and [2], middle ones in [1] and
// [3]; of two, high and low parts in [0][m], middle ones in [1][m], of the first row in [0] and [2].
template <class E, u32 ROWS> struct Sums {
    typedef Sides<E, ROWS> Z;
    float of[ROWS][4][4];

    // Adds COUNT products from the `first`-th on; w: this lane's share of each two outputs of B. `fresh`: to nothing.
    template <u32 COUNT> __device__ __forceinline__ void add(u32 first, bool fresh, const Z& z, const u32 (&w)[COUNT][4]) {
#pragma unroll
        for (u32 step = 0; step < Z::STEPS; step++) add_step<false>(first, fresh && step == 0, z, w, step);
    }
    // The same of eight ranks and all outputs, to nothing.
    __device__ __forceinline__ void set(const Z& z, const u32 (&w)[4][4]) { add_step<true>(0, true, z, w, 0); }

    template <bool EIGHT, u32 COUNT>
    __device__ __forceinline__ void add_step(u32 first, bool fresh, const Z& z, const u32 (&w)[COUNT][4], u32 step) {
        const Parts parts = z.parts(step);
        u32 b[COUNT][4];
#pragma unroll
        for (u32 m = 0; m < COUNT; m++) Z::take(w[m], step, b[m]);
        if (Z::LOWER)
#pragma unroll
            for (u32 m = 0; m < COUNT; m++) Z::template multiply<EIGHT>(of[0][first + m], fresh, b[m], parts.lower);
        if (ROWS == 2)
#pragma unroll
            for (u32 m = 0; m < COUNT; m++) Z::template multiply<EIGHT>(of[ROWS - 1][first + m], fresh, b[m], parts.middle);
#pragma unroll
        for (u32 m = 0; m < COUNT; m++) Z::template multiply<EIGHT>(of[0][first + m], fresh && !Z::LOWER, b[m], parts.upper);
    }
    // Of row `i`, output 8g + n.
    __device__ __forceinline__ float total(u32 i, u32 n) const {
        const u32 m = n / 2, odd = n % 2 * 2;
        return ROWS == 1 ? __fadd_rn(of[0][m][odd], of[0][m][odd + 1]) : __fadd_rn(of[0][m][odd + i], of[ROWS - 1][m][odd + i]);
    }
};

// Eight outputs of a lane's row `i`; `scale`: the site's.
template <class E, u32 ROWS> DEVICE uint4 plain8(float scale, const Own<ROWS>& own, u32 i, const uint4& y, const Sums<E, ROWS>& sums) {
    const u32 word[4] = {y.x, y.y, y.z, y.w};
    const float both = __fmul_rn(scale, own.scale[i]);
    u32 done[4];
#pragma unroll
    for (u32 m = 0; m < 4; m++) done[m] = add2<E>(word[m], both, sums.total(i, 2 * m), sums.total(i, 2 * m + 1));
    return make_uint4(done[0], done[1], done[2], done[3]);
}
// The same with gains and, `offsets` floats after them, offsets: of outputs from `n` on, `left` of them.
template <class E, u32 ROWS>
DEVICE uint4 shaped8(const Run& run, u64 offsets, const Own<ROWS>& own, u32 i, u32 n, u32 left, const uint4& y,
                     const Sums<E, ROWS>& sums) {
    u32 word[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (u32 m = 0; m < 4; m++)
        if (2 * m < left)
            word[m] = shape2<E>(word[m], run.scale, own.scale[i], sums.total(i, 2 * m), sums.total(i, 2 * m + 1),
                             run.gains + n + 2 * m, offsets);
    return make_uint4(word[0], word[1], word[2], word[3]);
}
