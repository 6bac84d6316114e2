// y[row][n] += scale * sum_r B[slot(row)][n][r] * z[row][z_offset + r], rounded once: decode, every row by itself.
//
//   z [rows][z_stride] f32      B [out_features][b_stride] weight      y [rows][y_stride] act, from y_offset on
//   block  row * ceil(max_out / BGMV_EXPAND_OUTPUTS) + part; a thread owns two adjacent outputs
//
// Each sum takes r in ascending order. Vectors behind B change y as the contract says.
#include "common.cuh"

constexpr u32 OUTPUTS = BGMV_EXPAND_OUTPUTS / THREADS;

template <class Act, class Weight>
DEVICE void bgmv_expand(const u32* batch, const u32* tables, const unsigned char* weights, const float* z, void* y,
                        const Params& p) {
    __shared__ float z_row[MAX_RANK];
    const u32 parts = div_ceil(p.max_out, BGMV_EXPAND_OUTPUTS);
    const u32 block = block_index();
    const u64 row = block / parts;
    if (row >= p.rows) return;
    const SiteParams& site = p.site[blockIdx.z];
    const u64 first = (u64)(block % parts) * BGMV_EXPAND_OUTPUTS;
    if (first >= site.out_features) return;
    const Pair pair = expand_pair_of<typename Weight::Bits>(p, site, tables, (int)batch[2 * (p.row_first + row)]);
    // Every return so far is taken by all threads of the block or by none.
    if (pair.rank == 0) return;
    const float* z_from = z + (row * p.z_stride + site.z_offset);
    for (u32 r = threadIdx.x; r < pair.rank; r += THREADS) z_row[r] = z_from[r];
    __syncthreads();

    typedef typename Act::Bits Y;
    typedef typename Weight::Bits W;
    const W* b = reinterpret_cast<const W*>(weights + pair.offset);
    const bool wide = is_wide(b, p.b_stride);
    const u64 n = first + threadIdx.x * OUTPUTS;
    float sum[OUTPUTS];
#pragma unroll
    for (u32 o = 0; o < OUTPUTS; o++) sum[o] = 0.0f;
    for (u32 r = 0; r < pair.rank; r += CHUNK) {
        const u32 count = pair.rank - r < CHUNK ? pair.rank - r : CHUNK;
#pragma unroll
        for (u32 o = 0; o < OUTPUTS; o++) {
            if (n + o >= site.out_features) continue;
            float w[CHUNK];
            load<Weight>(b + (n + o) * p.b_stride + r, count, wide, w);
#pragma unroll
            for (u32 i = 0; i < CHUNK; i++)
                if (i < count) sum[o] = __fmaf_rn(w[i], z_row[r + i], sum[o]);
        }
    }
    const float scale = row_scale(p, batch, row);
    const float* gains = gains_of(weights, pair, n);
    Y* y_row = reinterpret_cast<Y*>(y) + (site.y_offset + row * site.y_stride);
#pragma unroll
    for (u32 o = 0; o < OUTPUTS; o++)
        if (n + o < site.out_features)
            y_row[n + o] = Act::narrow(expanded(site, Act::widen(y_row[n + o]), sum[o], pair.scale, scale, gains, o));
}

#define ENTRY(act, act_code, weight, weight_code) EXPAND_ENTRY(bgmv_expand, act, act_code, weight, weight_code)
FOR_EACH_SPEC(ENTRY)
