// y[row][n] += scale * sum_r B[slot(tile)][n][r] * z[row][z_offset + r], rounded once: what the prefill expands for sm_90 and sm_90a
// share.
//
//   grid     at most as many blocks as fit at once; each takes an equal share of all pairs of (Way::OUTPUTS outputs of a site,
//            tile), tiles innermost
//   block    one warp looks up the share's runs of tiles of one slot, and fetches their parts of B to shared memory, a run
//            ahead; the others, Way::WARPS, work
//   warp     a tile at a time: 16 rows by OUTPUTS outputs, STEP of them at a time, in an order in which each lane has eight adjacent
//            ones. The next tile's y and z are fetched while this one is worked on, y into the lane's own places
//
// Vectors behind B change y as the contract says.
#pragma once
#include "prefill.cuh"

// Runs that are known at a time, and places for the B of some of them at most: Way::PLACES.
constexpr u32 KNOWN = 8;
constexpr u32 MOST_PLACES = 4;

// Tiles `begin..end` of the window, all of one slot, and outputs from `first` on of a site. y goes by steps in pieces of
// 16 bytes where its rows allow it; what is left is done by elements. The last run of a window has no tiles.
struct Run {
    u16* y;                // output `first` of row 0
    const float* z;        // of row 0
    const float* gains;    // of the site's outputs; null: none
    u32 y_stride;
    u32 rank;
    float scale;
    u32 steps;
    u32 rest;              // outputs that steps leave
    u32 first;
    u32 site;
    u32 begin;
    u32 end;
};

struct Shared {
    u64 full[MOST_PLACES];  // a run's B has come
    u64 empty[MOST_PLACES]; // all warps have done with it
    u64 told[KNOWN];        // a run is known
    Run runs[KNOWN];
    Tiles tiles;
};

// What a lane has of a tile: rows g and g + 8, outputs 8q on.
struct Mine {
    u16* y;                // output 8q of the run, row g
    u32 row;               // g's
    u32 is[2];             // whether the rows are there
    float scale[2];
};

// What a warp goes by. A way adds where B is and how it is multiplied:
//
//   fetch_b(run, b, place)   by the warp that looks up; tell_b(r) when it has come
//   first(run, turn)         the first of this warp's tiles of a run, or that of its neighbours' where they work together; none: at
//                            least the run's end. `turn`: turns(run) of all runs before
//   tile(run, t), fetch_y(y_stride, mine, step), fetch_z(run, mine)
//   work<VECTORS>(r, turn, own)   this warp's tiles of run `r`, the first of which is `own` and on its way, as is the one it leaves
//                            there
struct Warp {
    const Params& p;
    const u32* batch;
    const float* z;
    Shared& shared;
    u32 b_at;              // address of B's places
    u32 ring;              // address of this lane's first piece of y
    u32 z_ring;            // address of this warp's z
    bool z_wide;
    u32 lane, warp;

    __device__ __forceinline__ Mine tile(const Run& run, u32 t) const {
        Mine mine;
        mine.row = shared.tiles.first[t] - p.row_first + lane / 4;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            mine.is[h] = tile_row(p, shared.tiles, t, lane / 4 + h * 8) >= 0;
            mine.scale[h] = mine.is[h] ? row_scale(p, batch, mine.row + h * 8) : 0.0f;
        }
        mine.y = run.y + ((long long)(int)mine.row * run.y_stride + lane % 4 * 8);
        return mine;
    }

    // Fetches z of a tile: of each of CHUNKS 16 rows of 64 bytes, the halves of every other two rows exchanged.
    template <u32 CHUNKS> __device__ __forceinline__ void fetch_chunks(const Run& run, const Mine& mine) const {
        const u32 q = lane % 4, rank = run.rank;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const float* row = mine.is[h] ? run.z + ((u64)(mine.row + h * 8) * p.z_stride + q * 4) : z;
            const u32 place = z_ring + (lane / 4 + h * 8) * 64 + (q ^ lane / 8 % 2 * 2) * 16;
            if (z_wide) {
#pragma unroll
                for (u32 c = 0; c < CHUNKS; c++) {
                    const u32 left = mine.is[h] ? saturating(rank, c * RANKS + q * 4) : 0;
                    copy16(place + c * 1024, left ? row + c * RANKS : z, left < 4 ? left * 4 : 16);
                }
            } else {
#pragma unroll 1
                for (u32 c = 0; c < CHUNKS; c++)
#pragma unroll 1
                    for (u32 i = 0; i < 4; i++) {
                        const bool is = mine.is[h] && c * RANKS + q * 4 + i < rank;
                        const float value = is ? __ldcg(row + c * RANKS + i) : 0.0f;
                        asm volatile("st.shared.f32 [%0], %1;" ::"r"(place + c * 1024 + i * 4), "f"(value) : "memory");
                    }
            }
        }
    }

    // This lane's ranks 2q, 2q + 1, 2q + 8 and 2q + 9 of rows g and g + 8 of a chunk.
    __device__ __forceinline__ void read_z(u32 c, float2 (&f)[4]) const {
        const u32 g = lane / 4, q = lane % 4;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 piece = (q / 2 + i / 2 * 2) ^ g / 2 % 2 * 2;
            const u32 from = z_ring + c * 1024 + (g + i % 2 * 8) * 64 + piece * 16 + q % 2 * 8;
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(f[i].x), "=f"(f[i].y) : "r"(from) : "memory");
        }
    }
};

// The producer's part of a window: looks up `left` pairs of outputs and tile from outputs `first` of `site` and `tile`
// on. `r`: runs so far.
template <class Way>
DEVICE void produce(const Way& way, const u32* tables, const unsigned char* weights, void* y0, void* y1, void* y2, void* y3,
                    u32 in_window, u32 site, u32 first, u32 tile, u32 left, u32& r) {
    constexpr u32 OUTPUTS = Way::OUTPUTS, STEP = Way::STEP;
    const Params& p = way.p;
    Shared& shared = way.shared;
    const Tiles& tiles = shared.tiles;
    for (;; r++) {
        Pair pair = {0, 0, 0.0f, 0};
        Run run = {};
        while (left && pair.rank == 0) {
            u32 end = run_end(tiles, tile);
            if (end > in_window) end = in_window;
            if (end > tile + left) end = tile + left;
            const int slot = tiles.slot[tile];
            const SiteParams& of = p.site[site];
            u16* y = reinterpret_cast<u16*>(y_of(of.y_operand, y0, y1, y2, y3));
            if (slot >= 0 && y) pair = expand_pair_of<u16>(p, of, tables, slot);
            y += of.y_offset;
            const u32 outputs = of.out_features - first < OUTPUTS ? of.out_features - first : OUTPUTS;
            run.y = y + first, run.z = way.z + of.z_offset, run.gains = gains_of(weights, pair, 0);
            run.y_stride = of.y_stride, run.rank = pair.rank, run.scale = pair.scale;
            run.steps = is_wide(y, of.y_stride) ? outputs / STEP : 0, run.rest = outputs - run.steps * STEP;
            run.first = first, run.site = site, run.begin = tile, run.end = end;
            left -= end - tile;
            tile = end;
            if (end == in_window) {
                tile = 0;
                first += OUTPUTS;
                if (first >= of.out_features) first = 0, site++;
            }
        }
        if (pair.rank == 0) run.begin = run.end = 0;
        if (way.lane == 0) {
            shared.runs[r % KNOWN] = run;
            barrier_arrive(shared_address(&shared.told[r % KNOWN]));
        }
        if (r >= Way::PLACES) barrier_wait(shared_address(&shared.empty[r % Way::PLACES]), (r / Way::PLACES - 1) % 2);
        if (run.end) way.fetch_b(run, reinterpret_cast<const u16*>(weights + pair.offset), way.place_of_b(r));
        way.tell_b(shared_address(&shared.full[r % Way::PLACES]));
        if (!run.end) break;
    }
    r++;
}

// Fetches all of a tile, y only where told.
template <class Way> DEVICE void fetch(const Way& way, const Run& run, const Mine& mine, bool with_y) {
    way.fetch_z(run, mine);
#pragma unroll 1
    for (u32 s = 0; s < Way::STEPS; s++) {
        if (with_y && s < run.steps) way.fetch_y(run.y_stride, mine, s);
        end_group();
    }
}

// The other warps' part of a window. `waited`: whether the launch before has ended.
template <class Way> DEVICE void consume(const Way& way, u32& r, u32& turn, bool& waited) {
    Shared& shared = way.shared;
    Mine own;
    // The first tile, before the end of the launch before where that doesn't write it.
    bool first = true;
    for (;; r++) {
        const Run& run = shared.runs[r % KNOWN];
        barrier_wait(shared_address(&shared.told[r % KNOWN]), r / KNOWN % 2);
        if (first) {
            first = false;
            const bool any = way.first(run, turn) < run.end, early = way.p.z_parts != 0;
            if (any) own = way.tile(run, way.first(run, turn));
            if (early && any)
                for (u32 s = 0; s < run.steps; s++) way.fetch_y(run.y_stride, own, s);
            if (!waited) {
                wait_for_last();
                if (blockIdx.x == 0) launch_next();
                waited = true;
            }
            if (any) fetch(way, run, own, !early);
            else
                for (u32 s = 0; s < Way::STEPS; s++) end_group();
        }
        const u32 end = run.end, later = turn + Way::turns(run);
        // The last run's too: the producer counts on no warp being further than one run ahead of it.
        barrier_wait(shared_address(&shared.full[r % Way::PLACES]), r / Way::PLACES % 2);
        if (end) {
            if (way.first(run, turn) >= end) {
                // No tile of this run is this warp's.
                const Run& after = shared.runs[(r + 1) % KNOWN];
                barrier_wait(shared_address(&shared.told[(r + 1) % KNOWN]), (r + 1) / KNOWN % 2);
                if (way.first(after, later) < after.end) {
                    own = way.tile(after, way.first(after, later));
                    fetch(way, after, own, true);
                }
            } else if (run.gains) way.template work<true>(r, turn, own);
            else way.template work<false>(r, turn, own);
            __syncwarp();
        }
        if (way.lane == 0) barrier_arrive(shared_address(&shared.empty[r % Way::PLACES]));
        if (!end) break;
        turn = later;
    }
    r++;
}

// A whole launch.
template <class Way>
DEVICE void expand(const u32* batch, const u32* tables, const unsigned char* weights, const float* z, void* y0, void* y1,
                   void* y2, void* y3, const Params& p, unsigned char* memory) {
    constexpr u32 OUTPUTS = Way::OUTPUTS, WARPS = Way::WARPS;
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool z_wide = (((u64)z | p.z_stride * 4ull) & 15) == 0 &&
                        ((p.site[0].z_offset | p.site[1].z_offset | p.site[2].z_offset | p.site[3].z_offset) & 3) == 0;
    const Warp common = {p, batch, z, shared, 0, 0, 0, z_wide, lane, warp};
    const Way way = Way::of(common, shared_address(memory) + sizeof(Shared));
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < Way::PLACES; i++) {
            barrier_init(shared_address(&shared.full[i]), 32);
            barrier_init(shared_address(&shared.empty[i]), WARPS);
        }
        for (u32 i = 0; i < KNOWN; i++) barrier_init(shared_address(&shared.told[i]), 1);
    }
    // The next launch starts when all blocks let it: the first one does when the launch before this one has ended.
    if (blockIdx.x) launch_next();
    u32 blocks = 0;
    for (u32 s = 0; s < p.sites; s++) blocks += div_ceil(p.site[s].out_features, OUTPUTS);
    const u32 tiles = tiles_of(p, batch);
    const u64 all = (u64)tiles * blocks;
    // Equal shares, and one more for the first blocks where that doesn't come out even.
    const u64 each = all / gridDim.x;
    const u32 more = (u32)(all - each * gridDim.x);
    u64 at = each * blockIdx.x + (blockIdx.x < more ? blockIdx.x : more);
    const u64 end = at + each + (blockIdx.x < more);
    // Windows of equal size: of a small one, B would be fetched for few tiles.
    const u32 size = div_ceil(tiles, tiles ? div_ceil(tiles, WINDOW) : 1);
    bool waited = false;
    u32 r = 0, turn = 0;
    while (at < end) {
        const u64 whole = (u64)size * blocks;
        const u32 window = (u32)(at / whole);
        const u32 in_window = tiles - window * size < size ? tiles - window * size : size;
        read_tiles(p, batch, window * size, shared.tiles);
        const u64 past = window * whole + (u64)in_window * blocks;
        const u64 stop = past < end ? past : end;
        if (warp == WARPS) {
            const u32 inside = (u32)(at - window * whole);
            u32 site = 0, first = inside / in_window * OUTPUTS;
            while (first >= p.site[site].out_features) {
                first -= div_ceil(p.site[site].out_features, OUTPUTS) * OUTPUTS;
                site++;
            }
            produce(way, tables, weights, y0, y1, y2, y3, in_window, site, first, inside % in_window, (u32)(stop - at), r);
        } else {
            consume(way, r, turn, waited);
        }
        at = stop;
    }
    if (warp < WARPS && !waited) {
        wait_for_last();
        if (blockIdx.x == 0) launch_next();
    }
}

// The entry for elements `name`, whose body calls `expand` of a way with these arguments; so many blocks fit on a multiprocessor.
#define EXPAND_ARGUMENTS batch, tables, weights, z, y0, y1, y2, y3, p, memory
#define EXPAND(name, BLOCK, RESIDENT)                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)                                                      \
        lorapool_sgmv_expand_##name##_##name(const u32* __restrict__ batch, const u32* __restrict__ tables,            \
                                             const unsigned char* __restrict__ weights, const float* z, u16* y0,       \
                                             u16* y1, u16* y2, u16* y3, const __grid_constant__ Params p)
