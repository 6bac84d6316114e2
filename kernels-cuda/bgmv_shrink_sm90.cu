// z[row][z_offset + r] = sum_k A[slot(row)][r][k] * x[row][k], for r < rank: decode in bf16 for sm_90.
//
//   cluster  CLUSTER blocks: one pack of rows, one site, RANKS ranks; the blocks split the columns
//   warp     UNITS chunks of COLUMNS columns at a time; A is the 16-row side of the product, x the 8-column side
//
// All warps of a cluster take equal runs of chunks, by in_features alone. Order of a sum: a warp's chunks ascending,
// the warps of a block ascending, the blocks of the cluster ascending.
#include "sm90.cuh"

constexpr u32 COLUMNS = 32;
constexpr u32 UNITS = 4;
constexpr u32 MAX_WARPS = CLUSTER_THREADS / 32;
constexpr u32 TILE = PACK_ROWS * RANKS;


extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(CLUSTER_THREADS, 1)
    lorapool_bgmv_shrink_bf16_bf16(const u32* __restrict__ batch, const u32* __restrict__ tables,
                                   const unsigned char* __restrict__ weights, const u16* x, float* z,
                                   const __grid_constant__ Params p) {
    __shared__ float sums[MAX_WARPS][TILE];
    __shared__ float inbox[2][CLUSTER][RANKS];
    launch_next();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const u32 warps = blockDim.x / 32;
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");

    const u32 chunks = div_ceil(p.in_features, COLUMNS);
    const u32 share = div_ceil(chunks, CLUSTER * warps);
    const u32 first = (block * warps + warp) * share;
    const u32 end = first + share < chunks ? first + share : chunks;
    const SiteParams& site = p.site[blockIdx.z];
    const u32 rank_first = blockIdx.y * RANKS;
    const bool x_wide = is_wide(x, p.x_stride);
    bool waited = false;
    u32 buffer = 0;
    const u32 packs = pack_count(p);
    const bool regular = (p.a_stride & 7) == 0 && first + UNITS <= end && (first + UNITS) * COLUMNS <= p.in_features;
    for (u32 index = blockIdx.x / CLUSTER; index < packs; index += gridDim.x / CLUSTER) {
        const Rows8 rows = pack_rows(p, batch, index, g);
        if (rows.slot < 0 && p.packs_at) break;
        const Pair pair = pair_of(p, site, tables, rows.slot);
        // Here and above, all threads of the cluster go on or none.
        if (rank_first >= pair.rank) continue;
        const u16* a = reinterpret_cast<const u16*>(weights + pair.offset) + (u64)(rank_first + g) * p.a_stride + q * 8;
        const u16* x_row = x + (rows.row < 0 ? 0 : (u64)rows.row * p.x_stride) + q * 8;
        const bool whole = regular && rank_first + RANKS <= pair.rank;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        u32 from = first;
        do {
            uint4 low[UNITS], high[UNITS], v[UNITS];
            const u64 high_row = 8 * (u64)p.a_stride;
            const bool plain = whole && from == first;
            if (plain) {
#pragma unroll
                for (u32 u = 0; u < UNITS; u++) {
                    low[u] = stream16(a + (from + u) * COLUMNS);
                    high[u] = stream16(a + high_row + (from + u) * COLUMNS);
                }
            } else {
#pragma unroll
                for (u32 u = 0; u < UNITS; u++) {
                    const u32 k = (from + u) * COLUMNS;
                    const u32 count = from + u < end ? saturating(p.in_features, k + q * 8) : 0;
                    low[u] = some8(a + k, rank_first + g < pair.rank ? count : 0);
                    high[u] = some8(a + high_row + k, rank_first + g + 8 < pair.rank ? count : 0);
                }
            }
            if (!waited) {
                wait_for_last();
                asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
                waited = true;
            }
            if (plain && x_wide) {
#pragma unroll
                for (u32 u = 0; u < UNITS; u++)
                    v[u] = rows.row < 0 ? make_uint4(0, 0, 0, 0) : *reinterpret_cast<const uint4*>(x_row + (from + u) * COLUMNS);
            } else {
#pragma unroll
                for (u32 u = 0; u < UNITS; u++) {
                    const u32 k = (from + u) * COLUMNS;
                    v[u] = some8(x_row + k, from + u < end && rows.row >= 0 ? saturating(p.in_features, k + q * 8) : 0);
                }
            }
#pragma unroll
            for (u32 u = 0; u < UNITS; u++) {
                mma(sum, low[u].x, high[u].x, low[u].y, high[u].y, v[u].x, v[u].y);
                mma(sum, low[u].z, high[u].z, low[u].w, high[u].w, v[u].z, v[u].w);
            }
            from += UNITS;
        } while (from < end);
        // sum: ranks g and g+8 of rows 2q and 2q+1.
        sums[warp][2 * q * RANKS + g] = sum[0];
        sums[warp][(2 * q + 1) * RANKS + g] = sum[1];
        sums[warp][2 * q * RANKS + g + 8] = sum[2];
        sums[warp][(2 * q + 1) * RANKS + g + 8] = sum[3];
        __syncthreads();
        // Block i of the cluster adds up row i of the pack.
        for (u32 e = threadIdx.x; e < TILE; e += blockDim.x) {
            float total = sums[0][e];
            for (u32 w = 1; w < warps; w++) total = __fadd_rn(total, sums[w][e]);
            u32 to = (u32)__cvta_generic_to_shared(&inbox[buffer][block][e % RANKS]);
            asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(to) : "r"(e / RANKS));
            asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(total) : "memory");
        }
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        if (threadIdx.x < RANKS && rank_first + threadIdx.x < pair.rank) {
            const Rows8 mine = pack_rows(p, batch, index, block);
            float total = inbox[buffer][0][threadIdx.x];
#pragma unroll
            for (u32 b = 1; b < CLUSTER; b++) total = __fadd_rn(total, inbox[buffer][b][threadIdx.x]);
            if (mine.row >= 0) z[(u64)mine.row * p.z_stride + site.z_offset + rank_first + threadIdx.x] = total;
        }
        buffer ^= 1;
    }
    if (!waited) {
        if (is_first_block()) wait_for_last();
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}
