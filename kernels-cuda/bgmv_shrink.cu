// z[row][z_offset + r] = sum_k A[slot(row)][r][k] * x[x_row(row)][k], for r < rank: decode, every row by itself.
//
//   x [][x_stride] act      A [rank][a_stride] weight      z [rows][z_stride] f32
//   block  row * ceil(max_rank / BGMV_SHRINK_RANKS) + part; a warp reduces one rank row of A
//
// Lane l adds the terms of columns 8l..8l+8, 8l+256..8l+264, ... in ascending order; the lanes' sums are added
// by a butterfly. Alignment decides how elements are loaded, never in which order they are added.
#include "common.cuh"

constexpr u32 LANES = THREADS / BGMV_SHRINK_RANKS;
static_assert(LANES == 32, "the butterfly is a warp's");

template <class Act, class Weight>
DEVICE void bgmv_shrink(const u32* batch, const u32* tables, const unsigned char* weights, const void* x, float* z,
                        const Params& p) {
    const u32 parts = div_ceil(p.max_rank, BGMV_SHRINK_RANKS);
    const u32 block = block_index();
    const u64 row = block / parts;
    if (row >= p.rows) return;
    const u32 rank = block % parts * BGMV_SHRINK_RANKS + threadIdx.x / LANES;
    const u32 lane = threadIdx.x % LANES;
    const SiteParams& site = p.site[blockIdx.z];
    const Pair pair = pair_of(p, site, tables, (int)batch[2 * (p.row_first + row)]);
    // The same for all lanes of a warp, so the butterfly below has them all.
    if (rank >= pair.rank) return;

    typedef typename Act::Bits X;
    typedef typename Weight::Bits W;
    const u32 from = x_row(p, batch, (u32)row);
    const u32 in_features = from == NO_ROW ? 0 : p.in_features;
    const X* x_part = reinterpret_cast<const X*>(x) + (u64)(from == NO_ROW ? 0 : from) * p.x_stride;
    const W* a_row = reinterpret_cast<const W*>(weights + pair.offset) + (u64)rank * p.a_stride;
    const bool x_wide = is_wide(x_part, 0);
    const bool a_wide = is_wide(a_row, 0);

    float sum = 0.0f;
    for (u64 k = lane * CHUNK; k < in_features; k += LANES * CHUNK) {
        const u32 left = in_features - (u32)k;
        const u32 count = left < CHUNK ? left : CHUNK;
        float a[CHUNK], b[CHUNK];
        load<Weight>(a_row + k, count, a_wide, a);
        load<Act>(x_part + k, count, x_wide, b);
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++)
            if (i < count) sum = __fmaf_rn(a[i], b[i], sum);
    }
#pragma unroll
    for (u32 step = LANES / 2; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
    if (lane == 0) z[row * p.z_stride + site.z_offset + rank] = sum;
}

#define ENTRY(act, act_code, weight, weight_code) SHRINK_ENTRY(bgmv_shrink, act, act_code, weight, weight_code)
FOR_EACH_SPEC(ENTRY)
