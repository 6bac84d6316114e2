// y[row][id j] = sum_k rows[slot(row)][j][k] * x[row][k], rounded once, for each of the slot's ids j below out_features;
// all else of y keeps its bits.
//
//   x [rows][x_stride] act      overlay: ids [max_rank] u32, rows [max_rank][a_stride] weight
//   y [rows][y_stride] act, from y_offset on
//   block  row * ceil(max_rank / OVERLAY_ROWS) + part; a warp reduces one token row
//
// Lane l adds the terms of columns 8l..8l+8, 8l+256..8l+264, ... in ascending order; the lanes' sums are added
// by a butterfly, as in bgmv_shrink.
#include "tokens.cuh"

constexpr u32 LANES = THREADS / OVERLAY_ROWS;
static_assert(LANES == 32, "the butterfly is a warp's");

template <class Act, class Weight>
DEVICE void overlay_logits(const u32* batch, const u32* tables, const unsigned char* weights, const void* x, void* y,
                           const Params& p) {
    typedef typename Act::Bits X;
    typedef typename Weight::Bits W;
    const u32 parts = div_ceil(p.max_rank, OVERLAY_ROWS);
    const u32 block = block_index();
    const u64 row = block / parts;
    if (row >= p.rows) return;
    const u32 j = block % parts * OVERLAY_ROWS + threadIdx.x / LANES;
    const u32 lane = threadIdx.x % LANES;
    const Overlay<W> overlay = overlay_of<W>(p, tables, weights, (int)batch[2 * (p.row_first + row)]);
    // The same for all lanes of a warp, so the butterfly below has them all.
    if (j >= overlay.count) return;

    const X* x_row = reinterpret_cast<const X*>(x) + row * p.x_stride;
    const W* from = overlay.rows + (u64)j * p.a_stride;
    const bool x_wide = is_wide(x_row, 0);
    const bool from_wide = is_wide(from, 0);
    float sum = 0.0f;
    for (u64 k = lane * CHUNK; k < p.in_features; k += LANES * CHUNK) {
        const u32 left = p.in_features - (u32)k;
        const u32 count = left < CHUNK ? left : CHUNK;
        float a[CHUNK], b[CHUNK];
        load<Weight>(from + k, count, from_wide, a);
        load<Act>(x_row + k, count, x_wide, b);
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++)
            if (i < count) sum = __fmaf_rn(a[i], b[i], sum);
    }
#pragma unroll
    for (u32 step = LANES / 2; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
    const u32 id = overlay.ids[j];
    if (lane == 0 && id < p.site[0].out_features)
        reinterpret_cast<X*>(y)[p.site[0].y_offset + row * p.site[0].y_stride + id] = Act::narrow(sum);
}

// The entry: x where the kernels of token ids have ids.
#define ENTRY(act, act_code, weight, weight_code)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) lorapool_overlay_logits_##act##_##weight(                    \
        const u32* __restrict__ batch, const u32* __restrict__ tables, const unsigned char* __restrict__ weights,     \
        const void* __restrict__ x, void* __restrict__ y, const __grid_constant__ Params p) {                          \
        overlay_logits<Element<act_code>, Element<weight_code> >(batch, tables, weights, x, y, p);                     \
    }
FOR_EACH_SPEC(ENTRY)
