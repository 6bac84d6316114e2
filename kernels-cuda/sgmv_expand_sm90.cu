// y[row][n] += scale * sum_r B[slot(tile)][n][r] * z[row][z_offset + r], rounded once: prefill in bf16 or f16 for sm_90.
//
//   grid     at most as many blocks as fit at once; each takes an equal share of all pairs of (OUTPUTS outputs of a site,
//            tile), tiles innermost
//   block    one warp looks up the share's runs of tiles of one slot, and fetches their parts of B to shared memory, a run
//            ahead; the others work
//   warp     every WARPS-th tile: 16 rows by OUTPUTS outputs; z is the 16-row side of the product, B the 8-column side, its
//            rows permuted so that each lane has eight adjacent outputs. The next tile's y and z are fetched while this
//            one is worked on, y into the lane's own places
//
// Order of a sum: ranks ascending in chunks of RANKS, of which Side tells the rest. Vectors behind B change y as the contract
// says.
#include "prefill.cuh"

// Warps that work.
constexpr u32 WARPS = 7;
constexpr u32 BLOCK = (WARPS + 1) * 32;
// Outputs that a warp takes at a time.
constexpr u32 STEP = 32;
// Chunks of RANKS ranks that a warp takes at a time where there are more than it keeps.
constexpr u32 KEPT = 2;
// Runs that are known at a time, and of which B is there.
constexpr u32 KNOWN = 4;
constexpr u32 PLACES = 2;
static_assert(BLOCK >= WINDOW, "a thread for each tile");

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
    u64 full[PLACES];      // a run's B has come
    u64 empty[PLACES];     // all warps have done with it
    u64 told[KNOWN];       // a run is known
    Run runs[KNOWN];
    Tiles tiles;
};

static_assert((sizeof(Shared) + 127) / 128 * 128 == 3456, "what launches count on");

// What a lane has of a tile: rows g and g + 8, outputs 8q on.
struct Mine {
    u16* y;                // output 8q of the run, row g
    u32 row;               // g's
    u32 is[2];             // whether the rows are there
    float scale[2];
};

// z's side of a chunk's products: of a lane ranks 2q, 2q + 1, 2q + 8 and 2q + 9 of rows g and g + 8. `multiply` adds the products
// with B, at address `b`, to the sums of 32 outputs. sum[m]: outputs 8q + 2m and the next, of rows g and g + 8.
template <class E> struct Side;

// z is taken as the sum of three bf16, which it is exactly: of a chunk the low parts, then the middle ones, then the high ones.
template <> struct Side<Bf16> {
    u32 parts[3][4];

    __device__ __forceinline__ void take(float2 (&f)[4]) {
#pragma unroll
        for (u32 t = 0; t < 3; t++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) parts[t][i] = take_high(f[i].x, f[i].y);
    }

    __device__ __forceinline__ void multiply(float (&sum)[4][4], u32 b) const {
        u32 w[2][4];
        load_matrices(b, w[0]);
        load_matrices(b + 512, w[1]);
#pragma unroll
        for (u32 t = 0; t < 3; t++)
#pragma unroll
            for (u32 m = 0; m < 4; m++) {
                const u32(&a)[4] = parts[2 - t];
                Words<Bf16>::mma(sum[m], a[0], a[1], a[2], a[3], w[m / 2][m % 2 * 2], w[m / 2][m % 2 * 2 + 1]);
            }
    }
};

// f16 has no such range: z is taken as the sum of two tf32, which is off by its last bit at most, and B as tf32, which it is
// exactly. Of each half of a chunk the low parts, then the high ones; rank 2q is the lane's column q, 2q + 1 is q + 4.
template <> struct Side<F16> {
    float2 z[4];

    __device__ __forceinline__ void take(const float2 (&f)[4]) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) z[i] = f[i];
    }

    __device__ __forceinline__ void multiply(float (&sum)[4][4], u32 b) const {
        u32 w[2][4];
        load_matrices(b, w[0]);
        load_matrices(b + 512, w[1]);
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            float of[4] = {z[2 * h].x, z[2 * h + 1].x, z[2 * h].y, z[2 * h + 1].y};
#pragma unroll
            for (u32 i = 0; i < 4; i++) settle(of[i]);
            u32 low[4], high[4];
            float first[4], second[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                high[i] = __float_as_uint(of[i]) + 0x1000u & 0xffffe000u;
                low[i] = __float_as_uint(__fsub_rn(of[i], __uint_as_float(high[i]))) & 0xffffe000u;
            }
#pragma unroll
            for (u32 m = 0; m < 4; m++) {
                const u32 word = w[m / 2][m % 2 * 2 + h];
                first[m] = Words<F16>::low(word), second[m] = Words<F16>::high(word);
            }
#pragma unroll
            for (u32 m = 0; m < 4; m++)
                mma_tf32(sum[m], low[0], low[1], low[2], low[3], __float_as_uint(first[m]), __float_as_uint(second[m]));
#pragma unroll
            for (u32 m = 0; m < 4; m++)
                mma_tf32(sum[m], high[0], high[1], high[2], high[3], __float_as_uint(first[m]), __float_as_uint(second[m]));
        }
    }
};

// CHUNKS: of z and B that are kept for OUTPUTS outputs; 0: B's as max_rank needs, and z's are loaded when it is their turn.
template <class E, u32 CHUNKS, u32 OUTPUTS> struct Expand {
    static constexpr u32 STEPS = OUTPUTS / STEP;
    // Of z, that a warp has at a time.
    static constexpr u32 HELD = CHUNKS ? CHUNKS : KEPT;

    const Params& p;
    const u32* batch;
    const float* z;
    Shared& shared;
    u32 chunks;            // that B has room for
    u32 b_at;              // address of B's places
    u32 ring;              // address of this lane's first piece of y
    u32 z_ring;            // address of this warp's z
    bool z_wide;
    u32 lane, warp;

    __device__ __forceinline__ u32 b_bytes() const { return OUTPUTS * (CHUNKS ? CHUNKS : chunks) * RANKS * 2; }

    // The producer's part of a window: looks up `left` pairs of outputs and tile from outputs `first` of `site` and `tile`
    // on. `r`: runs so far.
    __device__ __forceinline__ void produce(const u32* tables, const unsigned char* weights, void* y0, void* y1, void* y2,
                                            void* y3, u32 in_window, u32 site, u32 first, u32 tile, u32 left, u32& r) const {
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
                run.y = y + first, run.z = z + of.z_offset, run.gains = gains_of(weights, pair, 0);
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
            if (lane == 0) {
                shared.runs[r % KNOWN] = run;
                barrier_arrive(shared_address(&shared.told[r % KNOWN]));
            }
            if (r >= PLACES) barrier_wait(shared_address(&shared.empty[r % PLACES]), (r / PLACES - 1) % 2);
            if (run.end) fetch_b(run, reinterpret_cast<const u16*>(weights + pair.offset), b_at + r % PLACES * b_bytes());
            barrier_arrive_after_copies(shared_address(&shared.full[r % PLACES]));
            if (!run.end) break;
        }
        r++;
    }

    // Bytes from a place's start to the 16 bytes of output `n`: of 32 outputs, of 16 ranks, there are 8 matrices of 8 outputs
    // by 8 ranks as ldmatrix wants them.
    DEVICE u32 place_of(u32 n, u32 chunks) { return n / 32 * (chunks * 1024) + n % 8 / 2 * 256 + n % 32 / 8 * 32 + n % 2 * 16; }

    // Fetches a run's part of B.
    __device__ __forceinline__ void fetch_b(const Run& run, const u16* b, u32 to) const {
        const u32 out = p.site[run.site].out_features - run.first;
        b += (u64)run.first * p.b_stride;
        if (CHUNKS) {
            // A lane has the same ranks of every STRIDE-th output.
            constexpr u32 OCTETS = 2 * HELD, STRIDE = 32 / OCTETS;
            const u32 o = lane % OCTETS, n = lane / OCTETS, left = saturating(run.rank, o * 8);
            const u32 count = left < 8 ? left * 2 : 16;
            const u16* from = b + ((u64)n * p.b_stride + o * 8);
            to += place_of(n, HELD) + o / 2 * 1024 + o % 2 * 128;
#pragma unroll
            for (u32 k = 0; k < OUTPUTS / STRIDE; k++) {
                // The bits of n and of what is added are apart.
                const u32 is = n + k * STRIDE < out ? count : 0;
                copy16(to + place_of(k * STRIDE, HELD), is ? from : b, is);
                from += (u64)STRIDE * p.b_stride;
            }
        } else {
            const u32 used = div_ceil(run.rank, RANKS) * 2;
#pragma unroll 1
            for (u32 o = 0; o < used; o++)
#pragma unroll
                for (u32 n = lane; n < OUTPUTS; n += 32) {
                    const u32 left = saturating(run.rank, o * 8), count = n < out ? (left < 8 ? left * 2 : 16) : 0;
                    copy16(to + place_of(n, chunks) + o / 2 * 1024 + o % 2 * 128, count ? b + ((u64)n * p.b_stride + o * 8) : b,
                           count);
                }
        }
    }

    // This warp's first tile of a run; none: at least its end.
    __device__ __forceinline__ u32 mine(const Run& run) const { return run.begin + (warp + WARPS - run.begin % WARPS) % WARPS; }

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

    // Fetches a step's y.
    __device__ __forceinline__ void fetch_y(u32 y_stride, const Mine& mine, u32 step) const {
#pragma unroll
        for (u32 h = 0; h < 2; h++)
            copy16_if(mine.is[h], ring + (step * 2 + h) * 512, mine.y + (h * 8ull * y_stride + step * STEP));
    }

    // Fetches z of a tile: of each chunk 16 rows of 64 bytes, the halves of every other two rows exchanged.
    __device__ __forceinline__ void fetch_z(const Run& run, const Mine& mine) const {
        if (CHUNKS == 0) return;
        const u32 q = lane % 4, rank = run.rank;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const float* row = mine.is[h] ? run.z + ((u64)(mine.row + h * 8) * p.z_stride + q * 4) : z;
            const u32 place = z_ring + (lane / 4 + h * 8) * 64 + (q ^ lane / 8 % 2 * 2) * 16;
            if (z_wide) {
#pragma unroll
                for (u32 c = 0; c < HELD; c++) {
                    const u32 left = mine.is[h] ? saturating(rank, c * RANKS + q * 4) : 0;
                    copy16(place + c * 1024, left ? row + c * RANKS : z, left < 4 ? left * 4 : 16);
                }
            } else {
#pragma unroll 1
                for (u32 c = 0; c < HELD; c++)
#pragma unroll 1
                    for (u32 i = 0; i < 4; i++) {
                        const bool is = mine.is[h] && c * RANKS + q * 4 + i < rank;
                        const float value = is ? __ldcg(row + c * RANKS + i) : 0.0f;
                        asm volatile("st.shared.f32 [%0], %1;" ::"r"(place + c * 1024 + i * 4), "f"(value) : "memory");
                    }
            }
        }
    }

    __device__ __forceinline__ void read_z(u32 c, Side<E>& side) const {
        const u32 g = lane / 4, q = lane % 4;
        float2 f[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 piece = (q / 2 + i / 2 * 2) ^ g / 2 % 2 * 2;
            const u32 from = z_ring + c * 1024 + (g + i % 2 * 8) * 64 + piece * 16 + q % 2 * 8;
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(f[i].x), "=f"(f[i].y) : "r"(from) : "memory");
        }
        side.take(f);
    }

    __device__ __forceinline__ void load_z(const Run& run, const Mine& mine, u32 chunk, Side<E>& side) const {
        float2 f[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 r = chunk * RANKS + lane % 4 * 2 + i / 2 * 8;
            const bool is = mine.is[i % 2];
            const float* from = run.z + ((is ? (u64)(mine.row + i % 2 * 8) * p.z_stride : 0) + r);
            f[i].x = is && r < run.rank ? __ldcg(from) : 0.0f;
            f[i].y = is && r + 1 < run.rank ? __ldcg(from + 1) : 0.0f;
        }
        side.take(f);
    }

    typedef Side<E> Sides[HELD];

    // The sums of a step; `sides`: z's, where they are kept.
    __device__ __forceinline__ void sums(const Run& run, u32 rank_chunks, const Mine& own, u32 b, u32 step, Sides& sides,
                                         float (&sum)[4][4]) const {
        clear(sum);
        if (CHUNKS) {
#pragma unroll
            for (u32 c = 0; c < HELD; c++)
                if (c == 0 || c < rank_chunks) sides[c].multiply(sum, b + (step * CHUNKS + c) * 1024);
        } else {
#pragma unroll 1
            for (u32 first = 0; first < rank_chunks; first += KEPT) {
#pragma unroll
                for (u32 c = 0; c < KEPT; c++) load_z(run, own, first + c, sides[c]);
#pragma unroll
                for (u32 c = 0; c < KEPT; c++)
                    if (first + c < rank_chunks) sides[c].multiply(sum, b + (step * chunks + first + c) * 1024);
            }
        }
    }

    // Outputs that no step takes, element by element.
    __device__ __forceinline__ void rest(const Run& run, u32 rank_chunks, const Mine& own, u32 b, Sides& sides) const {
#pragma unroll 1
        for (u32 done = 0; done < run.rest; done += STEP) {
            const u32 n = run.steps * STEP + done;
            float sum[4][4];
            sums(run, rank_chunks, own, b, n / STEP, sides, sum);
            const u32 left = saturating(run.rest, done + lane % 4 * 8), count = left < 8 ? left : 8;
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                if (!own.is[h] || !count) continue;
                u16* const to = own.y + (h * 8ull * run.y_stride + n);
                const uint4 v = expand8<E>(p.site[run.site], some8(to, count), run.scale, own.scale[h], sum, 2 * h, run.gains,
                                        run.first + n + lane % 4 * 8);
                keep_some8(to, count, v);
            }
        }
    }

    // This warp's tiles of run `r`, the first of which is `own` and on its way, as is the one it leaves there.
    template <bool VECTORS> __device__ __forceinline__ void work(u32 r, Mine& own) const {
        const Run& run = shared.runs[r % KNOWN];
        const u32 b = b_at + r % PLACES * b_bytes() + lane * 16;
        const u32 end = run.end, y_stride = run.y_stride, steps = run.steps, rank_chunks = div_ceil(run.rank, RANKS);
        const float site_scale = run.scale;
#pragma unroll 1
        for (u32 t = mine(run); t < end; t += WARPS) {
            u32 later = t + WARPS, which = r;
            if (later >= end) {
                which = r + 1;
                barrier_wait(shared_address(&shared.told[which % KNOWN]), which / KNOWN % 2);
                later = mine(shared.runs[which % KNOWN]);
            }
            const Run& its = shared.runs[which % KNOWN];
            const bool any = later < its.end;
            Mine coming = {0, 0, {0, 0}, {0.0f, 0.0f}};
            if (any) coming = tile(its, later);
            const u32 its_stride = its.y_stride, its_steps = its.steps;
            Sides sides;
            wait_groups<STEPS - 1>();
            if (CHUNKS) {
                __syncwarp();
#pragma unroll
                for (u32 c = 0; c < HELD; c++) read_z(c, sides[c]);
                __syncwarp();
                if (any) fetch_z(its, coming);
            }
#pragma unroll 1
            for (u32 s = 0; s < STEPS; s++) {
                wait_groups<STEPS - 1>();
                if (s < steps) {
                    uint4 v[2] = {read16(ring + s * 1024), read16(ring + s * 1024 + 512)};
                    float sum[4][4];
                    sums(run, rank_chunks, own, b, s, sides, sum);
#pragma unroll
                    for (u32 h = 0; h < 2; h++) {
                        v[h] = expand8<E>(p.site[VECTORS ? run.site : 0], v[h], site_scale, own.scale[h], sum, 2 * h,
                                       VECTORS ? run.gains : nullptr, VECTORS ? run.first + s * STEP + lane % 4 * 8 : 0);
                        store16_if(own.is[h], own.y + (h * 8ull * y_stride + s * STEP), v[h]);
                    }
                }
                if (s < its_steps) fetch_y(its_stride, coming, s);
                end_group();
            }
            if (run.rest) rest(run, rank_chunks, own, b, sides);
            own = coming;
        }
    }

    // Fetches all of a tile, y only where told.
    __device__ __forceinline__ void fetch(const Run& run, const Mine& mine, bool with_y) const {
        fetch_z(run, mine);
#pragma unroll 1
        for (u32 s = 0; s < STEPS; s++) {
            if (with_y && s < run.steps) fetch_y(run.y_stride, mine, s);
            end_group();
        }
    }

    // The other warps' part of a window. `waited`: whether the launch before has ended.
    __device__ __forceinline__ void consume(u32& r, bool& waited) const {
        Mine own;
        // The first tile, before the end of the launch before where that doesn't write it.
        bool first = true;
        for (;; r++) {
            const Run& run = shared.runs[r % KNOWN];
            barrier_wait(shared_address(&shared.told[r % KNOWN]), r / KNOWN % 2);
            if (first) {
                first = false;
                const bool any = mine(run) < run.end, early = p.z_parts != 0;
                if (any) own = tile(run, mine(run));
                if (early && any)
                    for (u32 s = 0; s < run.steps; s++) fetch_y(run.y_stride, own, s);
                if (!waited) {
                    wait_for_last();
                    if (blockIdx.x == 0) launch_next();
                    waited = true;
                }
                if (any) fetch(run, own, !early);
                else
                    for (u32 s = 0; s < STEPS; s++) end_group();
            }
            const u32 end = run.end;
            // The last run's too: the producer counts on no warp being further than one run ahead of it.
            barrier_wait(shared_address(&shared.full[r % PLACES]), r / PLACES % 2);
            if (end) {
                if (mine(run) >= end) {
                    // No tile of this run is this warp's.
                    const Run& after = shared.runs[(r + 1) % KNOWN];
                    barrier_wait(shared_address(&shared.told[(r + 1) % KNOWN]), (r + 1) / KNOWN % 2);
                    if (mine(after) < after.end) {
                        own = tile(after, mine(after));
                        fetch(after, own, true);
                    }
                } else if (run.gains) work<true>(r, own);
                else work<false>(r, own);
                __syncwarp();
            }
            if (lane == 0) barrier_arrive(shared_address(&shared.empty[r % PLACES]));
            if (!end) break;
        }
        r++;
    }
};

template <class E, u32 CHUNKS, u32 OUTPUTS>
DEVICE void expand(const u32* batch, const u32* tables, const unsigned char* weights, const float* z, void* y0, void* y1,
                   void* y2, void* y3, const Params& p, unsigned char* memory) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 chunks = CHUNKS ? CHUNKS : div_ceil(p.max_rank, RANKS);
    const u32 b_at = shared_address(memory) + (sizeof(Shared) + 127) / 128 * 128;
    const u32 ring = b_at + PLACES * OUTPUTS * chunks * RANKS * 2, z_ring = ring + WARPS * OUTPUTS * 32;
    const bool z_wide = (((u64)z | p.z_stride * 4ull) & 15) == 0 &&
                        ((p.site[0].z_offset | p.site[1].z_offset | p.site[2].z_offset | p.site[3].z_offset) & 3) == 0;
    const Expand<E, CHUNKS, OUTPUTS> e = {p, batch, z, shared, chunks, b_at, ring + warp * OUTPUTS * 32 + lane * 16,
                                       z_ring + warp * CHUNKS * 1024, z_wide, lane, warp};
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < PLACES; i++) {
            barrier_init(shared_address(&shared.full[i]), 32);
            barrier_init(shared_address(&shared.empty[i]), WARPS);
        }
        for (u32 i = 0; i < KNOWN; i++) barrier_init(shared_address(&shared.told[i]), 1);
    }
    // The next launch starts when all blocks let it: the first one does when the launch before this one has ended.
    if (blockIdx.x) launch_next();
    u32 blocks = 0;
    for (u32 s = 0; s < p.sites; s++) blocks += div_ceil(p.site[s].out_features, OUTPUTS);
    const u64 all = (u64)p.tiles * blocks;
    // Equal shares, and one more for the first blocks where that doesn't come out even.
    const u64 each = all / gridDim.x;
    const u32 more = (u32)(all - each * gridDim.x);
    u64 at = each * blockIdx.x + (blockIdx.x < more ? blockIdx.x : more);
    const u64 end = at + each + (blockIdx.x < more);
    bool waited = false;
    u32 r = 0;
    while (at < end) {
        const u64 whole = (u64)WINDOW * blocks;
        const u32 window = (u32)(at / whole);
        const u32 in_window = p.tiles - window * WINDOW < WINDOW ? p.tiles - window * WINDOW : WINDOW;
        read_tiles(p, batch, window * WINDOW, shared.tiles);
        const u64 past = window * whole + (u64)in_window * blocks;
        const u64 stop = past < end ? past : end;
        if (warp == WARPS) {
            const u32 inside = (u32)(at - window * whole);
            u32 site = 0, first = inside / in_window * OUTPUTS;
            while (first >= p.site[site].out_features) {
                first -= div_ceil(p.site[site].out_features, OUTPUTS) * OUTPUTS;
                site++;
            }
            e.produce(tables, weights, y0, y1, y2, y3, in_window, site, first, inside % in_window, (u32)(stop - at), r);
        } else {
            e.consume(r, waited);
        }
        at = stop;
    }
    if (warp < WARPS && !waited) {
        wait_for_last();
        if (blockIdx.x == 0) launch_next();
    }
}

#define ENTRY(name, E)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(BLOCK, 2)                                                             \
        lorapool_sgmv_expand_##name##_##name(const u32* __restrict__ batch, const u32* __restrict__ tables,            \
                                             const unsigned char* __restrict__ weights, const float* z, u16* y0,       \
                                             u16* y1, u16* y2, u16* y3, const __grid_constant__ Params p) {            \
        extern __shared__ __align__(128) unsigned char memory[];                                                       \
        if (p.max_rank <= 16) expand<E, 1, 256>(batch, tables, weights, z, y0, y1, y2, y3, p, memory);                 \
        else if (p.max_rank <= 32) expand<E, 2, 128>(batch, tables, weights, z, y0, y1, y2, y3, p, memory);            \
        else if (p.max_rank <= 64) expand<E, 4, 128>(batch, tables, weights, z, y0, y1, y2, y3, p, memory);            \
        else if (p.max_rank <= 256) expand<E, 0, 64>(batch, tables, weights, z, y0, y1, y2, y3, p, memory);            \
        else expand<E, 0, 32>(batch, tables, weights, z, y0, y1, y2, y3, p, memory);                                   \
    }
ENTRY(bf16, Bf16)
ENTRY(f16, F16)
