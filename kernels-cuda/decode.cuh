// What the two decode kernels for sm_90 share: packs of rows, shares of them, z between the two, and copies of weights
// to shared memory that a warp asks for long before it needs them.
//
// A warp works by itself: on a run of neighbouring items, from a ring of its own. So nothing in a block waits for
// anything else in it, and what has been asked for stays on its way while a warp multiplies.
#pragma once
#include "sm90.cuh"

// Rows of a pack: the narrow side of a product.
constexpr u32 PACK_ROWS = BGMV_PACK_ROWS;
constexpr u32 PACK_WORDS = sizeof(Pack) / 4;

// Columns of A that a stage of the shrink's ring holds, and the parts that a sum over all columns is left in: the
// expand adds them up in order. By the columns alone: the order of a sum must not depend on anything else.
constexpr u32 STAGE_COLUMNS = 256;
constexpr u32 MIN_PART_STAGES = 2;
DEVICE u32 stages_of(u32 in_features) { return div_ceil(in_features, STAGE_COLUMNS); }
DEVICE u32 part_stages_of(u32 in_features) {
    const u32 stages = div_ceil(stages_of(in_features), Z_PARTS);
    return stages < MIN_PART_STAGES ? MIN_PART_STAGES : stages;
}
DEVICE u32 parts_of(u32 in_features) { return div_ceil(stages_of(in_features), part_stages_of(in_features)); }

// z[part][row][site][rank], ranks in whole chunks. Ranks 2q, 2q+1, 2q+8 and 2q+9 of a chunk are neighbours: those that
// a lane of the expand multiplies with.
struct ZStrides {
    u32 site;
    u64 row, part;
};
DEVICE ZStrides z_strides(const Params& p) {
    const u32 site = div_ceil(p.max_rank, RANKS) * RANKS;
    return {site, (u64)site * p.sites, (u64)site * p.sites * p.rows};
}
// Where rank `r` of a chunk lies in it.
DEVICE u32 place_of(u32 r) { return r % 8 / 2 * 4 + r % 2 + r / 8 * 2; }

// Past the first-level cache, which may hold what was there before the launch that this one has waited for.
DEVICE float4 shared_cache16(const float* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
}

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Asks for 16 bytes; those from `bytes` on are zero and not read. A lane's copies arrive in the order of its commits.
DEVICE void copy16(u32 to, u64 from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// The same of all 16 bytes, if `live`. A predicate, where the compiler would make a branch.
DEVICE void copy16_if(u32 to, u64 from, bool live) {
    asm volatile(
        "{\n.reg .pred live;\nsetp.ne.u32 live, %2, 0;\n@live cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(to),
        "l"(from), "r"((u32)live)
        : "memory");
}
DEVICE void store16_if(u64 to, uint4 v, bool live) {
    asm volatile(
        "{\n.reg .pred live;\nsetp.ne.u32 live, %5, 0;\n@live st.global.v4.u32 [%0], {%1,%2,%3,%4};\n}" ::"l"(to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((u32)live)
        : "memory");
}
DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last `pending` commits have arrived, for all lanes.
template <u32 pending> DEVICE void arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
    __syncwarp();
}
DEVICE u32 clamp16(u32 bytes) { return bytes < 16 ? bytes : 16; }

DEVICE uint4 shared16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
DEVICE uint2 shared8(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
DEVICE u32 shared4(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(at));
    return v;
}
DEVICE void keep4(u32 to, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }
DEVICE void keep16(u32 to, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void keep8(u32 to, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to), "r"(v.x), "r"(v.y) : "memory");
}
// Four matrices of 8 by 8 elements: lane l names row l % 8 of matrix l / 8, and gets elements 2q and 2q+1 of row g of
// each.
DEVICE uint4 matrices(u32 row) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(row));
    return v;
}

DEVICE u32 from_lane(u32 value, u32 lane) { return __shfl_sync(~0u, value, lane); }
DEVICE u64 from_lane(u64 value, u32 lane) { return __shfl_sync(~0u, value, lane); }
DEVICE float from_lane(float value, u32 lane) { return __shfl_sync(~0u, value, lane); }

// Packs in use: they come first.
DEVICE u32 live_packs(const Params& p, const u32* batch) {
    constexpr u32 TURNS = 8;
    const u32 lane = threadIdx.x % 32;
    u32 live = 0;
    for (u32 at = 0; at < p.tiles; at += TURNS * 32) {
        u32 here = 0;
#pragma unroll
        for (u32 i = 0; i < TURNS; i++) {
            const u32 pack = at + i * 32 + lane;
            here += pack < p.tiles && (int)batch[p.packs_at + (u64)PACK_WORDS * pack] >= 0;
        }
        here = __reduce_add_sync(~0u, here);
        live += here;
        if (here < TURNS * 32) break;
    }
    return live;
}

// A warp's share of `total` items: neighbours, as many as any other warp's or one less. The first warps of all blocks
// come first.
struct Share {
    u32 first, end;
};
DEVICE Share share_of(u32 total) {
    const u32 all = gridDim.x * (blockDim.x / 32), each = total / all, more = total % all;
    const u32 own = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    Share share;
    share.first = own * each + (own < more ? own : more);
    share.end = share.first + each + (own < more);
    return share;
}

// The next slot of a ring of SLOTS.
template <u32 SLOTS> DEVICE u32 after(u32 slot) { return slot + 1 == SLOTS ? 0 : slot + 1; }
// The same of an address in a ring that begins at `first`.
template <u32 SLOTS, u32 BYTES> DEVICE u32 after(u32 at, u32 first) {
    return at + BYTES == first + SLOTS * BYTES ? first : at + BYTES;
}
