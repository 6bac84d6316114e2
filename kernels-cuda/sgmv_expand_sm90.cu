// The prefill expand for sm_90, bf16 or f16 (prefill_expand.cuh): a warp has every WARPS-th tile; z is the 16-row side of the
// product, B the 8-column side, by ldmatrix.
//
// Order of a sum: ranks ascending in chunks of RANKS, of which Side tells the rest.
#include "prefill_expand.cuh"

// Warps that work.
constexpr u32 WORKERS = 7;
constexpr u32 BLOCK = (WORKERS + 1) * 32;
// Chunks of RANKS ranks that a warp takes at a time where there are more than it keeps.
constexpr u32 KEPT = 2;
static_assert(BLOCK >= WINDOW, "a thread for each tile");
static_assert((sizeof(Shared) + 127) / 128 * 128 == 3840, "what launches count on");

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
            // Split here each time: there are no registers to keep the parts in.
#pragma unroll
            for (u32 i = 0; i < 4; i++) settle(of[i]);
            u32 low[4], high[4];
            float first[4], second[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const HighLow parts = split_tf32(of[i]);
                high[i] = parts.high, low[i] = parts.low;
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

// CHUNKS: of z and B that are kept for the outputs; 0: B's as max_rank needs, and z's are loaded when it is their turn.
template <class E, u32 CHUNKS, u32 OUTPUTS_> struct Way : Warp {
    static constexpr u32 WARPS = WORKERS, OUTPUTS = OUTPUTS_, STEP = 32, STEPS = OUTPUTS / STEP;
    // Of B; segments of few rows need many.
    static constexpr u32 PLACES = CHUNKS == 1 || CHUNKS == 2 ? 4 : 2;
    // Of z, that a warp has at a time.
    static constexpr u32 HELD = CHUNKS ? CHUNKS : KEPT;

    u32 chunks;            // that B has room for

    // `at`: where there is memory.
    DEVICE Way of(Warp w, u32 at) {
        const u32 chunks = CHUNKS ? CHUNKS : div_ceil(w.p.max_rank, RANKS);
        w.b_at = div_ceil(at, 128) * 128;
        const u32 ring = w.b_at + PLACES * OUTPUTS * chunks * RANKS * 2;
        w.ring = ring + w.warp * OUTPUTS * 32 + w.lane * 16, w.z_ring = ring + WARPS * OUTPUTS * 32 + w.warp * CHUNKS * 1024;
        return {w, chunks};
    }

    __device__ __forceinline__ u32 place_of_b(u32 r) const {
        return b_at + r % PLACES * (OUTPUTS * (CHUNKS ? CHUNKS : chunks) * RANKS * 2);
    }
    DEVICE void tell_b(u32 barrier) { barrier_arrive_after_copies(barrier); }

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

    __device__ __forceinline__ u32 first(const Run& run, u32) const { return run.begin + (warp + WARPS - run.begin % WARPS) % WARPS; }
    DEVICE u32 turns(const Run&) { return 0; }

    // Fetches a step's y.
    __device__ __forceinline__ void fetch_y(u32 y_stride, const Mine& mine, u32 step) const {
#pragma unroll
        for (u32 h = 0; h < 2; h++)
            copy16_if(mine.is[h], ring + (step * 2 + h) * 512, mine.y + (h * 8ull * y_stride + step * STEP));
    }

    __device__ __forceinline__ void fetch_z(const Run& run, const Mine& mine) const {
        if (CHUNKS) fetch_chunks<HELD>(run, mine);
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

    template <bool VECTORS> __device__ __forceinline__ void work(u32 r, u32 turn, Mine& own) const {
        const Run& run = shared.runs[r % KNOWN];
        const u32 b = place_of_b(r) + lane * 16;
        const u32 end = run.end, y_stride = run.y_stride, steps = run.steps, rank_chunks = div_ceil(run.rank, RANKS);
        const float site_scale = run.scale;
#pragma unroll 1
        for (u32 t = first(run, turn); t < end; t += WARPS) {
            u32 later = t + WARPS, which = r;
            if (later >= end) {
                which = r + 1;
                barrier_wait(shared_address(&shared.told[which % KNOWN]), which / KNOWN % 2);
                later = first(shared.runs[which % KNOWN], turn);
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
                for (u32 c = 0; c < HELD; c++) {
                    float2 f[4];
                    read_z(c, f);
                    sides[c].take(f);
                }
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
};

#define ENTRY(name, E)                                                                                                 \
    EXPAND(name, BLOCK, 2) {                                                                                           \
        extern __shared__ __align__(128) unsigned char memory[];                                                       \
        if (p.max_rank <= 16) expand<Way<E, 1, 256>>(EXPAND_ARGUMENTS);                                                \
        else if (p.max_rank <= 32) expand<Way<E, 2, 128>>(EXPAND_ARGUMENTS);                                           \
        else if (p.max_rank <= 64) expand<Way<E, 4, 128>>(EXPAND_ARGUMENTS);                                           \
        else if (p.max_rank <= 256) expand<Way<E, 0, 64>>(EXPAND_ARGUMENTS);                                           \
        else expand<Way<E, 0, 32>>(EXPAND_ARGUMENTS);                                                                  \
    }
ENTRY(bf16, Bf16)
ENTRY(f16, F16)
