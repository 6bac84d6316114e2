// What the two decode kernels for sm_90 share: packs of rows, shares of work, and z between the two. In both a launch's
// `tiles` is the number of packs that its batch has room for.
#pragma once
#include "sm90.cuh"

// Rows of a pack: the narrow side of a product.
constexpr u32 PACK_ROWS = BGMV_PACK_ROWS;
constexpr u32 PACK_WORDS = sizeof(Pack) / 4;
// Warps of a block.
constexpr u32 SHRINK_WARPS = 8;
constexpr u32 EXPAND_WARPS = 4;
// Items of the shrink and tiles of the expand that come on a multiprocessor before a second block works there.
constexpr u32 BUSY_ITEMS = 6;
constexpr u32 BUSY_TILES = 31;

// Columns that a warp takes at a time, and a block: a step. And the parts that a sum over all columns is left in: the expand adds
// them up in order. By the columns alone: the order of a sum must not depend on anything else.
constexpr u32 STRIP = 32;
constexpr u32 STRIPS = 4;
constexpr u32 STEP = STRIP * STRIPS * SHRINK_WARPS;
DEVICE u32 part_steps_of(u32 in_features) { return div_ceil(div_ceil(in_features, STEP), Z_PARTS); }
DEVICE u32 parts_of(u32 in_features) { return div_ceil(in_features, STEP * part_steps_of(in_features)); }

// z[part][row][site][rank], ranks in whole groups; of a group, ranks 2q, 2q + 1, 2q + 8 and 2q + 9 lie together, as a lane of the
// expand multiplies them.
DEVICE u32 place_of_rank(u32 rank) { return rank / 2 % 4 * 4 + rank / 8 * 2 + rank % 2; }
struct ZStrides {
    u32 site;
    u64 row, part;
};
DEVICE ZStrides z_strides(const Params& p) {
    const u32 site = div_ceil(p.max_rank, RANKS) * RANKS;
    return {site, (u64)site * p.sites, (u64)site * p.sites * p.rows};
}

// Past the first-level cache, which may hold what was there before the launch that this one has waited for; where not `is`, zeros.
DEVICE float4 shared_cache_if(bool is, const float* p) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    asm volatile("{.reg .pred is; setp.ne.u32 is, %5, 0; @is ld.global.cg.v4.f32 {%0,%1,%2,%3},[%4];}"
                 : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
                 : "l"(p), "r"((u32)is));
    return v;
}
DEVICE uint4 shared_cache(const u16* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
// Weights, which are read once.
DEVICE uint4 weights16(u64 p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// Of the lane whose number differs in bit `bit`.
DEVICE float4 of_other_lane(const float4& v, u32 bit) {
    return make_float4(__shfl_xor_sync(~0u, v.x, bit), __shfl_xor_sync(~0u, v.y, bit), __shfl_xor_sync(~0u, v.z, bit),
                       __shfl_xor_sync(~0u, v.w, bit));
}

// The slot of a pack; without packs each row of the launch is one by itself.
DEVICE int slot_of(const Params& p, const u32* batch, u32 pack) {
    return (int)(p.packs_at ? batch[p.packs_at + (u64)PACK_WORDS * pack] : batch[2 * ((u64)p.row_first + pack)]);
}
DEVICE u32 rows_of(const Params& p, const u32* batch, u32 pack) {
    return p.packs_at ? batch[p.packs_at + (u64)PACK_WORDS * pack + 1] : 1;
}
// The pack's row of place `i`, counted in the launch; NO_ROW: there is none.
DEVICE u32 row_of(const Params& p, const u32* batch, u32 pack, u32 i) {
    if (p.packs_at == 0) return i == 0 ? pack : NO_ROW;
    const u32* words = batch + (p.packs_at + (u64)PACK_WORDS * pack);
    const u32 row = words[2 + i] - p.row_first;
    return i < words[1] && row < p.rows ? row : NO_ROW;
}

// Packs in use: they come first.
DEVICE u32 live_packs(const Params& p, const u32* batch) {
    if (p.packs_at == 0) return p.tiles;
    constexpr u32 TURNS = 8;
    const u32 lane = threadIdx.x % 32;
    u32 live = 0;
    for (u32 at = 0; at < p.tiles; at += TURNS * 32) {
        u32 here = 0;
#pragma unroll
        for (u32 i = 0; i < TURNS; i++) {
            const u32 pack = at + i * 32 + lane;
            here += pack < p.tiles && slot_of(p, batch, pack) >= 0;
        }
        here = __reduce_add_sync(~0u, here);
        live += here;
        if (here < TURNS * 32) break;
    }
    return live;
}
// Blocks of a launch that work: one for each multiprocessor (Params::z_parts tells how many) until `busy` items come on each, then
// two. The launch was made for as many packs as its batch has room for; those in use may be few.
DEVICE u32 working_blocks(const Params& p, u32 items, u32 busy) {
    return gridDim.x > p.z_parts && items <= busy * p.z_parts ? p.z_parts : gridDim.x;
}
