// z[row][z_offset + r] = sum_k A[slot(tile)][r][k] * x[x_row(row)][k], for r < rank: prefill, rows in tiles of one slot.
//
//   x [][x_stride] act      A [rank][a_stride] weight      z [rows][z_stride] f32
//   block  tile * ceil(max_rank / SGMV_SHRINK_RANKS) + part: SGMV_TILE_ROWS rows by SGMV_SHRINK_RANKS ranks
//
// x and A pass through shared memory SGMV_DEPTH columns at a time; each sum takes k in ascending order.
#include "common.cuh"

constexpr u32 RANKS = SGMV_SHRINK_RANKS;
constexpr u32 ROWS = SGMV_TILE_ROWS;
constexpr u32 DEPTH = SGMV_DEPTH;
// One more than DEPTH, so that a column of 32 rows lies in 32 banks.
constexpr u32 PITCH = DEPTH + 1;
// Threads that share a row of the tile, and ranks that each of them sums.
constexpr u32 LANES = THREADS / ROWS;
constexpr u32 SUMS = RANKS / LANES;
// Chunks of a row of x, or of A, in a depth.
constexpr u32 CHUNKS = DEPTH / CHUNK;
static_assert(ROWS * CHUNKS <= THREADS / 2 && RANKS * CHUNKS <= THREADS / 2, "half a block loads x, the other half A");

template <class Act, class Weight>
DEVICE void sgmv_shrink(const u32* batch, const u32* tables, const unsigned char* weights, const void* x, float* z,
                        const Params& p) {
    __shared__ float x_part[ROWS][PITCH];
    __shared__ float a_part[RANKS][PITCH];
    const u32 parts = div_ceil(p.max_rank, RANKS);
    const u32 block = block_index();
    const u32 tile = block / parts;
    if (tile >= p.tiles) return;
    const u32 rank_first = block % parts * RANKS;
    const SiteParams& site = p.site[blockIdx.z];
    const Rows rows = tile_rows(p, batch, tile);
    if (rows.count == 0) return;
    const Pair pair = pair_of(p, site, tables, rows.slot);
    // Every return so far is taken by all threads of the block or by none.
    if (rank_first >= pair.rank) return;

    typedef typename Act::Bits X;
    typedef typename Weight::Bits W;
    // What this thread loads: chunk `chunk` of each depth, of one row of x or of A.
    const bool loads_x = threadIdx.x < THREADS / 2;
    const u32 item = threadIdx.x % (THREADS / 2);
    const u32 line = item / CHUNKS;
    const u32 chunk = item % CHUNKS;
    const long long x_line = loads_x && line < ROWS ? row_of(p, rows, line) : -1;
    const u32 from = x_line < 0 ? NO_ROW : x_row(p, batch, (u32)x_line);
    const X* x_from = reinterpret_cast<const X*>(x) + (u64)(from == NO_ROW ? 0 : from) * p.x_stride;
    const W* a_row = reinterpret_cast<const W*>(weights + pair.offset) + (u64)(rank_first + line) * p.a_stride;
    const bool live = loads_x ? from != NO_ROW : line < RANKS && rank_first + line < pair.rank;
    const bool wide = loads_x ? is_wide(x_from, 0) : is_wide(a_row, 0);

    const u32 row = threadIdx.x / LANES;
    const u32 lane = threadIdx.x % LANES;
    float sum[SUMS];
#pragma unroll
    for (u32 s = 0; s < SUMS; s++) sum[s] = 0.0f;
    for (u64 k = 0; k < p.in_features; k += DEPTH) {
        const u32 depth = p.in_features - k < DEPTH ? (u32)(p.in_features - k) : DEPTH;
        const u32 at = chunk * CHUNK;
        const u32 left = at < depth ? depth - at : 0;
        const u32 count = !live ? 0 : left < CHUNK ? left : CHUNK;
        float values[CHUNK];
        if (loads_x) load<Act>(x_from + k + at, count, wide, values);
        else load<Weight>(a_row + k + at, count, wide, values);
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++) {
            if (!loads_x) {
                if (line < RANKS) a_part[line][at + i] = values[i];
            } else if (line < ROWS) {
                x_part[line][at + i] = values[i];
            }
        }
        __syncthreads();
        for (u32 d = 0; d < depth; d++)
#pragma unroll
            for (u32 s = 0; s < SUMS; s++)
                sum[s] = __fmaf_rn(a_part[lane + s * LANES][d], x_part[row][d], sum[s]);
        __syncthreads();
    }
    const long long z_index = row_of(p, rows, row);
    if (z_index < 0) return;
#pragma unroll
    for (u32 s = 0; s < SUMS; s++) {
        const u32 rank = rank_first + lane + s * LANES;
        if (rank < pair.rank) z[(u64)z_index * p.z_stride + site.z_offset + rank] = sum[s];
    }
}

#define ENTRY(act, act_code, weight, weight_code) SHRINK_ENTRY(sgmv_shrink, act, act_code, weight, weight_code)
FOR_EACH_SPEC(ENTRY)
