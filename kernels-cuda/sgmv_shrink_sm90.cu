// z[row][z_offset + r] = sum_k A[slot(tile)][r][k] * x[row][k], for r < rank: prefill in bf16 for sm_90.
//
//   cluster  CLUSTER blocks: works of up to CLUSTER tiles of one slot, and of up to MOST blocks of 8 ranks of all sites; the
//            blocks split the columns
//   block    its columns in two halves
//   warp     a half's chunks of COLUMNS columns for two of the tiles (i and i + 4); x is the 16-row side of the product, A
//            the 8-column side. Chunks are fetched to shared memory STAGES - 1 ahead, x into the lane's own places, A for all
//            warps of the half
//
// All halves of a cluster take equal runs of chunks, by in_features alone. Order of a sum: a half's chunks ascending, the
// halves of a block ascending, the blocks of the cluster ascending.
#include "prefill.cuh"

constexpr u32 CLUSTER = 8;
constexpr u32 COLUMNS = 32;
// Bytes of a block's rings and inbox, which are divided by how many blocks of ranks there are.
constexpr u32 SPACE = 106496;
constexpr u32 HALVES = 2;
constexpr u32 WARPS = 4 * HALVES;
constexpr u32 BLOCK = WARPS * 32;
// Blocks of 8 ranks that a pass takes at most.
constexpr u32 MOST = 8;
// Tiles of a warp.
constexpr u32 OWN = CLUSTER / 4;
constexpr u32 X_STAGE = OWN * 2 * 512;

// Shared memory of a pass of so many blocks of ranks: the inbox, then each warp's ring of x, then each half's of A.
template <u32 BLOCKS> struct Layout {
    static constexpr u32 A_STAGE = BLOCKS * 512;
    static constexpr u32 INBOX = CLUSTER * BLOCKS * 512;
    static constexpr u32 FIT = (SPACE - INBOX) / (WARPS * X_STAGE + HALVES * A_STAGE);
    static constexpr u32 STAGES = FIT < 6 ? FIT : 6;
    static constexpr u32 X = INBOX, A = X + WARPS * STAGES * X_STAGE;
    static_assert(STAGES >= 3 && STAGES * X_STAGE >= BLOCKS * 512, "a warp's sums go through its ring");
};
static_assert(BLOCK >= WINDOW && OWN == 2 && WARPS == MOST, "a thread for each tile, a warp for each block of ranks");

struct Shared {
    Tiles tiles;
    // First tiles of a window's work, and how many of them; tiles each.
    u32 begin[WINDOW];
    u32 count[WINDOW];
    u32 works[WINDOW / 32];
    // Of the slot at hand, for each site.
    u32 rank[MAX_SITES];
    u64 offset[MAX_SITES];
    alignas(16) unsigned char space[SPACE];
};

static_assert(sizeof(Shared) == 111728, "what launches count on");

// A block of 8 ranks: of which site, from which rank on.
struct Eight {
    u32 site;
    u32 rank;
    u32 left;   // ranks; 0: there is no such block
};

DEVICE Eight eight(const Params& p, const Shared& shared, u32 i) {
    for (u32 s = 0; s < p.sites; s++) {
        const u32 blocks = (shared.rank[s] + 7) / 8;
        if (i < blocks) return {s, i * 8, shared.rank[s] - i * 8};
        i -= blocks;
    }
    return {0, 0, 0};
}

// What a thread fetches: x, columns 8q.. of rows g and g + 8 of two tiles, and A, of ranks g of two blocks of ranks. Bytes of
// a piece that there are, 16 or none.
struct Source {
    const u16* x;
    const unsigned char* weights;
    u32 row[OWN][2];       // in pieces of 16 bytes from x on; where it can't be read by these, the rows' numbers
    u32 rank[2];           // in pieces from weights on
    u32 x_is[OWN][2];
    u32 a_is[2];
    bool second;           // whether there is a second tile
};

// Cuts the window's runs of one slot into works of at most CLUSTER tiles, and tells how many there are.
DEVICE u32 list_works(Shared& shared) {
    const u32 i = threadIdx.x;
    bool begins = false;
    u32 count = 0;
    if (i < WINDOW) {
        begins = shared.tiles.slot[i] >= 0 && (i - run_begin(shared.tiles, i)) % CLUSTER == 0;
        if (begins) {
            count = run_end(shared.tiles, i) - i;
            if (count > CLUSTER) count = CLUSTER;
        }
        const u32 bits = __ballot_sync(0xffffffffu, begins);
        if (i % 32 == 0) shared.works[i / 32] = bits;
    }
    __syncthreads();
    u32 before = 0, all = 0;
#pragma unroll
    for (u32 w = 0; w < WINDOW / 32; w++) {
        const u32 bits = shared.works[w];
        if (w < i / 32) before += __popc(bits);
        if (w == i / 32) before += __popc(bits & ((1u << i % 32) - 1));
        all += __popc(bits);
    }
    if (begins) shared.begin[before] = i, shared.count[before] = count;
    __syncthreads();
    return all;
}

// Bytes of this lane's piece of the chunk from column `k` on.
DEVICE u32 bytes_of(u32 k, u32 in_features) {
    if (k + COLUMNS <= in_features) return 16;
    const u32 left = saturating(in_features, k + threadIdx.x % 4 * 8);
    return left < 8 ? left * 2 : 16;
}

DEVICE void fetch_x(const Source& from, u32 to, u32 k, u32 bytes) {
#pragma unroll
    for (u32 t = 0; t < OWN; t++) {
        if (t && !from.second) break;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const u32 count = from.x_is[t][h] < bytes ? from.x_is[t][h] : bytes;
            copy16(to + (t * 2 + h) * 512, from.x + ((u64)from.row[t][h] * 8 + k), count);
        }
    }
}

template <u32 BLOCKS> DEVICE void fetch_a(const Source& from, u32 to, u32 k, u32 bytes) {
    const u32 first = threadIdx.x / 32 % 4;
#pragma unroll
    for (u32 i = 0; i < (BLOCKS > 4 ? 2 : 1); i++)
        if (BLOCKS % 4 == 0 || first + i * 4 < BLOCKS)
        copy16(to + i * 4 * 512, from.weights + ((u64)from.rank[i] * 16 + k * 2), from.a_is[i] < bytes ? from.a_is[i] : bytes);
}

// BLOCKS: of 8 ranks, at least as many as there are. Leaves the warp's part of the sums in `sum`. The first chunks are on
// their way.
template <u32 BLOCKS, bool WIDE>
DEVICE void multiply(const Params& p, const Source& from, u32 x_at, u32 a_at, u32 half,
                     u32 first, u32 end, float (&sum)[OWN][BLOCKS][4]) {
    constexpr u32 STAGES = Layout<BLOCKS>::STAGES, A_STAGE = Layout<BLOCKS>::A_STAGE;
    const u32 lane = threadIdx.x % 32;
    const u32 a_to = a_at + threadIdx.x % (BLOCK / HALVES) * 16, a_from = a_at + lane * 16;
#pragma unroll
    for (u32 t = 0; t < OWN; t++)
#pragma unroll
        for (u32 b = 0; b < BLOCKS; b++) sum[t][b][0] = sum[t][b][1] = sum[t][b][2] = sum[t][b][3] = 0.0f;
    u32 stage = 0, ahead = STAGES - 1;
#pragma unroll 1
    for (u32 chunk = first; chunk < end; chunk++) {
        wait_groups<STAGES - 2>();
        asm volatile("bar.sync %0, %1;" ::"r"(half + 1), "n"(BLOCK / HALVES) : "memory");
        if (chunk + STAGES - 1 < end) {
            const u32 k = (chunk + STAGES - 1) * COLUMNS, bytes = bytes_of(k, p.in_features);
            if (WIDE) fetch_x(from, x_at + ahead * X_STAGE, k, bytes);
            fetch_a<BLOCKS>(from, a_to + ahead * A_STAGE, k, bytes);
        }
        end_group();
        uint4 v[OWN][2];
#pragma unroll
        for (u32 t = 0; t < OWN; t++)
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                if (WIDE) {
                    v[t][h] = read16(x_at + stage * X_STAGE + (t * 2 + h) * 512);
                } else {
                    const u32 k = chunk * COLUMNS, left = from.x_is[t][h] ? saturating(p.in_features, k + lane % 4 * 8) : 0;
                    v[t][h] = some8(from.x + (left ? (u64)from.row[t][h] * p.x_stride + k + lane % 4 * 8 : 0), left);
                }
            }
#pragma unroll
        for (u32 b = 0; b < BLOCKS; b++) {
            const uint4 w = read16(a_from + stage * A_STAGE + b * 512);
#pragma unroll
            for (u32 t = 0; t < OWN; t++) {
                mma(sum[t][b], v[t][0].x, v[t][1].x, v[t][0].y, v[t][1].y, w.x, w.y);
                mma(sum[t][b], v[t][0].z, v[t][1].z, v[t][0].w, v[t][1].w, w.z, w.w);
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
    }
}

// Adds up what the cluster's warps have, and writes it: tile i by block i.
template <u32 BLOCKS>
DEVICE void add_up(const Params& p, Shared& shared, u32 block, u32 begin, u32 count, u32 pass, float* z,
                   float (&sum)[OWN][BLOCKS][4]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp / 4, pair = warp % 4;
    // Half h adds up the warp's tile h; the other tile's sums go through the warp's own places of x.
    typedef Layout<BLOCKS> Places;
    constexpr u32 RING = Places::STAGES * X_STAGE;
    float4* const give = reinterpret_cast<float4*>(shared.space + Places::X + warp * RING) + lane;
    const float4* const take =
        reinterpret_cast<const float4*>(shared.space + Places::X + ((half ^ 1) * 4 + pair) * RING) + lane;
    const float4* const inbox = reinterpret_cast<const float4*>(shared.space) + lane;
    wait_groups<0>();
    __syncwarp();
#pragma unroll
    for (u32 b = 0; b < BLOCKS; b++) {
        const float(&s)[4] = sum[0][b], (&t)[4] = sum[1][b];
        give[b * 32] = half ? make_float4(s[0], s[1], s[2], s[3]) : make_float4(t[0], t[1], t[2], t[3]);
    }
    __syncthreads();
    // The inboxes are free: their last contents have been read.
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    const u32 owner = pair + half * 4;
    if (owner < count) {
        u32 to = shared_address(inbox + block * BLOCKS * 32);
        asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(to) : "r"(owner));
#pragma unroll
        for (u32 b = 0; b < BLOCKS; b++) {
            const float4 other = take[b * 32];
            const float(&s)[4] = sum[0][b], (&t)[4] = sum[1][b];
            const float4 own = half ? make_float4(t[0], t[1], t[2], t[3]) : make_float4(s[0], s[1], s[2], s[3]);
            const float4 low = half ? other : own, high = half ? own : other;
            asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + b * 512), "f"(__fadd_rn(low.x, high.x)),
                         "f"(__fadd_rn(low.y, high.y)), "f"(__fadd_rn(low.z, high.z)), "f"(__fadd_rn(low.w, high.w))
                         : "memory");
        }
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    const Eight ranks = eight(p, shared, pass * MOST + warp);
    if (block < count && warp < BLOCKS && ranks.left) {
        float4 total = inbox[warp * 32];
#pragma unroll
        for (u32 i = 1; i < CLUSTER; i++) {
            const float4 part = inbox[(i * BLOCKS + warp) * 32];
            total = make_float4(__fadd_rn(total.x, part.x), __fadd_rn(total.y, part.y), __fadd_rn(total.z, part.z),
                                __fadd_rn(total.w, part.w));
        }
        const u32 r = lane % 4 * 2;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const long long row = tile_row(p, shared.tiles, begin + block, lane / 4 + h * 8);
            if (row < 0) continue;
            float* to = z + ((u64)row * p.z_stride + p.site[ranks.site].z_offset + ranks.rank + r);
            const float low = h ? total.z : total.x, high = h ? total.w : total.y;
            if (r + 1 < ranks.left && ((u64)to & 7) == 0) {
                *reinterpret_cast<float2*>(to) = make_float2(low, high);
            } else {
                if (r < ranks.left) to[0] = low;
                if (r + 1 < ranks.left) to[1] = high;
            }
        }
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// What a pass is about.
struct Pass {
    u32 block;
    u32 begin, count;      // tiles
    u32 first, end;        // chunks
    u32 number;
    bool early;            // whether x may be read before the launch before has ended
};

template <u32 BLOCKS, bool WIDE>
DEVICE void run_pass(const Params& p, Shared& shared, const Source& from, float* z,
                     const Pass& pass, bool& waited) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp / 4;
    typedef Layout<BLOCKS> Places;
    constexpr u32 STAGES = Places::STAGES, A_STAGE = Places::A_STAGE;
    const u32 space = shared_address(shared.space);
    const u32 x_at = space + Places::X + warp * STAGES * X_STAGE + lane * 16;
    const u32 a_at = space + Places::A + half * STAGES * A_STAGE;
    const u32 a_to = a_at + threadIdx.x % (BLOCK / HALVES) * 16;
#pragma unroll 1
    for (u32 s = 0; s < STAGES - 1; s++) {
        const u32 k = (pass.first + s) * COLUMNS;
        if (pass.first + s < pass.end) fetch_a<BLOCKS>(from, a_to + s * A_STAGE, k, bytes_of(k, p.in_features));
    }
    if (!waited && !pass.early) {
        wait_for_last();
        launch_next();
        waited = true;
    }
#pragma unroll 1
    for (u32 s = 0; s < STAGES - 1; s++) {
        const u32 k = (pass.first + s) * COLUMNS;
        if (WIDE && pass.first + s < pass.end) fetch_x(from, x_at + s * X_STAGE, k, bytes_of(k, p.in_features));
        end_group();
    }
    if (!waited) {
        wait_for_last();
        launch_next();
        waited = true;
    }
    float sum[OWN][BLOCKS][4];
    multiply<BLOCKS, WIDE>(p, from, x_at, a_at, half, pass.first, pass.end, sum);
    add_up<BLOCKS>(p, shared, pass.block, pass.begin, pass.count, pass.number, z, sum);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(BLOCK, 2)
    lorapool_sgmv_shrink_bf16_bf16(const u32* __restrict__ batch, const u32* __restrict__ tables,
                                   const unsigned char* __restrict__ weights, const u16* x, float* z,
                                   const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp / 4, g = lane / 4, q = lane % 4;
    const u32 chunks = div_ceil(p.in_features, COLUMNS), share = div_ceil(chunks, CLUSTER * HALVES);
    const u32 first = (block * HALVES + half) * share;
    const u32 end = first + share < chunks ? first + share : chunks;
    const bool wide = is_wide(x, p.x_stride), early = p.z_parts != 0;
    // A's pieces are counted from a multiple of their length.
    const u32 skew = (u64)weights & 15;
    // Passes that the largest ranks take.
    const u32 passes = div_ceil(p.sites * div_ceil(p.max_rank, 8), MOST);
    // Works of the windows before; which ones are this cluster's.
    u32 before = 0, next = blockIdx.x / CLUSTER;
    bool waited = false;
    for (u32 window = 0; window < p.tiles; window += WINDOW) {
        read_tiles(p, batch, window, shared.tiles);
        const u32 works = list_works(shared);
        for (; next < before + works * passes; next += gridDim.x / CLUSTER) {
            const u32 work = (next - before) % works, number = (next - before) / works;
            const u32 begin = shared.begin[work], count = shared.count[work];
            __syncthreads();
            if (threadIdx.x < p.sites) {
                const Pair pair = pair_of(p, p.site[threadIdx.x], tables, shared.tiles.slot[begin]);
                shared.rank[threadIdx.x] = pair.rank;
                shared.offset[threadIdx.x] = pair.offset;
            }
            Source from;
            from.x = x, from.weights = weights - skew;
            from.second = warp % 4 + 4 < count;
#pragma unroll
            for (u32 t = 0; t < OWN; t++)
#pragma unroll
                for (u32 h = 0; h < 2; h++) {
                    const u32 tile = warp % 4 + t * 4;
                    const long long of = tile < count ? tile_row(p, shared.tiles, begin + tile, g + h * 8) : -1;
                    const u32 its = of < 0 ? NO_ROW : x_row(p, batch, (u32)of);
                    from.row[t][h] = its == NO_ROW ? 0 : wide ? (u32)(((u64)its * p.x_stride + q * 8) / 8) : its;
                    from.x_is[t][h] = its == NO_ROW ? 0 : 16;
                }
            __syncthreads();
            u32 blocks = 0;
            for (u32 s = 0; s < p.sites; s++) blocks += (shared.rank[s] + 7) / 8;
            if (number * MOST >= blocks) continue;
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const Eight ranks = eight(p, shared, number * MOST + warp % 4 + i * 4);
                from.a_is[i] = g < ranks.left ? 16 : 0;
                from.rank[i] = 0;
                if (from.a_is[i])
                    from.rank[i] =
                        (u32)((skew + shared.offset[ranks.site] + ((u64)(ranks.rank + g) * p.a_stride + q * 8) * 2) / 16);
            }
            const u32 left = blocks - number * MOST;
            const Pass pass = {block, begin, count, first, end, number, early};
            if (!wide) run_pass<MOST, false>(p, shared, from, z, pass, waited);
            else if (left <= 2) run_pass<2, true>(p, shared, from, z, pass, waited);
            else if (left <= 4) run_pass<4, true>(p, shared, from, z, pass, waited);
            else if (left <= 6) run_pass<6, true>(p, shared, from, z, pass, waited);
            else run_pass<8, true>(p, shared, from, z, pass, waited);
        }
        before += works * passes;
    }
    if (!waited) {
        wait_for_last();
        launch_next();
    }
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
