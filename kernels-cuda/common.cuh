// What the kernels share: element types, wide loads, the checks on table contents, and the entries.
//
// Entries are `lorapool_<kernel>_<act>_<weight>`. Arguments: the address of each operand in the contract's
// order (absent y operands are null), then Params by value. Blocks have THREADS threads, no dynamic shared
// memory, and z counts sites.
//
// Sums use explicit fused multiply-adds, and the files are compiled with contraction off: the bits of a
// result depend on nothing but the order written here.
#pragma once
#include "contract.cuh"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define DEVICE static __device__ __forceinline__

// One element type: its bits in memory, the exact f32 behind them, and an f32 rounded once (nearest, ties to even).
template <u32 dtype> struct Element;

template <> struct Element<DTYPE_F32> {
    typedef float Bits;
    DEVICE float widen(Bits bits) { return bits; }
    DEVICE Bits narrow(float value) { return value; }
};

template <> struct Element<DTYPE_F16> {
    typedef u16 Bits;
    DEVICE float widen(Bits bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    DEVICE Bits narrow(float value) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
    }
};

template <> struct Element<DTYPE_BF16> {
    typedef u16 Bits;
    DEVICE float widen(Bits bits) { return __uint_as_float((u32)bits << 16); }
    // In integers, since cvt.rn.bf16 begins with sm_80.
    DEVICE Bits narrow(float value) {
        u32 bits = __float_as_uint(value);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40u);
        return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
};

// Elements that one call of `load` takes: 16 bytes of the 2-byte types.
constexpr u32 CHUNK = 8;

DEVICE void widen_words(const uint4& words, float* out, Element<DTYPE_F32>) {
    out[0] = __uint_as_float(words.x);
    out[1] = __uint_as_float(words.y);
    out[2] = __uint_as_float(words.z);
    out[3] = __uint_as_float(words.w);
}

template <class E> DEVICE void widen_words(const uint4& words, float* out, E) {
    const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        out[2 * i] = E::widen((u16)(word[i] & 0xffffu));
        out[2 * i + 1] = E::widen((u16)(word[i] >> 16));
    }
}

// Whether rows of `stride` elements from `base` on may be read 16 bytes at a time.
template <class Bits> DEVICE bool is_wide(const Bits* base, u64 stride) {
    return (((u64)base | stride * sizeof(Bits)) & 15) == 0;
}

// CHUNK elements from `from` on as f32; those from `count` on are 0 and not read. `wide`: `from` is a multiple
// of 16. The values don't depend on it.
template <class E> DEVICE void load(const typename E::Bits* from, u32 count, bool wide, float (&out)[CHUNK]) {
    if (wide && count >= CHUNK) {
        constexpr u32 per_word4 = 16 / sizeof(typename E::Bits);
        const uint4* words = reinterpret_cast<const uint4*>(from);
#pragma unroll
        for (u32 i = 0; i < CHUNK / per_word4; i++) widen_words(words[i], out + i * per_word4, E());
    } else {
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++) out[i] = i < count ? E::widen(from[i]) : 0.0f;
    }
}

// One slot's pair at one site, if it has a delta there that this launch may read.
struct Pair {
    // Bytes from the weights operand's start to the matrix.
    u64 offset;
    // True rank; 0: no delta, and nothing else here means anything.
    u32 rank;
    // The site's scale in this slot.
    float scale;
    // Bytes from the weights operand's start to the gains and offsets behind B, each padded to VECTOR_ALIGN; 0: none.
    u64 vectors;
};

// Looks a slot up. Table contents are not trusted: a slot outside the window, a matrix outside the weights
// operand or off its alignment, and a rank above max_rank count as "no delta".
DEVICE Pair pair_of(const Params& p, const SiteParams& site, const u32* tables, int slot) {
    Pair none = {0, 0, 0.0f, 0};
    if (slot < 0 || (u32)slot < p.slot_first || (u32)slot - p.slot_first >= p.slot_count) return none;
    // All loads at once: the chain from a slot to its weights is what a launch of few rows waits for.
    const u32* words = tables + (site.cells + 2ull * (u32)slot);
    const u32 low = words[0], high = words[1], word = tables[(u64)site.ranks + (u32)slot];
    const float scale = __uint_as_float(tables[(u64)site.scales + (u32)slot]);
    const u64 cell = (u64)high << 32 | low;
    const u64 weights = (u64)p.weights_hi << 32 | p.weights_lo;
    const u64 len = (u64)p.weights_len_hi << 32 | p.weights_len_lo;
    const u64 span = 4ull * site.span;
    if (cell == 0 || (cell & 15) != 0 || cell < weights) return none;
    const u64 offset = cell - weights;
    if (offset > len || len - offset < span) return none;
    const u32 rank = word & RANK_MASK;
    if (rank == 0 || rank > p.max_rank) return none;
    Pair pair = {offset, rank, scale, word & RANK_VECTORS};
    return pair;
}

DEVICE u64 vector_len(const SiteParams& site) {
    return ((u64)site.out_features + VECTOR_ALIGN - 1) / VECTOR_ALIGN * VECTOR_ALIGN;
}

// The same for an expand, whose matrix may have vectors behind it: if so, they must lie in the span too.
template <class Bits> DEVICE Pair expand_pair_of(const Params& p, const SiteParams& site, const u32* tables, int slot) {
    Pair pair = pair_of(p, site, tables, slot);
    if (pair.vectors) {
        const u64 matrix = (u64)site.out_features * p.b_stride * sizeof(Bits);
        if (matrix + 2 * vector_len(site) * sizeof(float) > 4ull * site.span) pair.rank = 0;
        pair.vectors = pair.offset + matrix;
    }
    return pair;
}

// A pair's gains from output `n` on, with the offsets vector_len behind them; null: the pair has none.
DEVICE const float* gains_of(const unsigned char* weights, const Pair& pair, u64 n) {
    return pair.vectors ? reinterpret_cast<const float*>(weights + pair.vectors) + n : nullptr;
}

// What a row with vectors turns y into.
DEVICE float shaped(float y, float sum, float site_scale, float row_scale, float gain, float offset) {
    // 1 - 1 is no factor for an infinite y.
    const float change = gain == 1.0f ? offset : __fmaf_rn(__fsub_rn(gain, 1.0f), y, offset);
    return __fmaf_rn(row_scale, __fmaf_rn(__fmul_rn(site_scale, gain), sum, change), y);
}

// What a row turns y, `i` outputs from where `gains` begins, into.
DEVICE float expanded(const SiteParams& site, float y, float sum, float site_scale, float row_scale, const float* gains,
                      u32 i) {
    if (gains) return shaped(y, sum, site_scale, row_scale, gains[i], gains[vector_len(site) + i]);
    return __fmaf_rn(__fmul_rn(site_scale, row_scale), sum, y);
}

// Index of this block among those of its site, whatever the grid was folded into.
DEVICE u32 block_index() { return blockIdx.y * gridDim.x + blockIdx.x; }

DEVICE u32 div_ceil(u32 a, u32 b) { return a / b + (a % b != 0); }

// A tile of the batch, cut to the rows that belong to this launch.
struct Rows {
    int slot;
    // First row of the tile in x, y and z, which begin at batch row row_first; may lie before or past them.
    long long first;
    // Rows of the tile.
    u32 count;
};

DEVICE Rows tile_rows(const Params& p, const u32* batch, u32 tile) {
    const u32* words = batch + ((u64)p.tiles_at + 4ull * tile);
    Rows rows = {(int)words[0], (long long)words[1] - (long long)p.row_first, words[2]};
    if (rows.count > SGMV_TILE_ROWS) rows.count = SGMV_TILE_ROWS;
    return rows;
}

// Row `i` of the tile in x, y and z, or -1 where it is another launch's or none.
DEVICE long long row_of(const Params& p, const Rows& rows, u32 i) {
    const long long row = rows.first + i;
    return i < rows.count && row >= 0 && row < (long long)p.rows ? row : -1;
}

// No row of x.
constexpr u32 NO_ROW = 0xffffffffu;

// The row of x that row `row` of the launch reads; NO_ROW: zeros.
DEVICE u32 x_row(const Params& p, const u32* batch, u32 row) {
    if (p.x_rows_at == 0) return row;
    const u32 named = batch[(u64)p.x_rows_at + p.row_first + row];
    return named < p.x_rows ? named : NO_ROW;
}

// The row's own multiplier. `row` counts from row_first.
DEVICE float row_scale(const Params& p, const u32* batch, u64 row) {
    return __uint_as_float(batch[2 * (p.row_first + row) + 1]);
}

// The last one takes what is too large: a launch whose site names no y operand is refused before.
DEVICE void* y_of(u32 i, void* y0, void* y1, void* y2, void* y3) {
    return i == 0 ? y0 : i == 1 ? y1 : i == 2 ? y2 : y3;
}

// The nine entries of a kernel: ENTRY(name of act, code of act, name of weight, code of weight).
#define FOR_EACH_SPEC(ENTRY)                                                                                           \
    ENTRY(f32, DTYPE_F32, f32, DTYPE_F32)                                                                              \
    ENTRY(f32, DTYPE_F32, f16, DTYPE_F16)                                                                              \
    ENTRY(f32, DTYPE_F32, bf16, DTYPE_BF16)                                                                            \
    ENTRY(f16, DTYPE_F16, f32, DTYPE_F32)                                                                              \
    ENTRY(f16, DTYPE_F16, f16, DTYPE_F16)                                                                              \
    ENTRY(f16, DTYPE_F16, bf16, DTYPE_BF16)                                                                            \
    ENTRY(bf16, DTYPE_BF16, f32, DTYPE_F32)                                                                            \
    ENTRY(bf16, DTYPE_BF16, f16, DTYPE_F16)                                                                            \
    ENTRY(bf16, DTYPE_BF16, bf16, DTYPE_BF16)

// A shrink's entry, around `kernel<act, weight>`.
#define SHRINK_ENTRY(kernel, act, act_code, weight, weight_code)                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) lorapool_##kernel##_##act##_##weight(                        \
        const u32* __restrict__ batch, const u32* __restrict__ tables, const unsigned char* __restrict__ weights,     \
        const void* __restrict__ x, float* __restrict__ z, const __grid_constant__ Params p) {                         \
        kernel<Element<act_code>, Element<weight_code> >(batch, tables, weights, x, z, p);                             \
    }

// An expand's entry, around `kernel<act, weight>`. Sites may share a y operand.
#define EXPAND_ENTRY(kernel, act, act_code, weight, weight_code)                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) lorapool_##kernel##_##act##_##weight(                        \
        const u32* __restrict__ batch, const u32* __restrict__ tables, const unsigned char* __restrict__ weights,     \
        const float* __restrict__ z, void* y0, void* y1, void* y2, void* y3, const __grid_constant__ Params p) {       \
        void* y = y_of(p.site[blockIdx.z].y_operand, y0, y1, y2, y3);                                                \
        if (y) kernel<Element<act_code>, Element<weight_code> >(batch, tables, weights, z, y, p);                      \
    }
