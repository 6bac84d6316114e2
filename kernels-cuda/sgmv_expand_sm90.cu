// y[row][n] += scale * sum_r B[slot(tile)][n][r] * z[row][z_offset + r], rounded once: prefill in bf16 for sm_90.
//
//   block    TILES tiles of rows, one site, a run of outputs
//   warp     UNITS units of OUTPUTS outputs by RANKS ranks; z is the 16-row side of the product, B the 8-column side,
//            its columns permuted so that each lane has eight adjacent outputs; B is read once for neighbouring tiles
//            of one slot
//
// z is taken as the sum of three bf16, which it is exactly. Order of a sum: ranks ascending in chunks of RANKS; of a
// chunk the low parts of z, then the middle ones, then the high ones. Vectors behind B change y as the contract says.
#include "sm90.cuh"

constexpr u32 OUTPUTS = 32;
constexpr u32 UNITS = 4;
constexpr u32 TILES = 4;
constexpr u32 WARPS = THREADS / 32;

// A warp's part of a site: `runs` runs of OUTPUTS outputs.
struct Work {
    const u16* b;      // this lane's first element of B
    u16* y;            // output 0 of row 0
    u32 first;         // first output
    u32 out;
    u32 y_stride;
    u32 z_offset;
    bool y_wide;
};

template <u32 DEPTH> DEVICE void load(const Params& p, const Work& work, u32 rank, u32 chunk, uint2 (&w)[UNITS][4]) {
    constexpr u32 CHUNKS = 1 << DEPTH, RUNS = UNITS >> DEPTH;
    const u64 stride = p.b_stride;
    const bool whole = work.first + RUNS * OUTPUTS <= work.out && (chunk + CHUNKS) * RANKS <= rank;
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 u = 0; u < UNITS; u++)
#pragma unroll
        for (u32 m = 0; m < 4; m++) {
            const u16* from = work.b + (u / CHUNKS * OUTPUTS + m * 2) * stride + (chunk + u % CHUNKS) * RANKS;
            if (whole) {
                w[u][m] = *reinterpret_cast<const uint2*>(from);
                continue;
            }
            const u32 n = work.first + lane / 8 * 8 + lane / 4 % 2 + u / CHUNKS * OUTPUTS + m * 2;
            const u32 count = n < work.out ? saturating(rank, (chunk + u % CHUNKS) * RANKS + lane % 4 * 4) : 0;
            u32 e[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) e[i] = i < count ? from[i] : 0;
            w[u][m] = make_uint2(e[0] | e[1] << 16, e[2] | e[3] << 16);
        }
}

// The lane's four ranks of a chunk of a row of z, as three bf16 each.
DEVICE void load_z(const Params& p, const float* z, const Work& work, long long row, u32 rank, u32 chunk, u32 (&parts)[3][2]) {
    const u32 r = chunk * RANKS + threadIdx.x % 4 * 4;
    float f[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (row >= 0 && r < rank) {
        const float* from = z + ((u64)row * p.z_stride + work.z_offset + r);
        if (((u64)from & 15) == 0 && r + 4 <= rank) {
            const float4 all = *reinterpret_cast<const float4*>(from);
            f[0] = all.x, f[1] = all.y, f[2] = all.z, f[3] = all.w;
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (r + i < rank) f[i] = from[i];
        }
    }
#pragma unroll
    for (u32 t = 0; t < 3; t++) {
        parts[t][0] = take_high(f[0], f[1]);
        parts[t][1] = take_high(f[2], f[3]);
    }
}

DEVICE void store(const Work& work, u16* to, u32 n, const uint4& result) {
    if (work.y_wide && n + 8 <= work.out) {
        *reinterpret_cast<uint4*>(to) = result;
        return;
    }
    const u32 words[4] = {result.x, result.y, result.z, result.w};
#pragma unroll
    for (u32 i = 0; i < 8; i++)
        if (n + i < work.out) to[i] = (u16)(words[i / 2] >> (i % 2 * 16));
}

// One tile: `w` holds B's first chunks, and is loaded over where there are more.
template <u32 DEPTH>
DEVICE void expand(const Params& p, const u32* batch, const float* z, const Work& work, const Rows& rows, const Pair& pair,
                   const float* gains, uint2 (&w)[UNITS][4]) {
    constexpr u32 CHUNKS = 1 << DEPTH, RUNS = UNITS >> DEPTH;
    const u32 g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const long long row[2] = {row_of(p, rows, g), row_of(p, rows, g + 8)};
    uint4 y[RUNS][2];
    u16* to[2];
    float scale[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        to[h] = work.y + ((u64)(row[h] < 0 ? 0 : row[h]) * work.y_stride + work.first + q * 8);
        scale[h] = row[h] < 0 ? 0.0f : row_scale(p, batch, (u64)row[h]);
#pragma unroll
        for (u32 run = 0; run < RUNS; run++) {
            const u32 n = work.first + run * OUTPUTS + q * 8;
            y[run][h] = make_uint4(0, 0, 0, 0);
            if (row[h] < 0) continue;
            const u16* from = to[h] + run * OUTPUTS;
            if (work.y_wide && n + 8 <= work.out) y[run][h] = *reinterpret_cast<const uint4*>(from);
            else y[run][h] = some8(from, saturating(work.out, n));
        }
    }
    u32 low[CHUNKS][3][2], high[CHUNKS][3][2];
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c++) {
        load_z(p, z, work, row[0], pair.rank, c, low[c]);
        load_z(p, z, work, row[1], pair.rank, c, high[c]);
    }
#pragma unroll
    for (u32 run = 0; run < RUNS; run++) {
        float sum[4][4] = {};
        for (u32 chunk = 0;;) {
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) {
                if ((chunk + c) * RANKS >= pair.rank) break;
#pragma unroll
                for (u32 t = 0; t < 3; t++)
#pragma unroll
                    for (u32 m = 0; m < 4; m++) {
                        const uint2 b = w[run * CHUNKS + c][m];
                        const u32(&l)[2] = low[c][2 - t], (&h)[2] = high[c][2 - t];
                        if (DEPTH < 2 && c == 0 && t == 0) mma_first(sum[m], l[0], h[0], l[1], h[1], b.x, b.y);
                        else mma(sum[m], l[0], h[0], l[1], h[1], b.x, b.y);
                    }
            }
            chunk += CHUNKS;
            if (DEPTH < 2 || chunk * RANKS >= pair.rank) break;
            load<DEPTH>(p, work, pair.rank, chunk, w);
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) {
                load_z(p, z, work, row[0], pair.rank, chunk + c, low[c]);
                load_z(p, z, work, row[1], pair.rank, chunk + c, high[c]);
            }
        }
        // sum[m]: outputs 8q + 2m and the next, of rows g and g+8.
        const u32 n = work.first + run * OUTPUTS + q * 8;
#pragma unroll
        for (u32 h = 0; h < 2; h++)
            if (row[h] >= 0)
                store(work, to[h] + run * OUTPUTS, n,
                      expand8(p.site[blockIdx.z], y[run][h], pair.scale, scale[h], sum, 2 * h, gains, n));
    }
}

template <u32 DEPTH>
DEVICE void tile(const Params& p, const u32* batch, const float* z, Work& work, const unsigned char* weights, const Rows& rows,
                 const Pair& pair, bool fresh, u32 part, uint2 (&w)[UNITS][4]) {
    const u32 lane = threadIdx.x % 32;
    work.first = part * ((UNITS * OUTPUTS) >> DEPTH);
    if (work.first >= work.out) return;
    work.b = reinterpret_cast<const u16*>(weights + pair.offset) +
             ((work.first + lane / 8 * 8 + lane / 4 % 2) * (u64)p.b_stride + lane % 4 * 4);
    if (fresh || pair.rank > UNITS * RANKS) load<DEPTH>(p, work, pair.rank, 0, w);
    expand<DEPTH>(p, batch, z, work, rows, pair, gains_of(weights, pair, 0), w);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    lorapool_sgmv_expand_bf16_bf16(const u32* __restrict__ batch, const u32* __restrict__ tables,
                                   const unsigned char* __restrict__ weights, const float* z, u16* y0, u16* y1, u16* y2,
                                   u16* y3, const __grid_constant__ Params p) {
    launch_next();
    wait_for_last();
    const SiteParams& site = p.site[blockIdx.z];
    u16* y = reinterpret_cast<u16*>(y_of(site.y_operand, y0, y1, y2, y3));
    if (!y) return;
    y += site.y_offset;
    Work work = {0, y, 0, site.out_features, site.y_stride, site.z_offset, is_wide(y, site.y_stride)};
    const u32 part = blockIdx.x * WARPS + threadIdx.x / 32;
    uint2 w[UNITS][4];
    int held = -1;
    for (u32 first = blockIdx.y * TILES; first < p.tiles; first += gridDim.y * TILES)
#pragma unroll 1
        for (u32 t = first; t < first + TILES && t < p.tiles; t++) {
            const Rows rows = tile_rows(p, batch, t);
            if (rows.slot < 0 || rows.count == 0) continue;
            const Pair pair = expand_pair_of<u16>(p, site, tables, rows.slot);
            if (pair.rank == 0) continue;
            const bool fresh = rows.slot != held;
            held = rows.slot;
            if (pair.rank <= RANKS) tile<0>(p, batch, z, work, weights, rows, pair, fresh, part, w);
            else if (pair.rank <= 2 * RANKS) tile<1>(p, batch, z, work, weights, rows, pair, fresh, part, w);
            else tile<2>(p, batch, z, work, weights, rows, pair, fresh, part, w);
        }
}
