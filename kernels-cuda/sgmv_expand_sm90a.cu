// The prefill expand for sm_90a, bf16, ranks up to 64 (prefill_expand.cuh): a warpgroup has four tiles at a time, one a warp, and every
// WARPGROUPS-th four of all runs; z in registers is the 64-row side of its products, B in shared memory the 64-column side.
//
// z is taken as the sum of three bf16, which it is exactly. Order of a sum: ranks ascending in chunks of RANKS; of a chunk the
// low parts of z, then the middle ones, then the high ones.
#include "prefill_expand.cuh"
#include "wgmma.cuh"

// Warpgroups that work.
constexpr u32 WARPGROUPS = 2;
constexpr u32 BLOCK = (WARPGROUPS * 4 + 1) * 32;
// Chunks of RANKS ranks that there is room for: a line of B.
constexpr u32 CHUNKS = 4;
constexpr u32 LINE = CHUNKS * RANKS * 2;
static_assert(BLOCK >= WINDOW && LINE == 128, "a thread for each tile; lines as products take them");

struct Way : Warp {
    static constexpr u32 WARPS = WARPGROUPS * 4, OUTPUTS = 256, STEP = 64, STEPS = OUTPUTS / STEP;
    // Bytes of B's places, of a warp's y and of its z.
    static constexpr u32 B_PLACE = OUTPUTS * LINE, Y_RING = OUTPUTS * 32, Z_RING = CHUNKS * 1024;
    static constexpr u32 MEMORY = (sizeof(Shared) + 1023) / 1024 * 1024 + PLACES * B_PLACE + WARPS * (Y_RING + Z_RING);

    // `at`: where there is memory.
    DEVICE Way of(Warp w, u32 at) {
        const u32 b_at = div_ceil(at, 1024) * 1024, ring = b_at + PLACES * B_PLACE;
        return {{w.p, w.batch, w.z, w.shared, b_at, ring + w.warp * Y_RING + w.lane * 16, ring + WARPS * Y_RING + w.warp * Z_RING,
                 w.z_wide, w.lane, w.warp}};
    }

    __device__ __forceinline__ u32 place_of_b(u32 r) const { return b_at + r % PLACES * B_PLACE; }
    DEVICE void tell_b(u32 barrier) {
        wait_groups<0>();
        show_products();
        barrier_arrive(barrier);
    }

    // Fetches a run's part of B: a line an output, in the order of a product's columns.
    __device__ __forceinline__ void fetch_b(const Run& run, const u16* b, u32 to) const {
        const u32 out = p.site[run.site].out_features - run.first;
        const u32 o = lane % 8, left = saturating(run.rank, o * 8), count = left < 8 ? left * 2 : 16;
        const u16* from = b + ((u64)(run.first + lane / 8) * p.b_stride + o * 8);
#pragma unroll 8
        for (u32 n = lane / 8; n < OUTPUTS; n += 4) {
            // Columns 2q and 2q + 1 of the m-th eight are outputs 8q + 2m and the next.
            const u32 column = n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2, is = n < out ? count : 0;
            copy16(to + column * LINE + (o ^ column % 8) * 16, is ? from : b, is);
            from += 4ull * p.b_stride;
        }
        end_group();
    }

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
    __device__ __forceinline__ void fetch_z(const Run& run, const Mine& mine) const { fetch_chunks<CHUNKS>(run, mine); }

    // z's parts of N chunks, low ones first.
    template <u32 N> using Parts = u32[N][3][4];

    // Eight outputs of a row: rows g (`half` 0) or g + 8 (2) of the products' sums, of the `a`-th 32 outputs.
    DEVICE uint4 add(const SiteParams& site, const uint4& y, float site_scale, float row_scale, const WideSums& d, u32 a, u32 half,
                     const float* gains, u32 n) {
        float s[4][4];
#pragma unroll
        for (u32 i = 0; i < 16; i++) s[i / 4][i % 4] = d[a * 16 + i];
        return expand8<Bf16>(site, y, site_scale, row_scale, s, half, gains, n);
    }

    template <u32 N> DEVICE void multiply(const Parts<N>& parts, u64 b, WideSums& d) {
        wide_begin();
#pragma unroll
        for (u32 c = 0; c < N; c++)
#pragma unroll
            for (u32 t = 0; t < 3; t++) Wide<Bf16>::multiply(d, parts[c][t], b + c * (RANKS * 2 / 16), c || t);
        wide_end();
    }

    // Outputs that no step takes, element by element.
    template <u32 N> __device__ __forceinline__ void rest(const Run& run, const Mine& own, u64 b, const Parts<N>& parts) const {
#pragma unroll 1
        for (u32 done = 0; done < run.rest; done += STEP) {
            const u32 step = run.steps * STEP + done;
            WideSums d;
            multiply<N>(parts, b + step * (LINE / 16), d);
            wide_wait(d);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 h = i % 2, n = step + i / 2 * 32, left = saturating(run.rest, done + i / 2 * 32 + lane % 4 * 8);
                const u32 count = left < 8 ? left : 8;
                if (!own.is[h] || !count) continue;
                u16* const to = own.y + (h * 8ull * run.y_stride + n);
                keep_some8(to, count, add(p.site[run.site], some8(to, count), run.scale, own.scale[h], d, i / 2, 2 * h, run.gains,
                                          run.first + n + lane % 4 * 8));
            }
            __syncwarp();
        }
    }

    // The fours of N chunks of ranks.
    template <u32 N, bool VECTORS> __device__ __forceinline__ void work_in(u32 r, u32 turn, Mine& own) const {
        const Run& run = shared.runs[r % KNOWN];
        const u64 b = wide_rows(from_lane(place_of_b(r), 0));
        const u32 end = run.end, y_stride = run.y_stride, steps = run.steps;
        const float site_scale = run.scale;
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
            Parts<N> parts;
            wait_groups<STEPS - 1>();
            __syncwarp();
#pragma unroll
            for (u32 c = 0; c < N; c++) {
                float2 f[4];
                read_z(c, f);
#pragma unroll
                for (u32 i = 0; i < 12; i++) parts[c][2 - i / 4][i % 4] = take_high(f[i % 4].x, f[i % 4].y);
            }
            __syncwarp();
            if (any) fetch_z(its, coming);
            // As a loop: unrolled, it is twice as long to fetch for the first time, which each launch waits for.
#pragma unroll 1
            for (u32 s = 0; s < STEPS; s++) {
                if (s < steps) {
                    WideSums d;
                    multiply<N>(parts, b + s * (STEP * LINE / 16), d);
                    wait_groups<STEPS - 1>();
                    uint4 v[4];
#pragma unroll
                    for (u32 i = 0; i < 4; i++) v[i] = read16(ring + (s * 4 + i) * 512);
                    wide_wait(d);
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const u32 h = i % 2, n = s * STEP + i / 2 * 32;
                        v[i] = add(p.site[VECTORS ? run.site : 0], v[i], site_scale, own.scale[h], d, i / 2, 2 * h,
                                   VECTORS ? run.gains : nullptr, VECTORS ? run.first + n + lane % 4 * 8 : 0);
                        store16_if(own.is[h], own.y + (h * 8ull * y_stride + n), v[i]);
                    }
                }
                if (s < its_steps) fetch_y(its_stride, coming, s);
                end_group();
            }
            if (run.rest) rest<N>(run, own, b, parts);
            own = coming;
        }
    }

    template <bool VECTORS> __device__ __forceinline__ void work(u32 r, u32 turn, Mine& own) const {
        switch (div_ceil(shared.runs[r % KNOWN].rank, RANKS)) {
        case 1: work_in<1, VECTORS>(r, turn, own); break;
        case 2: work_in<2, VECTORS>(r, turn, own); break;
        case 3: work_in<3, VECTORS>(r, turn, own); break;
        default: work_in<4, VECTORS>(r, turn, own);
        }
    }
};
static_assert(Way::MEMORY == 167936, "what launches count on");

EXPAND(bf16, BLOCK, 1) {
    extern __shared__ __align__(1024) unsigned char memory[];
    expand<Way>(EXPAND_ARGUMENTS);
}
