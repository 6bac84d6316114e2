// The prefill shrink for sm_90, bf16 or f16 (prefill_shrink.cuh): a warp multiplies two of the tiles (i and i + 4) by half of the
// blocks of ranks; x is the 16-row side of the product, A the 8-column side, both in shared memory as ldmatrix wants them.
#include "prefill_shrink.cuh"

// A lane's pieces of 8 rows or ranks by 32 columns.
constexpr u32 PIECES = 512;
// Those of a chunk of 8 rows or ranks.
constexpr u32 SLAB = COLUMNS / 32 * PIECES;

template <class E> struct Way {
    static constexpr u32 TILES = 8, MOST = 12, SPACE = 106496, ROWS = 2, X_STAGE = TILES * 2 * SLAB;

    // Rings of a pass in which each warp has EACH blocks of ranks: x's, then A's. Copies to pieces that straddle lines of 128
    // bytes take twice as long.
    template <u32 EACH> struct Rings {
        static constexpr u32 BLOCKS = 2 * EACH;
        static constexpr u32 A_STAGE = BLOCKS * SLAB;
        static constexpr u32 FIT = SPACE / (X_STAGE + A_STAGE);
        static constexpr u32 STAGES = FIT < 5 ? FIT : 5;
        static constexpr u32 A = STAGES * X_STAGE;
        // Pieces of A that a thread fetches of a chunk; not all warps have the last.
        static constexpr u32 OWN = (BLOCKS * (COLUMNS / 32) + TILES - 1) / TILES;
        static_assert(STAGES >= 3, "two chunks ahead");
    };

    DEVICE u32 early(u32 blocks) { return blocks <= 6 ? Rings<3>::STAGES - 1 : 2; }
    DEVICE u32 row(u32 i) { return lane_of() / 4 + i * 8; }
    DEVICE u32 column() { return lane_of() % 4 * 8; }

    // Where 16 bytes of a piece are: those of a row stay together in a line of 128 bytes, and any eight rows' of the same columns
    // are in different banks.
    DEVICE u32 place_in_piece(u32 row, u32 eighth) { return row * 64 + (eighth ^ row / 2) * 16; }
    // Where a lane's copies go, and the row of 8 columns that it names in one of a product's matrices.
    DEVICE u32 own_place() { return place_in_piece(lane_of() / 4, lane_of() % 4); }

    // Where this thread's pieces of x go in a ring's first place.
    DEVICE u32 x_to(u32 ring) { return ring + warp_of() * 2 * SLAB + own_place(); }
    // Fetches x of a chunk: two slabs of the warp's tile.
    DEVICE void fetch_x(const Params& p, const Work<ROWS>& work, u32 to, u32 chunk) {
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
                const u32 left = saturating(p.in_features, at + column());
                const uint4 v = some8((i < COLUMNS / 32 ? work.x[0] : work.x[1]) + at, left);
                write16(to + i * PIECES, v);
            }
        }
    }

    // This thread's pieces of A, counted from weights on.
    template <u32 EACH> DEVICE void find_a(const Pass<ROWS>& pass, u32 (&a)[Rings<EACH>::OWN]) {
#pragma unroll
        for (u32 i = 0; i < Rings<EACH>::OWN; i++) {
            const u32 piece = warp_of() + i * TILES;
            const Eight e = eight(pass.matrices, pass.begin + (piece / 2 < pass.blocks ? piece / 2 : 0));
            // Ranks that there aren't are of the first.
            const u32 g = e.rank + (lane_of() / 4 < e.left ? lane_of() / 4 : 0);
            a[i] = e.matrix + g * (pass.p.a_stride / 8) + piece % 2 * 4 + lane_of() % 4;
        }
    }

    template <u32 EACH> DEVICE void fetch_a(const Pass<ROWS>& pass, const u32 (&a)[Rings<EACH>::OWN], u32 to, u32 chunk) {
        const u32 k = chunk * COLUMNS;
        if (k + COLUMNS <= pass.p.in_features) {
#pragma unroll
            for (u32 i = 0; i < Rings<EACH>::OWN; i++)
                if (warp_of() + i * TILES < pass.blocks * 2)
                    copy_all16(to + i * TILES * PIECES, pass.weights + ((u64)a[i] * 16 + k * 2));
        } else {
            const u32 left = saturating(pass.p.in_features, k + warp_of() % 2 * 32 + lane_of() % 4 * 8);
            const u32 bytes = left < 8 ? left * 2 : 16;
#pragma unroll
            for (u32 i = 0; i < Rings<EACH>::OWN; i++)
                if (warp_of() + i * TILES < pass.blocks * 2)
                    copy16(to + i * TILES * PIECES, pass.weights + ((u64)a[i] * 16 + (bytes ? k * 2 : 0)), bytes);
        }
    }

    template <u32 EACH> DEVICE void multiply(const Pass<ROWS>& pass, u32 ring, float (&sum)[2][EACH][4]) {
        typedef Rings<EACH> R;
        constexpr u32 STAGES = R::STAGES;
        const Params& p = pass.p;
        const Work<ROWS>& work = pass.work;
        const u32 lane = lane_of(), warp = warp_of();
        u32 a[R::OWN];
        find_a<EACH>(pass, a);
        const u32 x_to = Way::x_to(ring), a_to = ring + R::A + warp * PIECES + own_place();
        // Of x matrices are rows 0 and 8 on, of two blocks of 8 columns; of A four blocks of columns. The second half of
        // 32 columns is 2 blocks further: a bit of the place.
        const u32 x_row = ring + warp % 4 * 2 * SLAB + lane / 8 % 2 * SLAB;
        const u32 x_from = x_row + place_in_piece(lane % 8, lane / 16);
        const u32 a_from = ring + R::A + warp / 4 * EACH * SLAB + place_in_piece(lane % 8, lane / 8);
#pragma unroll
        for (u32 t = 0; t < 2; t++)
#pragma unroll
            for (u32 b = 0; b < EACH; b++) sum[t][b][0] = sum[t][b][1] = sum[t][b][2] = sum[t][b][3] = 0.0f;
#pragma unroll 1
        for (u32 s = 0; s < STAGES - 1; s++) {
            if (work.first + s < work.end) {
                if (s >= pass.early) fetch_x(p, work, x_to + s * X_STAGE, work.first + s);
                fetch_a<EACH>(pass, a, a_to + s * R::A_STAGE, work.first + s);
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
                fetch_a<EACH>(pass, a, a_to + ahead * R::A_STAGE, chunk + STAGES - 1);
            }
            end_group();
#pragma unroll
            for (u32 c = 0; c < COLUMNS / 32; c++) {
                u32 v[2][2][4];
#pragma unroll
                for (u32 t = 0; t < 2; t++)
#pragma unroll
                    for (u32 k = 0; k < 2; k++)
                        load_matrices((x_from + stage * X_STAGE + t * 8 * SLAB + c * PIECES) ^ k * 32, v[t][k]);
#pragma unroll
                for (u32 b = 0; b < EACH; b++) {
                    u32 w[4];
                    load_matrices(a_from + stage * R::A_STAGE + b * SLAB + c * PIECES, w);
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

    template <u32 EACH> DEVICE void run_in(const Pass<ROWS>& pass, Shared<SPACE>& shared, bool& waited) {
        float sum[2][EACH][4];
        multiply<EACH>(pass, shared_address(shared.space), sum);
        add_up<Way, Rings<EACH>::BLOCKS>(pass, shared, waited, [&](const Inboxes& inboxes) {
#pragma unroll
            for (u32 t = 0; t < 2; t++) {
                const u32 owner = warp_of() % 4 + t * 4;
                if (owner >= pass.work.count) continue;
                const u32 at = inboxes.of(owner) + warp_of() / 4 * EACH * SUMS;
#pragma unroll
                for (u32 b = 0; b < EACH; b++) store_there(at + b * SUMS, sum[t][b]);
            }
        });
    }
    DEVICE void run(const Pass<ROWS>& pass, Shared<SPACE>& shared, bool& waited) {
        if (pass.blocks <= 2) run_in<1>(pass, shared, waited);
        else if (pass.blocks <= 4) run_in<2>(pass, shared, waited);
        else if (pass.blocks <= 6) run_in<3>(pass, shared, waited);
        else if (pass.blocks <= 8) run_in<4>(pass, shared, waited);
        else run_in<6>(pass, shared, waited);
    }
};

static_assert(sizeof(Shared<Way<Bf16>::SPACE>) == 109696, "what launches count on");
SHRINK(bf16, Way<Bf16>, 2)
SHRINK(f16, Way<F16>, 2)
