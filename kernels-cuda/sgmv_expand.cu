// y[row][n] += scale * sum_r B[slot(tile)][n][r] * z[row][z_offset + r], rounded once: prefill, rows in tiles of one slot.
//
//   z [rows][z_stride] f32      B [out_features][b_stride] weight      y [rows][y_stride] act, from y_offset on
//   block  tile * ceil(max_out / SGMV_EXPAND_OUTPUTS) + part: SGMV_TILE_ROWS rows by SGMV_EXPAND_OUTPUTS outputs
//
// z and B pass through shared memory SGMV_DEPTH ranks at a time; each sum takes r in ascending order.
// Vectors behind B change y as the contract says.
#include "common.cuh"

constexpr u32 OUTPUTS = SGMV_EXPAND_OUTPUTS;
constexpr u32 ROWS = SGMV_TILE_ROWS;
constexpr u32 DEPTH = SGMV_DEPTH;
// One more than DEPTH, so that a column of 32 rows lies in 32 banks.
constexpr u32 PITCH = DEPTH + 1;
// Threads that share a row of the tile, and outputs that each of them sums.
constexpr u32 LANES = THREADS / ROWS;
constexpr u32 SUMS = OUTPUTS / LANES;
// Chunks of a row of B in a depth.
constexpr u32 CHUNKS = DEPTH / CHUNK;
static_assert(OUTPUTS * CHUNKS == THREADS, "each thread loads one chunk of B");

template <class Act, class Weight>
DEVICE void sgmv_expand(const u32* batch, const u32* tables, const unsigned char* weights, const float* z, void* y,
                        const Params& p) {
    __shared__ float z_part[ROWS][PITCH];
    __shared__ float b_part[OUTPUTS][PITCH];
    const u32 parts = div_ceil(p.max_out, OUTPUTS);
    const u32 block = block_index();
    const u32 tile = block / parts;
    if (tile >= p.tiles) return;
    const SiteParams& site = p.site[blockIdx.z];
    const u64 first = (u64)(block % parts) * OUTPUTS;
    if (first >= site.out_features) return;
    const Rows rows = tile_rows(p, batch, tile);
    if (rows.count == 0) return;
    const Pair pair = expand_pair_of<typename Weight::Bits>(p, site, tables, rows.slot);
    // Every return so far is taken by all threads of the block or by none.
    if (pair.rank == 0) return;

    typedef typename Act::Bits Y;
    typedef typename Weight::Bits W;
    // What this thread loads of B: chunk `chunk` of each depth, of one output.
    const u32 line = threadIdx.x / CHUNKS;
    const u32 chunk = threadIdx.x % CHUNKS;
    const bool live = first + line < site.out_features;
    const W* b_row = reinterpret_cast<const W*>(weights + pair.offset) + (live ? (first + line) * p.b_stride : 0);
    const bool wide = is_wide(b_row, 0);

    const u32 row = threadIdx.x / LANES;
    const u32 lane = threadIdx.x % LANES;
    const long long row_index = row_of(p, rows, row);
    const float* z_row = z + (row_index < 0 ? 0 : (u64)row_index * p.z_stride + site.z_offset);
    float sum[SUMS];
#pragma unroll
    for (u32 s = 0; s < SUMS; s++) sum[s] = 0.0f;
    for (u32 r = 0; r < pair.rank; r += DEPTH) {
        const u32 depth = pair.rank - r < DEPTH ? pair.rank - r : DEPTH;
        const u32 at = chunk * CHUNK;
        const u32 left = at < depth ? depth - at : 0;
        const u32 count = !live ? 0 : left < CHUNK ? left : CHUNK;
        float values[CHUNK];
        load<Weight>(b_row + r + at, count, wide, values);
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++) b_part[line][at + i] = values[i];
        for (u32 d = lane; d < DEPTH; d += LANES) z_part[row][d] = row_index >= 0 && d < depth ? z_row[r + d] : 0.0f;
        __syncthreads();
        for (u32 d = 0; d < depth; d++)
#pragma unroll
            for (u32 s = 0; s < SUMS; s++)
                sum[s] = __fmaf_rn(b_part[lane + s * LANES][d], z_part[row][d], sum[s]);
        __syncthreads();
    }
    if (row_index < 0) return;
    const float scale = row_scale(p, batch, (u64)row_index);
    const float* gains = gains_of(weights, pair, first + lane);
    Y* y_row = reinterpret_cast<Y*>(y) + (site.y_offset + (u64)row_index * site.y_stride);
#pragma unroll
    for (u32 s = 0; s < SUMS; s++) {
        const u64 n = first + lane + s * LANES;
        if (n < site.out_features)
            y_row[n] = Act::narrow(expanded(site, Act::widen(y_row[n]), sum[s], pair.scale, scale, gains, s * LANES));
    }
}

#define ENTRY(act, act_code, weight, weight_code) EXPAND_ENTRY(sgmv_expand, act, act_code, weight, weight_code)
FOR_EACH_SPEC(ENTRY)
