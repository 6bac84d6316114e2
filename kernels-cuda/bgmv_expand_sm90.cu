// y[row][n] += scale * sum_r B[slot(row)][n][r] * z[row][r], z the sum of its parts, rounded once: decode in bf16 or f16 for sm_90.
//
//   warp   works by itself on a run of neighbouring tiles
//   tile   TILE outputs of a pack of rows at a site; in units of 2 KB of B, which are asked for some units ahead
//
// B is the 16-row side of the product, z the 8-column side. z is taken as the sum of three bf16: two columns for each row of a
// pack of up to 4, low and then high parts in one and middle parts in the other; in a larger pack a column for each row, and the
// middle parts have a product of their own. Order of a sum: ranks ascending in groups of RANKS, of each the low parts before the
// high ones in one sum, the middle parts in another, added at the end. If B is f16, z is two tf32 instead: no low parts, and
// groups of half as many ranks.
#include "expand_runs.cuh"

// Tiles that a pack has at a site; at those past the last, none.
DEVICE u32 tiles_of(const SiteParams& site) { return div_ceil(site.out_features, TILE); }
DEVICE u32 tiles_of(const Params& p, u32 site) { return site < p.sites ? tiles_of(p.site[site]) : 0; }

// A warp's share of the packs' tiles, `each` of a pack. While there are warps for it, tiles of one pack and site, since
// another run begins only when the last has ended: as few as let all tiles be some warp's.
DEVICE Share share_of_tiles(const Params& p, u32 packs, u32 each, u32 own, u32 all) {
    if (packs == 0 || packs * p.sites > all) return share_of(packs * each, own, all);
    u32 most = div_ceil(packs * each, all), pieces = 0;
    for (;; most += div_ceil(most, 8)) {
        pieces = 0;
#pragma unroll
        for (u32 s = 0; s < MAX_SITES; s++) pieces += div_ceil(tiles_of(p, s), most);
        if (packs * pieces <= all) break;
    }
    const u32 pack = own / pieces;
    if (pack >= packs || own >= all) return {0, 0};
    u32 piece = own % pieces, first = pack * each, end = first;
#pragma unroll
    for (u32 s = 0; s < MAX_SITES; s++) {
        const u32 tiles = tiles_of(p, s), here = div_ceil(tiles, most);
        end += tiles;
        if (piece < here) break;
        piece -= here, first += tiles;
    }
    first += piece * most;
    return {first, first + most < end ? first + most : end};
}

// What a pack and a site's tiles have in common, in the lane that looked them up.
struct Found {
    u64 b, gains;       // addresses; gains 0: none
    u32 rank;           // 0: nothing to do, and nothing else here means anything
    u32 rows;           // of the pack
    float scale;
    u32 first, end;     // tiles of the site that are this warp's
};

// Whole tiles of the warp's runs without vectors, or all that is left: apart, so that the latter costs the former no registers.
// Whether there is any of the other kind.
template <class E, bool PLAIN>
DEVICE bool runs(const Params& p, const u32* batch, const u32* tables, const unsigned char* weights, const float* z, u16* y0,
                 u16* y1, u16* y2, u16* y3, const Share& share, u32 each, u32 ring, u32 z_kept, bool& waited) {
    const u32 lane = threadIdx.x % 32;
    const u32 sources = div_ceil(share.end, each) * p.sites;
    bool others = false;
#pragma unroll 1
    for (u32 base = share.first / each * p.sites; base < sources; base += 32) {
        // Lane l looks up site (base + l) % sites of a pack.
        Found mine;
        mine.rank = 0;
        const u32 own = base + lane;
        if (own < sources) {
            const u32 pack = own / p.sites, s = own % p.sites;
            const int slot = slot_of(p, batch, pack);
            mine.rows = rows_of(p, batch, pack);
            u32 tile = pack * each;
#pragma unroll
            for (u32 i = 0; i < MAX_SITES - 1; i++)
                if (i < s) tile += tiles_of(p.site[i]);
            const u32 count = tiles_of(p.site[s]);
            mine.first = saturating(share.first, tile);
            mine.end = saturating(share.end, tile) < count ? saturating(share.end, tile) : count;
            if (mine.first < mine.end) {
                const Pair pair = expand_pair_of<u16>(p, p.site[s], tables, slot);
                mine.rank = pair.rank;
                mine.scale = pair.scale;
                mine.b = (u64)weights + pair.offset;
                mine.gains = pair.vectors ? (u64)weights + pair.vectors : 0;
            }
        }
#pragma unroll 1
        for (u32 live = __ballot_sync(~0u, mine.rank != 0); live; live &= live - 1) {
            const u32 from = __ffs(live) - 1;
            Run run;
            run.pack = (base + from) / p.sites, run.site = (base + from) % p.sites;
            run.first = from_lane(mine.first, from), run.end = from_lane(mine.end, from);
            run.rank = from_lane(mine.rank, from), run.rows = from_lane(mine.rows, from);
            run.scale = from_lane(mine.scale, from);
            run.gains = reinterpret_cast<const float*>(from_lane(mine.gains, from));
            run.b = from_lane(mine.b, from), run.b_row = 2 * (u64)p.b_stride;
            const SiteParams& site = p.site[run.site];
            run.y = reinterpret_cast<u16*>(y_of(site.y_operand, y0, y1, y2, y3)) + site.y_offset;
            const bool aligned = is_wide(run.y, site.y_stride);
            const u32 whole = aligned ? site.out_features / TILE : 0, end = run.end < whole ? run.end : whole;
            if (PLAIN) {
                others |= run.gains || run.end > end;
                if (run.gains || run.first >= end) continue;
                run.end = end;
                if (run.rows > PACK_ROWS / 2) plain_run<E, 2>(p, batch, z, run, ring, z_kept, waited);
                else plain_run<E, 1>(p, batch, z, run, ring, z_kept, waited);
                waited = true;
                continue;
            }
            if (run.gains && run.first < end) {
                Run even = run;
                even.end = end;
                even_run<E, 2, true>(p, batch, z, even, ring, z_kept, waited);
                waited = true;
            }
            if (run.first < end) run.first = end;
            if (run.first < run.end) {
                odd_run<E>(p, batch, z, run, aligned && site.out_features % 8 == 0, z_kept, waited);
                waited = true;
            }
        }
    }
    return others;
}

template <class E>
DEVICE void expand(const u32* batch, const u32* tables, const unsigned char* weights, const float* z, u16* y0, u16* y1, u16* y2,
                   u16* y3, const Params& p) {
    extern __shared__ __align__(128) unsigned char memory[];
    launch_next();
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
    u32 each = 0;
#pragma unroll
    for (u32 s = 0; s < MAX_SITES; s++) each += tiles_of(p, s);
    const u32 packs = live_packs(p, batch), blocks = working_blocks(p, packs * each, BUSY_TILES);
    // The first warps of all blocks come first.
    const u32 own = blockIdx.x < blocks ? warp * blocks + blockIdx.x : blocks * warps;
    const Share share = share_of_tiles(p, packs, each, own, blocks * warps);
    bool waited = false;
    if (share.first < share.end) {
        const u32 ring = shared_address(memory) + warp * (RING + div_ceil(p.max_rank, RANKS) * KEPT), kept = ring + RING;
        if (runs<E, true>(p, batch, tables, weights, z, y0, y1, y2, y3, share, each, ring, kept, waited))
            runs<E, false>(p, batch, tables, weights, z, y0, y1, y2, y3, share, each, ring, kept, waited);
    }
    // One thread that waits is enough for the end of this launch to be the end of all before it.
    if (!waited && warp == 0 && blockIdx.x == 0) wait_for_last();
}

#define ENTRY(name, E)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(EXPAND_WARPS * 32, 4) lorapool_bgmv_expand_##name##_##name(           \
        const u32* __restrict__ batch, const u32* __restrict__ tables, const unsigned char* __restrict__ weights,      \
        const float* z, u16* y0, u16* y1, u16* y2, u16* y3, const __grid_constant__ Params p) {                        \
        expand<E>(batch, tables, weights, z, y0, y1, y2, y3, p);                                                       \
    }
ENTRY(bf16, Bf16)
ENTRY(f16, F16)
