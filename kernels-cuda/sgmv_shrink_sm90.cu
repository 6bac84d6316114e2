// z[row][z_offset + r] = sum_k A[slot(tile)][r][k] * x[row][k], for r < rank: prefill in bf16 or f16 for sm_90.
//
//   cluster  CLUSTER blocks: works of up to CLUSTER tiles of one slot, and of up to MOST blocks of 8 ranks of all sites; the
//            blocks split the columns
//   block    its chunks of COLUMNS columns; x and A are fetched to shared memory STAGES - 1 chunks ahead, each piece as
//            ldmatrix wants it
//   warp     two of the tiles (i and i + 4), half of the blocks of ranks; x is the 16-row side of the product, A the 8-column
//            side. Each warp looks slots up for itself
//
// The blocks of a cluster take equal runs of chunks, by in_features alone. Order of a sum: a block's chunks ascending, the
// blocks of the cluster ascending.
#include "prefill.cuh"

constexpr u32 CLUSTER = 8;
constexpr u32 COLUMNS = 64;
constexpr u32 WARPS = 8;
constexpr u32 BLOCK = WARPS * 32;
// Bytes of a block's rings, in which the cluster's sums are added up, too.
constexpr u32 SPACE = 106496;
// Blocks of 8 ranks that a pass takes at most.
constexpr u32 MOST = 12;
// A lane's pieces of 8 rows or ranks by 32 columns.
constexpr u32 PIECES = 512;
// Those of a chunk of 8 rows or ranks.
constexpr u32 SLAB = COLUMNS / 32 * PIECES;
constexpr u32 X_STAGE = CLUSTER * 2 * SLAB;

// Rings of a pass in which each warp has so many blocks of ranks: x's, then A's. Copies to pieces that straddle lines of 128
// bytes take twice as long.
template <u32 EACH> struct Layout {
    static constexpr u32 BLOCKS = 2 * EACH;
    static constexpr u32 A_STAGE = BLOCKS * SLAB;
    static constexpr u32 FIT = SPACE / (X_STAGE + A_STAGE);
    static constexpr u32 STAGES = FIT < 5 ? FIT : 5;
    static constexpr u32 A = STAGES * X_STAGE;
    static_assert(STAGES >= 3 && CLUSTER * BLOCKS * PIECES <= SPACE, "two chunks ahead, and room for the sums");
};
static_assert(BLOCK >= WINDOW && WARPS == CLUSTER && CLUSTER == 8 && MAX_SITES == 4, "a warp for fetching each tile");

struct Shared {
    Tiles tiles;
    // A bit for each tile that begins a work.
    u32 works[WINDOW / 32];
    alignas(128) unsigned char space[SPACE];
};

static_assert(sizeof(Shared) == 109696, "what launches count on");

// Cuts the window's runs of one slot into works of at most CLUSTER tiles, and tells how many there are.
DEVICE u32 cut_works(Shared& shared) {
    const u32 i = threadIdx.x;
    if (i < WINDOW) {
        const bool begins = shared.tiles.slot[i] >= 0 && (i - run_begin(shared.tiles, i)) % CLUSTER == 0;
        const u32 bits = __ballot_sync(0xffffffffu, begins);
        if (i % 32 == 0) shared.works[i / 32] = bits;
    }
    __syncthreads();
    u32 all = 0;
#pragma unroll
    for (u32 w = 0; w < WINDOW / 32; w++) all += __popc(shared.works[w]);
    return all;
}

// The first tile of the window's `i`-th work, of which there are more. For whole warps.
DEVICE u32 work_begin(const Shared& shared, u32 i) {
    u32 word = 0, bits = shared.works[0];
    while (i >= (u32)__popc(bits)) i -= __popc(bits), bits = shared.works[++word];
    const u32 own = threadIdx.x % 32;
    const bool is = (bits >> own & 1) && (u32)__popc(bits & ((1u << own) - 1)) == i;
    return word * 32 + __ffs(__ballot_sync(0xffffffffu, is)) - 1;
}

// Where this lane's 16 bytes of a piece are: those of a row stay together in a line of 128 bytes, and any eight rows' of
// the same columns are in different banks.
DEVICE u32 place_in_piece(u32 row, u32 eighth) { return row * 64 + (eighth ^ row / 2) * 16; }

// The cluster's threads meet: what they have stored before they arrive is there for those that have waited.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE u32 block_of_cluster() {
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    return block;
}
// The address of what block `block` of the cluster has at this address of its own.
DEVICE u32 address_in(u32 at, u32 block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
    return there;
}
DEVICE void store_there(u32 to, const float (&v)[4]) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}

DEVICE u32 lane_of() { return threadIdx.x % 32; }
DEVICE u32 warp_of() { return threadIdx.x / 32; }

// Tiles of one slot, as one of a cluster's threads sees them.
struct Work {
    u32 begin, count;      // tiles
    u32 first, end;        // chunks of columns
    bool wide;             // whether x may be read by pieces
    const u16* x[2];       // rows g and g + 8 of the tile that the warp fetches, from column 8q on; any row where there is none
};

// The slot's matrices. Lane i has those of site i.
struct Matrices {
    u32 rank;
    u32 start;             // blocks of 8 ranks of the sites before
    u32 at;                // in pieces of 16 bytes from weights on
};

// A block of 8 ranks.
struct Eight {
    u32 site;
    u32 rank;              // its first
    u32 left;              // ranks from there on
    u32 matrix;
};

// The `b`-th of all blocks, of which there are more. For whole warps.
DEVICE Eight eight(const Matrices& matrices, u32 b) {
    const u32 site = __popc(__ballot_sync(0xffffffffu, lane_of() < MAX_SITES && matrices.start <= b)) - 1;
    const u32 rank = (b - from_lane(matrices.start, site)) * 8;
    return {site, rank, from_lane(matrices.rank, site) - rank, from_lane(matrices.at, site)};
}

// Where a lane's copies go, and the row of 8 columns that it names in one of a product's matrices.
DEVICE u32 own_place() { return place_in_piece(lane_of() / 4, lane_of() % 4); }

// Fetches x of a chunk: two slabs of the warp's tile.
DEVICE void fetch_x(const Params& p, const Work& work, u32 to, u32 chunk) {
    const u32 k = chunk * COLUMNS;
    if (warp_of() >= work.count) return;
    if (work.wide && k + COLUMNS <= p.in_features) {
#pragma unroll
        for (u32 h = 0; h < 2; h++)
#pragma unroll
            for (u32 c = 0; c < COLUMNS / 32; c++) copy_all16(to + h * SLAB + c * PIECES, work.x[h] + (k + c * 32));
    } else {
#pragma unroll 1
        for (u32 i = 0; i < 2 * COLUMNS / 32; i++) {
            const u32 at = k + i % (COLUMNS / 32) * 32;
            const u32 left = saturating(p.in_features, at + threadIdx.x % 4 * 8);
            const uint4 v = some8((i < COLUMNS / 32 ? work.x[0] : work.x[1]) + at, left);
            write16(to + i * PIECES, v);
        }
    }
}

// A pass over the work's x for `blocks` blocks of ranks from `begin` on, at most 2 * EACH.
template <class E, u32 EACH> struct Pass {
    typedef Layout<EACH> Places;
    static constexpr u32 STAGES = Places::STAGES, BLOCKS = Places::BLOCKS, A_STAGE = Places::A_STAGE;
    // Pieces of A that a thread fetches of a chunk; not all warps have the last.
    static constexpr u32 OWN = (BLOCKS * (COLUMNS / 32) + WARPS - 1) / WARPS;

    const Params& p;
    Shared& shared;
    const Work& work;
    const Matrices& matrices;
    const unsigned char* weights;      // a multiple of 16
    u32 begin, blocks, early;
    u32 x_to, a_to;                    // where this thread's pieces go
    u32 a[OWN];                        // in pieces of 16 bytes from weights on

    __device__ __forceinline__ void prepare() {
        x_to = shared_address(shared.space) + warp_of() * 2 * SLAB + own_place();
        a_to = shared_address(shared.space) + Places::A + warp_of() * PIECES + own_place();
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            const u32 piece = warp_of() + i * WARPS;
            const Eight e = eight(matrices, begin + (piece / 2 < blocks ? piece / 2 : 0));
            // Ranks that there aren't are of the first.
            const u32 g = e.rank + (lane_of() / 4 < e.left ? lane_of() / 4 : 0);
            a[i] = e.matrix + g * (p.a_stride / 8) + piece % 2 * 4 + lane_of() % 4;
        }
    }

    __device__ __forceinline__ void fetch_a(u32 to, u32 chunk) const {
        const u32 k = chunk * COLUMNS;
        if (k + COLUMNS <= p.in_features) {
#pragma unroll
            for (u32 i = 0; i < OWN; i++)
                if (warp_of() + i * WARPS < blocks * 2) copy_all16(to + i * WARPS * PIECES, weights + ((u64)a[i] * 16 + k * 2));
        } else {
            const u32 left = saturating(p.in_features, k + warp_of() % 2 * 32 + lane_of() % 4 * 8);
            const u32 bytes = left < 8 ? left * 2 : 16;
#pragma unroll
            for (u32 i = 0; i < OWN; i++)
                if (warp_of() + i * WARPS < blocks * 2)
                    copy16(to + i * WARPS * PIECES, weights + ((u64)a[i] * 16 + (bytes ? k * 2 : 0)), bytes);
        }
    }

    // x's first `early` chunks are on their way.
    __device__ __forceinline__ void multiply(float (&sum)[2][EACH][4]) const {
        const u32 lane = lane_of(), warp = warp_of();
        // Of x matrices are rows 0 and 8 on, of two blocks of 8 columns; of A four blocks of columns. The second half of
        // 32 columns is 2 blocks further: a bit of the place.
        const u32 x_row = shared_address(shared.space) + warp % 4 * 2 * SLAB + lane / 8 % 2 * SLAB;
        const u32 x_from = x_row + place_in_piece(lane % 8, lane / 16);
        const u32 a_from = shared_address(shared.space) + Places::A + warp / 4 * EACH * SLAB + place_in_piece(lane % 8, lane / 8);
#pragma unroll
        for (u32 t = 0; t < 2; t++)
#pragma unroll
            for (u32 b = 0; b < EACH; b++) sum[t][b][0] = sum[t][b][1] = sum[t][b][2] = sum[t][b][3] = 0.0f;
#pragma unroll 1
        for (u32 s = 0; s < STAGES - 1; s++) {
            if (work.first + s < work.end) {
                if (s >= early) fetch_x(p, work, x_to + s * X_STAGE, work.first + s);
                fetch_a(a_to + s * A_STAGE, work.first + s);
            }
            end_group();
        }
        u32 stage = 0;
#pragma unroll 1
        for (u32 chunk = work.first; chunk < work.end; chunk++) {
            wait_groups<STAGES - 2>();
            __syncthreads();
            if (chunk + STAGES - 1 < work.end) {
                // The place of the chunk before.
                const u32 ahead = stage ? stage - 1 : STAGES - 1;
                fetch_x(p, work, x_to + ahead * X_STAGE, chunk + STAGES - 1);
                fetch_a(a_to + ahead * A_STAGE, chunk + STAGES - 1);
            }
            end_group();
#pragma unroll
            for (u32 c = 0; c < COLUMNS / 32; c++) {
                u32 v[2][2][4];
#pragma unroll
                for (u32 t = 0; t < 2; t++)
#pragma unroll
                    for (u32 k = 0; k < 2; k++) load_matrices((x_from + stage * X_STAGE + t * 8 * SLAB + c * PIECES) ^ k * 32, v[t][k]);
#pragma unroll
                for (u32 b = 0; b < EACH; b++) {
                    u32 w[4];
                    load_matrices(a_from + stage * A_STAGE + b * SLAB + c * PIECES, w);
#pragma unroll
                    for (u32 k = 0; k < 2; k++)
#pragma unroll
                        for (u32 t = 0; t < 2; t++)
                            Words<E>::mma(sum[t][b], v[t][k][0], v[t][k][1], v[t][k][2], v[t][k][3], w[2 * k],
                                          w[2 * k + 1]);
                }
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
    }

    // Adds up what the cluster's warps have, and writes it: tile i by block i.
    __device__ __forceinline__ void add_up(const u32* batch, u32 block, float* z, const float (&sum)[2][EACH][4], bool& waited) const {
        const u32 lane = lane_of(), warp = warp_of();
        const float4* const inbox = reinterpret_cast<const float4*>(shared.space) + lane;
        wait_groups<0>();
        cluster_arrive();
        // Where this lane's first sums go, before all have come.
        const u32 g = lane / 4, r = lane % 4 * 2;
        float* to[2];
        bool is[2], none[2];
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const long long row = block < work.count ? tile_row(p, shared.tiles, work.begin + block, g + h * 8) : -1;
            is[h] = row >= 0;
            none[h] = is[h] && p.x_rows_at && x_row(p, batch, (u32)row) == NO_ROW;
            to[h] = z + ((is[h] ? (u64)row * p.z_stride : 0) + r);
        }
        Eight e = eight(matrices, begin + (warp < blocks ? warp : 0));
        // All rings are free.
        cluster_wait();
#pragma unroll
        for (u32 t = 0; t < 2; t++) {
            const u32 owner = warp % 4 + t * 4;
            if (owner >= work.count) continue;
            const u32 at = address_in(shared_address(inbox + (block * BLOCKS + warp / 4 * EACH) * 32), owner);
#pragma unroll
            for (u32 b = 0; b < EACH; b++) store_there(at + b * PIECES, sum[t][b]);
        }
        cluster_arrive();
        if (!waited) {
            wait_for_last();
            waited = true;
        }
        cluster_wait();
        if (block >= work.count) return;
#pragma unroll 1
        for (u32 b = warp; b < blocks; b += WARPS) {
            if (b >= WARPS) e = eight(matrices, begin + b);
            float4 total = inbox[b * 32];
#pragma unroll
            for (u32 i = 1; i < CLUSTER; i++) {
                const float4 part = inbox[(i * BLOCKS + b) * 32];
                total = add4(total, part);
            }
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                float* const from = to[h] + (p.site[e.site].z_offset + e.rank);
                const float low = none[h] ? 0.0f : h ? total.z : total.x, high = none[h] ? 0.0f : h ? total.w : total.y;
                if (!is[h]) continue;
                if (r + 1 < e.left && ((u64)from & 7) == 0) {
                    *reinterpret_cast<float2*>(from) = make_float2(low, high);
                } else {
                    if (r < e.left) from[0] = low;
                    if (r + 1 < e.left) from[1] = high;
                }
            }
        }
    }
};

template <class E, u32 EACH>
DEVICE void run_pass(const Params& p, Shared& shared, const Work& work, const Matrices& matrices, const u32* batch,
                     const unsigned char* weights, u32 begin, u32 blocks, u32 early, u32 block, float* z, bool& waited) {
    Pass<E, EACH> pass = {p, shared, work, matrices, weights, begin, blocks, early};
    pass.prepare();
    float sum[2][EACH][4];
    pass.multiply(sum);
    pass.add_up(batch, block, z, sum, waited);
}

template <class E>
DEVICE void shrink(const u32* batch, const u32* tables, const unsigned char* weights, const u16* x, float* z, const Params& p) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // Where x may be read at once, only z waits for the launch before, and the next one may start beside this.
    bool waited = false;
    if (p.z_parts) launch_next();
    const u32 lane = lane_of(), warp = warp_of();
    // A's pieces are counted from a multiple of their length.
    const u32 skew = (u64)weights & 15;
    weights -= skew;
    const u32 block = block_of_cluster();
    const u32 chunks = div_ceil(p.in_features, COLUMNS), share = div_ceil(chunks, CLUSTER);
    const u32 x_to = shared_address(shared.space) + warp * 2 * SLAB + own_place();
    // Passes that the largest ranks take.
    const u32 passes = div_ceil(p.sites * div_ceil(p.max_rank, 8), MOST);
    // Chunks of x that there is a place for, however many ranks the slot has.
    const u32 early = passes == 1 && p.sites * div_ceil(p.max_rank, 8) <= 6 ? Layout<3>::STAGES - 1 : 2;
    // Works of the windows before; which ones are this cluster's.
    u32 before = 0, next = blockIdx.x / CLUSTER;
    for (u32 window = 0; window < p.tiles; window += WINDOW) {
        read_tiles(p, batch, window, shared.tiles);
        const u32 works = cut_works(shared) * passes;
        for (; next < before + works; next += gridDim.x / CLUSTER) {
            u32 at = next - before, number = 0;
            if (passes > 1) number = at % passes, at /= passes;
            Work work;
            work.begin = work_begin(shared, at);
            work.count = run_end(shared.tiles, work.begin) - work.begin;
            if (work.count > CLUSTER) work.count = CLUSTER;
            work.first = block * share < chunks ? block * share : chunks;
            work.end = work.first + share < chunks ? work.first + share : chunks;
            // Of no rows none is read.
            if (p.rows == 0 || (p.x_rows_at && p.x_rows == 0)) work.end = work.first;
            work.wide = is_wide(x, p.x_stride);
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                const long long of = warp < work.count ? tile_row(p, shared.tiles, work.begin + warp, lane / 4 + h * 8) : -1;
                const u32 row = of < 0 ? NO_ROW : x_row(p, batch, (u32)of);
                work.x[h] = x + ((row == NO_ROW ? 0 : (u64)row * p.x_stride) + lane % 4 * 8);
            }
            if (!waited && p.z_parts == 0) {
                wait_for_last();
                launch_next();
                waited = true;
            }
            // All sums have been read.
            __syncthreads();
#pragma unroll 1
            for (u32 s = 0; s < early; s++)
                if (work.first + s < work.end) fetch_x(p, work, x_to + s * X_STAGE, work.first + s);
            Matrices matrices = {0, 0, 0};
            if (lane < p.sites) {
                const Pair pair = pair_of(p, p.site[lane], tables, shared.tiles.slot[work.begin]);
                matrices.rank = pair.rank, matrices.at = (u32)((skew + pair.offset) / 16);
            }
            const u32 own = (matrices.rank + 7) / 8;
            u32 past = own;
#pragma unroll
            for (u32 s = 1; s < MAX_SITES; s *= 2) {
                const u32 others = __shfl_up_sync(0xffffffffu, past, s);
                if (lane >= s) past += others;
            }
            matrices.start = past - own;
            const u32 all = from_lane(past, MAX_SITES - 1);
            // Passes of this slot, equal ones.
            u32 each = all, begin = 0;
            if (all > MOST) each = div_ceil(all, div_ceil(all, MOST)), begin = number * each;
            else if (number) begin = all;
            if (begin >= all) {
                end_group();
                wait_groups<0>();
                continue;
            }
            const u32 blocks = all - begin < each ? all - begin : each;
            if (blocks <= 2) run_pass<E, 1>(p, shared, work, matrices, batch, weights, begin, blocks, early, block, z, waited);
            else if (blocks <= 4) run_pass<E, 2>(p, shared, work, matrices, batch, weights, begin, blocks, early, block, z, waited);
            else if (blocks <= 6) run_pass<E, 3>(p, shared, work, matrices, batch, weights, begin, blocks, early, block, z, waited);
            else if (blocks <= 8) run_pass<E, 4>(p, shared, work, matrices, batch, weights, begin, blocks, early, block, z, waited);
            else run_pass<E, 6>(p, shared, work, matrices, batch, weights, begin, blocks, early, block, z, waited);
        }
        before += works;
    }
    if (!waited) {
        wait_for_last();
        if (p.z_parts == 0) launch_next();
    }
}

#define ENTRY(name, E)                                                                                                 \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(BLOCK, 2)                             \
        lorapool_sgmv_shrink_##name##_##name(const u32* __restrict__ batch, const u32* __restrict__ tables,            \
                                             const unsigned char* __restrict__ weights, const u16* x, float* z,        \
                                             const __grid_constant__ Params p) {                                       \
        shrink<E>(batch, tables, weights, x, z, p);                                                                    \
    }
ENTRY(bf16, Bf16)
ENTRY(f16, F16)
