// The prefill shrink for sm_90a, bf16 or f16, for many ranks (prefill_shrink.cuh): each of three warpgroups multiplies four of the
// tiles by all blocks of ranks of a pass, 64 ranks a product, both from shared memory. One block fits on a multiprocessor: its rings
// are deep, and x is read once for up to 192 ranks.
#include "prefill_shrink.cuh"
#include "wgmma.cuh"

// Bytes of a row or rank of a chunk.
constexpr u32 LINE = COLUMNS * 2;
// Ranks of a product.
constexpr u32 WIDE_RANKS = 64;
static_assert(LINE == 128, "lines as products take them");

template <class E> struct Way {
    static constexpr u32 TILES = 12, MOST = 24, SPACE = 196608, ROWS = 4, X_STAGE = TILES * SGMV_TILE_ROWS * LINE;

    // Rings of a pass of COUNT products of ranks: x's, then A's.
    template <u32 COUNT> struct Rings {
        static constexpr u32 BLOCKS = COUNT * WIDE_RANKS / 8;
        static constexpr u32 A_STAGE = COUNT * WIDE_RANKS * LINE;
        static constexpr u32 FIT = SPACE / (X_STAGE + A_STAGE);
        static constexpr u32 STAGES = FIT < 6 ? FIT : 6;
        static constexpr u32 A = STAGES * X_STAGE;
        // Fours of ranks that a warp fetches of a chunk; not all warps have the last.
        static constexpr u32 OWN = (COUNT * WIDE_RANKS / 4 + TILES - 1) / TILES;
    };

    DEVICE u32 early(u32) { return Rings<MOST * 8 / WIDE_RANKS>::STAGES - 1; }
    DEVICE u32 row(u32 i) { return lane_of() / 8 + i * 4; }
    DEVICE u32 column() { return lane_of() % 8 * 8; }
    // Where this lane's 16 bytes of a line go.
    DEVICE u32 place(u32 line) { return line * LINE + (lane_of() % 8 ^ line % 8) * 16; }

    // Where the lines of the warp's tile go in a ring's first place.
    DEVICE u32 x_to(u32 ring) { return ring + warp_of() * SGMV_TILE_ROWS * LINE; }
    // Fetches x of a chunk.
    DEVICE void fetch_x(const Params& p, const Work<ROWS>& work, u32 to, u32 chunk) {
        const u32 k = chunk * COLUMNS;
        if (warp_of() >= work.count) return;
        if (work.wide && k + COLUMNS <= p.in_features) {
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) copy_all16(to + place(row(i)), work.x[i] + k);
        } else {
            const u32 left = saturating(p.in_features, k + column());
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) write16(to + place(row(i)), some8(work.x[i] + k, left));
        }
    }

    // The first of this warp's `i`-th four ranks of the pass.
    DEVICE u32 four(u32 i) { return (i * TILES + warp_of()) * 4; }

    // This thread's pieces of A, counted from weights on.
    template <u32 OWN> DEVICE void find_a(const Pass<ROWS>& pass, u32 (&a)[OWN]) {
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            const u32 b = four(i) / 8, r = four(i) % 8 + lane_of() / 8;
            const Eight e = eight(pass.matrices, pass.begin + (b < pass.blocks ? b : 0));
            // Ranks that there aren't are of the first.
            a[i] = e.matrix + (e.rank + (r < e.left ? r : 0)) * (pass.p.a_stride / 8) + lane_of() % 8;
        }
    }

    template <u32 OWN> DEVICE void fetch_a(const Pass<ROWS>& pass, const u32 (&a)[OWN], u32 to, u32 chunk) {
        const u32 k = chunk * COLUMNS;
        if (k + COLUMNS <= pass.p.in_features) {
#pragma unroll
            for (u32 i = 0; i < OWN; i++)
                if (four(i) / 8 < pass.blocks)
                    copy_all16(to + place(four(i) + lane_of() / 8), pass.weights + ((u64)a[i] * 16 + k * 2));
        } else {
            const u32 left = saturating(pass.p.in_features, k + column()), bytes = left < 8 ? left * 2 : 16;
#pragma unroll
            for (u32 i = 0; i < OWN; i++)
                if (four(i) / 8 < pass.blocks)
                    copy16(to + place(four(i) + lane_of() / 8), pass.weights + ((u64)a[i] * 16 + (bytes ? k * 2 : 0)), bytes);
        }
    }

    template <u32 COUNT> DEVICE void multiply(const Pass<ROWS>& pass, u32 ring, WideSums (&sum)[COUNT]) {
        typedef Rings<COUNT> R;
        constexpr u32 STAGES = R::STAGES;
        static_assert(STAGES >= 4, "as many chunks of x ahead as begin before ranks are known");
        const Work<ROWS>& work = pass.work;
        const u32 x_to = Way::x_to(ring);
        u32 a[R::OWN];
        find_a(pass, a);
#pragma unroll
        for (u32 n = 0; n < COUNT; n++)
#pragma unroll
            for (u32 i = 0; i < 32; i++) sum[n][i] = 0.0f;
        auto fetch = [&](u32 stage, u32 chunk, bool with_x) {
            if (chunk < work.end) {
                if (with_x) fetch_x(pass.p, work, x_to + stage * X_STAGE, chunk);
                fetch_a(pass, a, ring + R::A + stage * R::A_STAGE, chunk);
            }
            end_group();
        };
#pragma unroll 1
        for (u32 s = 0; s < STAGES - 1; s++) fetch(s, work.first + s, s >= pass.early);
        const u64 x_from = wide_rows(ring + from_lane(warp_of(), 0) / 4 * (4 * SGMV_TILE_ROWS * LINE));
        const u64 a_from = wide_rows(ring + R::A);
        u32 stage = 0;
#pragma unroll 1
        for (u32 chunk = work.first; chunk < work.end; chunk++) {
            wait_groups<STAGES - 2>();
            show_products();
#pragma unroll
            for (u32 n = 0; n < COUNT; n++) wide_wait(sum[n]);
            __syncthreads();
            // Into the place of the chunk before.
            fetch(stage ? stage - 1 : STAGES - 1, chunk + STAGES - 1, true);
            const u64 x_now = x_from + stage * (X_STAGE / 16), a_now = a_from + stage * (R::A_STAGE / 16);
            wide_begin();
#pragma unroll
            for (u32 k = 0; k < COLUMNS / 16; k++)
#pragma unroll
                for (u32 n = 0; n < COUNT; n++)
                    Wide<E>::multiply(sum[n], x_now + k * 2, a_now + (n * (WIDE_RANKS * LINE / 16) + k * 2));
            wide_end();
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
#pragma unroll
        for (u32 n = 0; n < COUNT; n++) wide_wait(sum[n]);
    }

    template <u32 COUNT> DEVICE void run_in(const Pass<ROWS>& pass, Shared<SPACE>& shared, bool& waited) {
        WideSums sum[COUNT];
        multiply<COUNT>(pass, shared_address(shared.space), sum);
        add_up<Way, Rings<COUNT>::BLOCKS>(pass, shared, waited, [&](const Inboxes& inboxes) {
            if (warp_of() >= pass.work.count) return;
            const u32 at = inboxes.of(warp_of());
#pragma unroll
            for (u32 b = 0; b < Rings<COUNT>::BLOCKS; b++) {
                const float* own = sum[b / 8] + b % 8 * 4;
                const float v[4] = {own[0], own[1], own[2], own[3]};
                if (b < pass.blocks) store_there(at + b * SUMS, v);
            }
        });
    }
    DEVICE void run(const Pass<ROWS>& pass, Shared<SPACE>& shared, bool& waited) {
        if (pass.blocks <= 8) run_in<1>(pass, shared, waited);
        else if (pass.blocks <= 16) run_in<2>(pass, shared, waited);
        else run_in<3>(pass, shared, waited);
    }
};

static_assert(sizeof(Shared<Way<Bf16>::SPACE>) == 199808, "what launches count on");
SHRINK(bf16, Way<Bf16>, 1)
SHRINK(f16, Way<F16>, 1)
