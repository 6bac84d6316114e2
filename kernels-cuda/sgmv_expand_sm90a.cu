// The prefill expand for sm_90a, bf16, ranks up to 256 (prefill_expand.cuh): a warpgroup has four tiles at a time, one a warp, and
// every WARPGROUPS-th four of all runs; z in registers is the 64-row side of its products, B in shared memory the 64-column side.
//
// z is taken as the sum of three bf16, which it is exactly. Order of a sum: ranks ascending in chunks of RANKS; of a chunk the
// low parts of z, then the middle ones, then the high ones.
#include "prefill_expand.cuh"
#include "wgmma.cuh"

// Warpgroups that work.
constexpr u32 WARPGROUPS = 2;
constexpr u32 BLOCK = (WARPGROUPS * 4 + 1) * 32;
// Chunks of RANKS ranks in a line of B: a slab.
constexpr u32 CHUNKS = 4;
constexpr u32 LINE = CHUNKS * RANKS * 2;
static_assert(BLOCK >= WINDOW && LINE == 128, "a thread for each tile; lines as products take them");

// SLABS: of ranks, that there is room for.
template <u32 SLABS, u32 OUTPUTS_> struct Way : Warp {
    static constexpr u32 WARPS = WARPGROUPS * 4, OUTPUTS = OUTPUTS_, STEP = 64, STEPS = OUTPUTS / STEP, PLACES = 2;
    // Bytes of B's places, a slab after the other, of a warp's y and of its z.
    static constexpr u32 SLAB = OUTPUTS * LINE, B_PLACE = SLABS * SLAB, Y_RING = OUTPUTS * 32, Z_RING = SLABS * CHUNKS * 1024;
    static_assert(SLABS == 1 || STEPS == 1, "one sum over all slabs");
    static constexpr u32 MEMORY = (sizeof(Shared) + 1023) / 1024 * 1024 + PLACES * B_PLACE + WARPS * (Y_RING + Z_RING);

    // `at`: where there is memory.
    DEVICE Way of(Warp w, u32 at) {
        w.b_at = div_ceil(at, 1024) * 1024;
        const u32 ring = w.b_at + PLACES * B_PLACE;
        w.ring = ring + w.warp * Y_RING + w.lane * 16, w.z_ring = ring + WARPS * Y_RING + w.warp * Z_RING;
        return {w};
    }

    __device__ __forceinline__ u32 place_of_b(u32 r) const { return b_at + r % PLACES * B_PLACE; }
    DEVICE void tell_b(u32 barrier) {
        wait_groups<0>();
        show_products();
        barrier_arrive(barrier);
    }

    // Fetches a run's part of B: of a slab a line an output, in the order of a product's columns.
    __device__ __forceinline__ void fetch_b(const Run& run, const u16* b, u32 to) const {
        const u32 out = p.site[run.site].out_features - run.first, o = lane % 8;
        b += (u64)run.first * p.b_stride;
#pragma unroll 1
        for (u32 slab = 0; slab < (SLABS > 1 ? slabs(run) : 1); slab++, to += SLAB) {
            const u32 rank = slab * CHUNKS * RANKS + o * 8, left = saturating(run.rank, rank), count = left < 8 ? left * 2 : 16;
            const u16* from = b + ((u64)(lane / 8) * p.b_stride + rank);
#pragma unroll 8
            for (u32 n = lane / 8; n < OUTPUTS; n += 4) {
                // Columns 2q and 2q + 1 of the m-th eight are outputs 8q + 2m and the next.
                const u32 column = n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2, is = n < out ? count : 0;
                copy16(to + column * LINE + (o ^ column % 8) * 16, is ? from : b, is);
                from += 4ull * p.b_stride;
            }
        }
        end_group();
    }
    DEVICE u32 slabs(const Run& run) { return div_ceil(run.rank, CHUNKS * RANKS); }

    DEVICE u32 turns(const Run& run) { return div_ceil(run.end - run.begin, 4); }
    __device__ __forceinline__ u32 first(const Run& run, u32 turn) const {
        return run.begin + (warp / 4 + WARPGROUPS - turn % WARPGROUPS) % WARPGROUPS * 4;
    }
    // This warp's of the four tiles from `four` on.
    __device__ __forceinline__ Mine tile(const Run& run, u32 four) const {
        const u32 t = four + warp % 4;
        return t < run.end ? Warp::tile(run, t) : Mine{run.y, 0, {0, 0}, {0.0f, 0.0f}};
    }

    // Fetches a step's y.
    __device__ __forceinline__ void fetch_y(u32 y_stride, const Mine& mine, u32 step) const {
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            copy16_if(mine.is[i % 2], ring + (step * 4 + i) * 512, mine.y + (i % 2 * 8ull * y_stride + step * STEP + i / 2 * 32));
    }
    __device__ __forceinline__ void fetch_z(const Run& run, const Mine& mine) const { fetch_chunks<SLABS * CHUNKS>(run, mine); }

    // z's parts of N chunks of a slab, low ones first.
    template <u32 N> using Parts = u32[N][3][4];
    template <u32 N> __device__ __forceinline__ void take_z(u32 slab, Parts<N>& parts) const {
#pragma unroll
        for (u32 c = 0; c < N; c++) {
            float2 f[4];
            read_z(slab * CHUNKS + c, f);
#pragma unroll
            for (u32 i = 0; i < 12; i++) {
                u32& part = parts[c][2 - i / 4][i % 4];
                part = take_high(f[i % 4].x, f[i % 4].y);
                // Products may begin only when all is there.
                settle(part);
            }
        }
    }

    // Adds a slab's products of a step; where not `add`, it is the first.
    template <u32 N> DEVICE void multiply(const Parts<N>& parts, u64 b, bool add, WideSums& d) {
#pragma unroll
        for (u32 c = 0; c < N; c++)
#pragma unroll
            for (u32 t = 0; t < 3; t++) Wide<Bf16>::multiply(d, parts[c][t], b + c * (RANKS * 2 / 16), add || c || t);
    }

    // What is looked up of a run but once.
    struct Known {
        u32 y_stride, steps, outputs;
        float scale;
    };

    // Adds a step's sums to y, in pieces of 16 bytes or, where the run's steps have ended, by elements.
    template <bool VECTORS>
    __device__ __forceinline__ void finish(const Run& run, const Known& known, const Mine& own, u32 s, const WideSums& d) const {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            // Rows g or g + 8, of the first or second 32 outputs.
            const u32 h = i % 2, a = i / 2, n = s * STEP + a * 32;
            float sum[4][4];
#pragma unroll
            for (u32 m = 0; m < 16; m++) sum[m / 4][m % 4] = d[a * 16 + m];
            u16* const to = own.y + (h * 8ull * known.y_stride + n);
            auto add = [&](const uint4& y) {
                return expand8<Bf16>(p.site[VECTORS ? run.site : 0], y, known.scale, own.scale[h], sum, 2 * h,
                                     VECTORS ? run.gains : nullptr, VECTORS ? run.first + n + lane % 4 * 8 : 0);
            };
            if (s < known.steps) {
                store16_if(own.is[h], to, add(read16(ring + (s * 4 + i) * 512)));
            } else {
                const u32 left = saturating(known.outputs, n + lane % 4 * 8), count = left < 8 ? left : 8;
                if (own.is[h] && count) keep_some8(to, count, add(some8(to, count)));
            }
        }
    }

    // Fours of tiles whose last slab has N chunks of ranks.
    template <u32 N, bool VECTORS> __device__ __forceinline__ void work_in(u32 r, u32 turn, Mine& own) const {
        const Run& run = shared.runs[r % KNOWN];
        const u64 b = wide_rows(from_lane(place_of_b(r), 0));
        const u32 end = run.end, last = SLABS > 1 ? slabs(run) - 1 : 0;
        const Known known = {run.y_stride, run.steps, run.steps * STEP + run.rest, run.scale};
#pragma unroll 1
        for (u32 t = first(run, turn); t < end; t += WARPS) {
            u32 later = t + WARPS, which = r;
            if (later >= end) {
                which = r + 1;
                barrier_wait(shared_address(&shared.told[which % KNOWN]), which / KNOWN % 2);
                later = first(shared.runs[which % KNOWN], turn + turns(run));
            }
            const Run& its = shared.runs[which % KNOWN];
            const bool any = later < its.end;
            Mine coming = {0, 0, {0, 0}, {0.0f, 0.0f}};
            if (any) coming = tile(its, later);
            const u32 its_stride = its.y_stride, its_steps = its.steps;
            WideSums d;
            wait_groups<STEPS - 1>();
            __syncwarp();
            if constexpr (SLABS > 1) {
#pragma unroll
                for (u32 i = 0; i < 32; i++) d[i] = 0.0f;
#pragma unroll 1
                for (u32 slab = 0; slab < last; slab++) {
                    Parts<CHUNKS> parts;
                    take_z<CHUNKS>(slab, parts);
                    wide_begin();
                    multiply<CHUNKS>(parts, b + slab * (SLAB / 16), true, d);
                    wide_end();
                    wide_wait(d);
                }
            }
            Parts<N> parts;
            take_z<N>(last, parts);
            __syncwarp();
            if (any) fetch_z(its, coming);
            // As a loop: unrolled, it is longer to fetch for the first time, which each launch waits for.
#pragma unroll 1
            for (u32 s = 0; s < STEPS; s++) {
                if (s * STEP < known.outputs) {
                    wide_begin();
                    multiply<N>(parts, b + (last * SLAB + s * STEP * LINE) / 16, SLABS > 1, d);
                    wide_end();
                    wait_groups<STEPS - 1>();
                    wide_wait(d);
                    finish<VECTORS>(run, known, own, s, d);
                }
                if (s < its_steps) fetch_y(its_stride, coming, s);
                end_group();
            }
            own = coming;
        }
    }

    template <bool VECTORS> __device__ __forceinline__ void work(u32 r, u32 turn, Mine& own) const {
        switch ((div_ceil(shared.runs[r % KNOWN].rank, RANKS) - 1) % CHUNKS) {
        case 0: work_in<1, VECTORS>(r, turn, own); break;
        case 1: work_in<2, VECTORS>(r, turn, own); break;
        case 2: work_in<3, VECTORS>(r, turn, own); break;
        default: work_in<4, VECTORS>(r, turn, own);
        }
    }
};
typedef Way<1, 256> UpTo64;
typedef Way<2, 64> UpTo128;
typedef Way<4, 64> UpTo256;
static_assert(UpTo64::MEMORY == 167936 && UpTo128::MEMORY == 118784 && UpTo256::MEMORY == 217088, "what launches count on");

EXPAND(bf16, BLOCK, 1) {
    extern __shared__ __align__(1024) unsigned char memory[];
    if (p.max_rank <= 64) expand<UpTo64>(EXPAND_ARGUMENTS);
    else if (p.max_rank <= 128) expand<UpTo128>(EXPAND_ARGUMENTS);
    else expand<UpTo256>(EXPAND_ARGUMENTS);
}
