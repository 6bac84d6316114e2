// z[row][z_offset + r] = sum_k A[slot(tile)][r][k] * x[row][k], for r < rank: prefill in bf16 for sm_90.
//
//   cluster  CLUSTER blocks: TILES tiles of rows, one site, BLOCKS * 8 ranks; the blocks split the columns
//   warp     chunks of COLUMNS columns; x is the 16-row side of the product, A the 8-column side, read once for all the
//            tiles that share a slot
//
// All warps of a cluster take equal runs of chunks, by in_features alone. Order of a sum: a warp's chunks ascending,
// the warps of a block ascending, the blocks of the cluster ascending.
#include "sm90.cuh"

// Blocks of a cluster.
constexpr u32 CLUSTER = 8;
constexpr u32 COLUMNS = 32;
constexpr u32 TILES = 4;
constexpr u32 TILE_ROWS = SGMV_TILE_ROWS;
constexpr u32 ROWS = TILES * TILE_ROWS;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 OWN_ROWS = ROWS / CLUSTER;
constexpr u32 MAX_BLOCKS = 4;
static_assert(TILE_ROWS == 16 && OWN_ROWS == 8, "a tile is a product's 16 rows; a block adds up half a tile");

template <u32 BLOCKS>
DEVICE void shrink(const u32* batch, const u32* tables, const unsigned char* weights, const u16* x, float* z,
                   const Params& p, float* memory, u32 block) {
    constexpr u32 WIDTH = BLOCKS * 8;
    float* sums = memory;                            // [WARPS][ROWS][WIDTH]
    float* inbox = memory + WARPS * ROWS * WIDTH;    // [2][CLUSTER][OWN_ROWS][WIDTH]
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const u32 chunks = div_ceil(p.in_features, COLUMNS);
    const u32 share = div_ceil(chunks, CLUSTER * WARPS);
    const u32 first = (block * WARPS + warp) * share;
    const u32 end = first + share < chunks ? first + share : chunks;
    const SiteParams& site = p.site[blockIdx.z];
    const u32 rank_first = blockIdx.y * WIDTH;
    const u32 tile_first = blockIdx.x / CLUSTER * TILES;
    const bool x_wide = is_wide(x, p.x_stride);

    int slot[TILES];
    u32 todo = 0;
#pragma unroll
    for (u32 t = 0; t < TILES; t++) {
        slot[t] = -1;
        if (tile_first + t >= p.tiles) continue;
        const Rows rows = tile_rows(p, batch, tile_first + t);
        slot[t] = rows.slot;
        if (rows.slot >= 0 && rows.count) todo |= 1 << t;
    }
    u32 buffer = 0;
    // Tiles of one slot together. All threads of a cluster take the same turns.
    while (todo) {
        const int now = todo & 1 ? slot[0] : todo & 2 ? slot[1] : todo & 4 ? slot[2] : slot[3];
        u32 active = 0;
#pragma unroll
        for (u32 t = 0; t < TILES; t++)
            if ((todo >> t & 1) && slot[t] == now) active |= 1 << t;
        todo &= ~active;
        const Pair pair = pair_of(p, site, tables, now);
        if (rank_first >= pair.rank) continue;
        const u32 ranks = pair.rank - rank_first;
        const u16* a = reinterpret_cast<const u16*>(weights + pair.offset) + (u64)(rank_first + g) * p.a_stride + q * 8;
        long long low[TILES], high[TILES];
#pragma unroll
        for (u32 t = 0; t < TILES; t++) {
            low[t] = high[t] = -1;
            if (!(active >> t & 1)) continue;
            const Rows rows = tile_rows(p, batch, tile_first + t);
            low[t] = row_of(p, rows, g);
            high[t] = row_of(p, rows, g + 8);
        }
        float sum[TILES][BLOCKS][4];
#pragma unroll
        for (u32 t = 0; t < TILES; t++)
#pragma unroll
            for (u32 b = 0; b < BLOCKS; b++) sum[t][b][0] = sum[t][b][1] = sum[t][b][2] = sum[t][b][3] = 0.0f;
#pragma unroll 1
        for (u32 chunk = first; chunk < end; chunk++) {
            const u32 k = chunk * COLUMNS;
            const bool whole = k + COLUMNS <= p.in_features;
            const u32 count = saturating(p.in_features, k + q * 8);
            uint4 v[TILES][2], w[BLOCKS];
            if (whole && x_wide) {
#pragma unroll
                for (u32 t = 0; t < TILES; t++) {
                    v[t][0] = low[t] < 0 ? make_uint4(0, 0, 0, 0)
                                         : *reinterpret_cast<const uint4*>(x + ((u64)low[t] * p.x_stride + k + q * 8));
                    v[t][1] = high[t] < 0 ? make_uint4(0, 0, 0, 0)
                                          : *reinterpret_cast<const uint4*>(x + ((u64)high[t] * p.x_stride + k + q * 8));
                }
            } else {
#pragma unroll
                for (u32 t = 0; t < TILES; t++) {
                    v[t][0] = some8(x + ((u64)(low[t] < 0 ? 0 : low[t]) * p.x_stride + k + q * 8), low[t] < 0 ? 0 : count);
                    v[t][1] = some8(x + ((u64)(high[t] < 0 ? 0 : high[t]) * p.x_stride + k + q * 8), high[t] < 0 ? 0 : count);
                }
            }
#pragma unroll
            for (u32 b = 0; b < BLOCKS; b++) {
                const u16* from = a + b * 8 * (u64)p.a_stride + k;
                if (whole) w[b] = b * 8 + g < ranks ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
                else w[b] = some8(from, b * 8 + g < ranks ? count : 0);
            }
#pragma unroll
            for (u32 t = 0; t < TILES; t++)
#pragma unroll
                for (u32 b = 0; b < BLOCKS; b++) {
                    mma(sum[t][b], v[t][0].x, v[t][1].x, v[t][0].y, v[t][1].y, w[b].x, w[b].y);
                    mma(sum[t][b], v[t][0].z, v[t][1].z, v[t][0].w, v[t][1].w, w[b].z, w[b].w);
                }
        }
        // sum: ranks 2q and 2q+1 of rows g and g+8.
        float* mine = sums + warp * ROWS * WIDTH;
#pragma unroll
        for (u32 t = 0; t < TILES; t++)
#pragma unroll
            for (u32 b = 0; b < BLOCKS; b++) {
                float* to = mine + (t * TILE_ROWS + g) * WIDTH + b * 8 + 2 * q;
                *reinterpret_cast<float2*>(to) = make_float2(sum[t][b][0], sum[t][b][1]);
                *reinterpret_cast<float2*>(to + 8 * WIDTH) = make_float2(sum[t][b][2], sum[t][b][3]);
            }
        __syncthreads();
        // Block i of the cluster adds up rows 8i..8i+8.
        for (u32 e = threadIdx.x; e < ROWS * WIDTH; e += THREADS) {
            const u32 row = e / WIDTH;
            float total = sums[e];
#pragma unroll
            for (u32 w = 1; w < WARPS; w++) total = __fadd_rn(total, sums[w * ROWS * WIDTH + e]);
            const u32 at = ((buffer * CLUSTER + block) * OWN_ROWS + row % OWN_ROWS) * WIDTH + e % WIDTH;
            u32 to = (u32)__cvta_generic_to_shared(inbox + at);
            asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(to) : "r"(row / OWN_ROWS));
            asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(total) : "memory");
        }
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        const u32 tile = block / 2;
        if (active >> tile & 1) {
            const Rows rows = tile_rows(p, batch, tile_first + tile);
            for (u32 e = threadIdx.x; e < OWN_ROWS * WIDTH; e += THREADS) {
                const u32 r = e % WIDTH;
                const long long row = row_of(p, rows, block % 2 * OWN_ROWS + e / WIDTH);
                const float* from = inbox + buffer * CLUSTER * OWN_ROWS * WIDTH + e;
                float total = from[0];
#pragma unroll
                for (u32 b = 1; b < CLUSTER; b++) total = __fadd_rn(total, from[b * OWN_ROWS * WIDTH]);
                if (row >= 0 && r < ranks) z[(u64)row * p.z_stride + site.z_offset + rank_first + r] = total;
            }
        }
        buffer ^= 1;
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 3)
    lorapool_sgmv_shrink_bf16_bf16(const u32* __restrict__ batch, const u32* __restrict__ tables,
                                   const unsigned char* __restrict__ weights, const u16* x, float* z,
                                   const __grid_constant__ Params p) {
    __shared__ __align__(16) float memory[(WARPS * ROWS + 2 * CLUSTER * OWN_ROWS) * MAX_BLOCKS * 8];
    launch_next();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    wait_for_last();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (p.max_rank <= 16) shrink<2>(batch, tables, weights, x, z, p, memory, block);
    else shrink<MAX_BLOCKS>(batch, tables, weights, x, z, p, memory, block);
}
