// z[row][z_offset + r] = sum_k A[slot(tile)][r][k] * x[row][k], for r < rank: what the prefill shrinks for sm_90 and sm_90a share.
//
//   cluster  CLUSTER blocks: works of up to Way::TILES tiles of one slot, and of up to Way::MOST blocks of 8 ranks of all sites; the
//            blocks split the columns
//   block    its chunks of COLUMNS columns; x and A are fetched to shared memory some chunks ahead, as the way multiplies them
//   warp     fetches a tile of x; looks slots up for itself
//
// The blocks of a cluster take equal runs of chunks, by in_features alone. Order of a sum: a block's chunks ascending, the
// blocks of the cluster ascending. So all ways come to the same bits.
#pragma once
#include "prefill.cuh"

constexpr u32 CLUSTER = 8;
constexpr u32 COLUMNS = 64;
// Bytes of a warp's sums of a tile and a block of 8 ranks.
constexpr u32 SUMS = 512;
static_assert(MAX_SITES == 4, "two steps of a scan");

template <u32 SPACE> struct alignas(128) Shared {
    // The rings, and then what the cluster's sums are added up in.
    unsigned char space[SPACE];
    Tiles tiles;
    // A bit for each tile that begins a work.
    u32 works[WINDOW / 32];
};

// Cuts the window's runs of one slot into works of at most TILES tiles, and tells how many there are.
template <u32 TILES, u32 SPACE> DEVICE u32 cut_works(Shared<SPACE>& shared) {
    const u32 i = threadIdx.x;
    if (i < WINDOW) {
        const bool begins = shared.tiles.slot[i] >= 0 && (i - run_begin(shared.tiles, i)) % TILES == 0;
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
template <u32 SPACE> DEVICE u32 work_begin(const Shared<SPACE>& shared, u32 i) {
    u32 word = 0, bits = shared.works[0];
    while (i >= (u32)__popc(bits)) i -= __popc(bits), bits = shared.works[++word];
    const u32 own = threadIdx.x % 32;
    const bool is = (bits >> own & 1) && (u32)__popc(bits & ((1u << own) - 1)) == i;
    return word * 32 + __ffs(__ballot_sync(0xffffffffu, is)) - 1;
}

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
template <u32 ROWS> struct Work {
    u32 begin, count;      // tiles
    u32 first, end;        // chunks of columns
    bool wide;             // whether x may be read by pieces
    const u16* x[ROWS];    // the lane's rows of the tile that the warp fetches, from its column on; any row where there is none
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

// A pass over a work's x for `blocks` blocks of ranks from `begin` on.
template <u32 ROWS> struct Pass {
    const Params& p;
    const u32* batch;
    const Work<ROWS>& work;
    const Matrices& matrices;
    const unsigned char* weights;      // a multiple of 16
    float* z;
    u32 begin, blocks;
    u32 early;                         // chunks of x that are on their way
};

// Where this block's sums of tiles go, in the blocks that own these: those of tile i in block i % CLUSTER.
struct Inboxes {
    u32 own, bytes;
    // Those of a tile.
    __device__ __forceinline__ u32 of(u32 tile) const { return address_in(own + tile / CLUSTER * bytes, tile % CLUSTER); }
};

// Adds up what the cluster's warps have, and writes it. BLOCKS: of ranks that there is room for. `give` stores the warp's sums, a
// block of ranks after the other, SUMS bytes each.
template <class Way, u32 BLOCKS, class F>
DEVICE void add_up(const Pass<Way::ROWS>& pass, const Shared<Way::SPACE>& shared, bool& waited, F give) {
    // Tiles that a block owns at most, and pieces of 16 bytes of the sums of one.
    constexpr u32 OWNED = (Way::TILES + CLUSTER - 1) / CLUSTER, INBOX = CLUSTER * BLOCKS * 32;
    static_assert(OWNED * INBOX * 16 <= Way::SPACE, "room for the sums");
    const Params& p = pass.p;
    const auto& work = pass.work;
    const u32 block = block_of_cluster();
    const u32 lane = lane_of(), warp = warp_of();
    const float4* const inbox = reinterpret_cast<const float4*>(shared.space) + lane;
    wait_groups<0>();
    cluster_arrive();
    // Where this lane's first sums go, before all have come.
    const u32 g = lane / 4, r = lane % 4 * 2;
    float* to[OWNED][2];
    bool is[OWNED][2], none[OWNED][2];
#pragma unroll
    for (u32 t = 0; t < OWNED; t++)
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const u32 tile = block + t * CLUSTER;
            const long long row = tile < work.count ? tile_row(p, shared.tiles, work.begin + tile, g + h * 8) : -1;
            is[t][h] = row >= 0;
            none[t][h] = is[t][h] && p.x_rows_at && x_row(p, pass.batch, (u32)row) == NO_ROW;
            to[t][h] = pass.z + ((is[t][h] ? (u64)row * p.z_stride : 0) + r);
        }
    Eight e = eight(pass.matrices, pass.begin + (warp < pass.blocks ? warp : 0));
    // All rings are free.
    cluster_wait();
    give(Inboxes{shared_address(inbox + block * BLOCKS * 32), INBOX * 16});
    cluster_arrive();
    if (!waited) {
        wait_for_last();
        waited = true;
    }
    cluster_wait();
    if (block >= work.count) return;
#pragma unroll 1
    for (u32 b = warp; b < pass.blocks; b += Way::TILES) {
        if (b >= Way::TILES) e = eight(pass.matrices, pass.begin + b);
#pragma unroll
        for (u32 t = 0; t < OWNED; t++) {
            if (t && block + t * CLUSTER >= work.count) break;
            const float4* const its = inbox + t * INBOX;
            float4 total = its[b * 32];
#pragma unroll
            for (u32 i = 1; i < CLUSTER; i++) {
                const float4 part = its[(i * BLOCKS + b) * 32];
                total = add4(total, part);
            }
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                float* const from = to[t][h] + (p.site[e.site].z_offset + e.rank);
                const float low = none[t][h] ? 0.0f : h ? total.z : total.x, high = none[t][h] ? 0.0f : h ? total.w : total.y;
                if (!is[t][h]) continue;
                if (r + 1 < e.left && ((u64)from & 7) == 0) {
                    *reinterpret_cast<float2*>(from) = make_float2(low, high);
                } else {
                    if (r < e.left) from[0] = low;
                    if (r + 1 < e.left) from[1] = high;
                }
            }
        }
    }
}

// All works. Way: how a pass fetches and multiplies; it has a warp for each of TILES.
template <class Way>
DEVICE void shrink(const u32* batch, const u32* tables, const unsigned char* weights, const u16* x, float* z, const Params& p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared<Way::SPACE>& shared = *reinterpret_cast<Shared<Way::SPACE>*>(memory);
    // Where x may be read at once, only z waits for the launch before, and the next one may start beside this.
    bool waited = false;
    if (p.z_parts) launch_next();
    static_assert(Way::TILES * 32 >= WINDOW, "a thread for each tile");
    const u32 lane = lane_of(), warp = warp_of();
    // A's pieces are counted from a multiple of their length.
    const u32 skew = (u64)weights & 15;
    weights -= skew;
    const u32 block = block_of_cluster();
    const u32 chunks = div_ceil(p.in_features, COLUMNS), share = div_ceil(chunks, CLUSTER);
    const u32 x_to = Way::x_to(shared_address(shared.space));
    // Passes that the largest ranks take.
    const u32 passes = div_ceil(p.sites * div_ceil(p.max_rank, 8), Way::MOST);
    // Chunks of x that there is a place for, however many ranks the slot has.
    const u32 early = Way::early(p.sites * div_ceil(p.max_rank, 8));
    // Works of the windows before; which ones are this cluster's.
    u32 before = 0, next = blockIdx.x / CLUSTER;
    const u32 tiles = tiles_of(p, batch);
    for (u32 window = 0; window < tiles; window += WINDOW) {
        read_tiles(p, batch, window, shared.tiles);
        const u32 works = cut_works<Way::TILES>(shared) * passes;
        for (; next < before + works; next += gridDim.x / CLUSTER) {
            u32 at = next - before, number = 0;
            if (passes > 1) number = at % passes, at /= passes;
            Work<Way::ROWS> work;
            work.begin = work_begin(shared, at);
            work.count = run_end(shared.tiles, work.begin) - work.begin;
            if (work.count > Way::TILES) work.count = Way::TILES;
            work.first = block * share < chunks ? block * share : chunks;
            work.end = work.first + share < chunks ? work.first + share : chunks;
            // Of no rows none is read.
            if (p.rows == 0 || (p.x_rows_at && p.x_rows == 0)) work.end = work.first;
            work.wide = is_wide(x, p.x_stride);
#pragma unroll
            for (u32 i = 0; i < Way::ROWS; i++) {
                const long long of = warp < work.count ? tile_row(p, shared.tiles, work.begin + warp, Way::row(i)) : -1;
                const u32 row = of < 0 ? NO_ROW : x_row(p, batch, (u32)of);
                work.x[i] = x + ((row == NO_ROW ? 0 : (u64)row * p.x_stride) + Way::column());
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
                if (work.first + s < work.end) Way::fetch_x(p, work, x_to + s * Way::X_STAGE, work.first + s);
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
            if (all > Way::MOST) each = div_ceil(all, div_ceil(all, Way::MOST)), begin = number * each;
            else if (number) begin = all;
            if (begin >= all) {
                end_group();
                wait_groups<0>();
                continue;
            }
            Pass<Way::ROWS> pass = {p, batch, work, matrices, weights, z, begin, all - begin, early};
            if (pass.blocks > each) pass.blocks = each;
            Way::run(pass, shared, waited);
        }
        before += works;
    }
    if (!waited) {
        wait_for_last();
        if (p.z_parts == 0) launch_next();
    }
}

// The entry of a way for elements `name`; so many blocks of it fit on a multiprocessor.
#define SHRINK(name, WAY, RESIDENT)                                                                                    \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WAY::TILES * 32, RESIDENT)            \
        lorapool_sgmv_shrink_##name##_##name(const u32* __restrict__ batch, const u32* __restrict__ tables,            \
                                             const unsigned char* __restrict__ weights, const u16* x, float* z,        \
                                             const __grid_constant__ Params p) {                                       \
        shrink<WAY>(batch, tables, weights, x, z, p);                                                                  \
    }
