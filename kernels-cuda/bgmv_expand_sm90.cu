// y[row][n] += scale * sum_r B[slot(row)][n][r] * z[row][z_offset + r], rounded once: decode in bf16 for sm_90.
//
//   block    one pack of rows, one site, a run of outputs
//   warp     UNITS units of OUTPUTS outputs by RANKS ranks at a time; z is the 16-row side of the product (8 rows
//            empty), B the 8-column side, its columns permuted so that each lane has eight adjacent outputs
//
// z is taken as the sum of three bf16, which it is exactly. Order of a sum: ranks ascending in chunks of RANKS; of a
// chunk the low parts of z, then the middle ones, then the high ones. Vectors behind B change y as the contract says.
#include "sm90.cuh"

constexpr u32 OUTPUTS = 32;
constexpr u32 UNITS = 4;
constexpr u32 WARPS = THREADS / 32;

// Rank chunks in a step, as a power of two: the fewer an adapter has, the more outputs a warp takes at a time.
DEVICE u32 depth_of(u32 rank) { return rank <= RANKS ? 0 : rank <= 2 * RANKS ? 1 : 2; }

// A warp's work, as one lane sees it.
struct Work {
    const u16* b;      // this lane's first element of B
    const float* gains; // of output 0; null: there are no vectors
    long long row;     // this lane's row, -1 for none
    float scale;       // of the site in the slot
    u32 rank;          // 0: no work left
    u32 first;         // first output
    u32 site;
};

// What part `part` of pack `pack` asks for.
DEVICE Work find(const Params& p, const u32* batch, const u32* tables, const unsigned char* weights, u32 pack, u32 part, bool& more) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    Work work;
    work.rank = 0;
    work.site = blockIdx.z;
    const SiteParams& site = p.site[work.site];
    const Rows8 rows = pack_rows(p, batch, pack, g);
    if (rows.slot < 0 && p.packs_at) { more = false; return work; }
    const Pair pair = expand_pair_of<u16>(p, site, tables, rows.slot);
    if (pair.rank == 0) return work;
    work.first = part * ((UNITS * OUTPUTS) >> depth_of(pair.rank));
    if (work.first >= site.out_features) return work;
    work.b = reinterpret_cast<const u16*>(weights + pair.offset) +
             ((work.first + g / 2 * 8 + g % 2) * (u64)p.b_stride + q * 4);
    work.gains = gains_of(weights, pair, 0);
    work.row = rows.row;
    work.scale = pair.scale;
    work.rank = pair.rank;
    return work;
}

// Chunks of ranks from `chunk` on of the work's outputs: unit u is run u >> depth of 32 outputs, and a chunk.
DEVICE void load(const Params& p, const Work& work, u32 chunk, uint2 (&w)[UNITS][4]) {
    const u32 depth = depth_of(work.rank), mask = (1 << depth) - 1;
    const u64 stride = p.b_stride;
    const u32 out = p.site[work.site].out_features;
    if ((p.b_stride & 3) == 0 && work.first + ((UNITS * OUTPUTS) >> depth) <= out && (chunk + mask + 1) * RANKS <= work.rank) {
#pragma unroll
        for (u32 u = 0; u < UNITS; u++) {
            const u16* from = work.b + (u >> depth) * OUTPUTS * stride + (chunk + (u & mask)) * RANKS;
#pragma unroll
            for (u32 m = 0; m < 4; m++) w[u][m] = stream8(from + m * 2 * stride);
        }
        return;
    }
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 u = 0; u < UNITS; u++)
#pragma unroll
        for (u32 m = 0; m < 4; m++) {
            const u32 n = work.first + lane / 8 * 8 + lane / 4 % 2 + (u >> depth) * OUTPUTS + m * 2;
            const u32 r = (chunk + (u & mask)) * RANKS;
            const u16* from = work.b + ((u >> depth) * OUTPUTS + m * 2) * stride + r;
            const u32 count = n < out ? saturating(work.rank, r + lane % 4 * 4) : 0;
            u32 e[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) e[i] = i < count ? from[i] : 0;
            w[u][m] = make_uint2(e[0] | e[1] << 16, e[2] | e[3] << 16);
        }
}

// The lane's four ranks of chunk `chunk` of z, as three bf16 each.
DEVICE void load_z(const Params& p, const float* z, const Work& work, u32 chunk, u32 (&parts)[3][2]) {
    const u32 r = chunk * RANKS + threadIdx.x % 4 * 4;
    float f[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (work.row >= 0 && r < work.rank) {
        const float* from = z + ((u64)work.row * p.z_stride + p.site[work.site].z_offset + r);
        if (((u64)from & 15) == 0 && r + 4 <= work.rank) {
            const float4 all = *reinterpret_cast<const float4*>(from);
            f[0] = all.x, f[1] = all.y, f[2] = all.z, f[3] = all.w;
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (r + i < work.rank) f[i] = from[i];
        }
    }
#pragma unroll
    for (u32 t = 0; t < 3; t++) {
        parts[t][0] = take_high(f[0], f[1]);
        parts[t][1] = take_high(f[2], f[3]);
    }
}

// VECTORS is known when this is compiled so that the registers for it are taken from no one else.
template <u32 DEPTH, bool VECTORS>
DEVICE void finish(const Params& p, const u32* batch, const float* z, u16* y, const Work& work, uint2 (&w)[UNITS][4],
                   const uint4 (&v)[UNITS], u32 (&parts)[UNITS][3][2]) {
    constexpr u32 CHUNKS = 1 << DEPTH, RUNS = UNITS >> DEPTH;
    const SiteParams& site = p.site[work.site];
    const u32 out = site.out_features;
    const float scale = work.row < 0 ? 0.0f : row_scale(p, batch, (u64)work.row);
    const bool y_wide = is_wide(y, site.y_stride);
#pragma unroll
    for (u32 run = 0; run < RUNS; run++) {
        float sum[4][4] = {};
        for (u32 chunk = 0;;) {
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) {
                if ((chunk + c) * RANKS >= work.rank) break;
#pragma unroll
                for (u32 t = 0; t < 3; t++)
#pragma unroll
                    for (u32 m = 0; m < 4; m++) {
                        const uint2 b = w[run * CHUNKS + c][m];
                        if (DEPTH < 2 && c == 0 && t == 0) mma_first(sum[m], parts[c][2][0], 0, parts[c][2][1], 0, b.x, b.y);
                        else mma(sum[m], parts[c][2 - t][0], 0, parts[c][2 - t][1], 0, b.x, b.y);
                    }
            }
            chunk += CHUNKS;
            if (DEPTH < 2 || chunk * RANKS >= work.rank) break;
            load(p, work, chunk, w);
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) load_z(p, z, work, chunk + c, parts[c]);
        }
        if (work.row < 0) continue;
        // sum[m]: outputs 8q + 2m and the next of row g, and of a row that isn't there.
        const u32 n = work.first + run * OUTPUTS + threadIdx.x % 4 * 8;
        const uint4 result = expand8(site, v[run], work.scale, scale, sum, 0, VECTORS ? work.gains : nullptr, n);
        u16* to = y + ((u64)work.row * site.y_stride + n);
        if (y_wide && n + 8 <= out) {
            *reinterpret_cast<uint4*>(to) = result;
        } else {
            const u32 words[4] = {result.x, result.y, result.z, result.w};
#pragma unroll
            for (u32 i = 0; i < 8; i++)
                if (n + i < out) to[i] = (u16)(words[i / 2] >> (i % 2 * 16));
        }
    }
}

template <bool VECTORS>
DEVICE void finish_at(const Params& p, const u32* batch, const float* z, u16* y, const Work& work, uint2 (&w)[UNITS][4],
                      const uint4 (&v)[UNITS], u32 (&parts)[UNITS][3][2]) {
    const u32 depth = depth_of(work.rank);
    if (depth == 0) finish<0, VECTORS>(p, batch, z, y, work, w, v, parts);
    else if (depth == 1) finish<1, VECTORS>(p, batch, z, y, work, w, v, parts);
    else finish<2, VECTORS>(p, batch, z, y, work, w, v, parts);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    lorapool_bgmv_expand_bf16_bf16(const u32* __restrict__ batch, const u32* __restrict__ tables,
                                   const unsigned char* __restrict__ weights, const float* z, u16* y0, u16* y1, u16* y2,
                                   u16* y3, const __grid_constant__ Params p) {
    launch_next();
    const u32 part = blockIdx.x * WARPS + threadIdx.x / 32;
    bool waited = false;
    bool more = true;
    const u32 packs = pack_count(p);
    for (u32 pack = blockIdx.y; pack < packs && more; pack += gridDim.y) {
        const Work work = find(p, batch, tables, weights, pack, part, more);
        if (work.rank == 0) continue;
        uint2 w[UNITS][4];
        load(p, work, 0, w);
        if (!waited) wait_for_last();
        waited = true;
        const SiteParams& site = p.site[work.site];
        const u32 depth = depth_of(work.rank);
        u16* y = reinterpret_cast<u16*>(y_of(site.y_operand, y0, y1, y2, y3)) + site.y_offset;
        const bool y_wide = is_wide(y, site.y_stride);
        uint4 v[UNITS];
#pragma unroll
        for (u32 run = 0; run < UNITS; run++) {
            const u32 n = work.first + run * OUTPUTS + threadIdx.x % 4 * 8;
            v[run] = make_uint4(0, 0, 0, 0);
            if (work.row < 0 || run > (UNITS - 1) >> depth) continue;
            const u16* from = y + ((u64)work.row * site.y_stride + n);
            if (y_wide && n + 8 <= site.out_features) v[run] = *reinterpret_cast<const uint4*>(from);
            else v[run] = some8(from, saturating(site.out_features, n));
        }
        u32 z_parts[UNITS][3][2];
#pragma unroll
        for (u32 c = 0; c < UNITS; c++)
            if (c >> depth == 0) load_z(p, z, work, c, z_parts[c]);
        if (work.gains) finish_at<true>(p, batch, z, y, work, w, v, z_parts);
        else finish_at<false>(p, batch, z, y, work, w, v, z_parts);
    }
    if (!waited && is_first_block()) wait_for_last();
}
