// y[row][n] += scale * sum_r B[slot(row)][n][r] * z[row][z_offset + r], rounded once: decode in bf16 for sm_90.
//
//   tile     OUTPUTS outputs of one site, for one pack of rows
//   stage    RANKS ranks of a tile's B, and with the first its outputs so far
//   run      neighbouring tiles of one pack and one site
//   warp     a run after the other, SLOTS stages asked for ahead
//
// z is the 16-row side of the product, B the 8-column side. The columns are permuted so that each lane ends up with
// eight adjacent outputs of its row, in words that begin elsewhere in each quarter of the lanes: so what is read at
// once lies in different banks.
//
// Order of a sum: of z, the parts of the columns ascending; of y, ranks ascending in chunks of RANKS, the high parts of
// z by themselves, the low and middle ones together; the two last of all. Vectors behind B change y as the contract
// says.
#include "decode.cuh"

// Most warps of a block.
constexpr u32 WARPS = 8;
constexpr u32 SLOTS = 4;
constexpr u32 OUTPUTS = 64;
// A stage in shared memory: B as it lies in memory, then y.
constexpr u32 B_LINE = RANKS * 2;
constexpr u32 Y_LINE = OUTPUTS * 2 + 16;
constexpr u32 SLOT_BYTES = OUTPUTS * B_LINE + PACK_ROWS * Y_LINE;
// Chunks of z that a warp keeps for its next tile, split for the product.
constexpr u32 KEPT = 4;
constexpr u32 KEPT_BYTES = 32 * 24;

DEVICE u32 tiles_of(const Params& p, u32 site) {
    return site < p.sites ? div_ceil(p.site[site].out_features, OUTPUTS) : 0;
}

// What the tiles of a pack and a site have in common, in the lane that looked it up.
struct Source {
    u64 b;       // rank 0 of output 0
    u64 gains;   // of output 0; 0: there are no vectors
    u32 rank;    // 0: nothing to do
    float scale;
    u32 pack, site;
    u32 first, whole, end;   // the warp's tiles; those before `whole` can be copied and have all outputs
};

// Source `index` counts the sites of all packs; tiles `first` to `end` count all tiles.
DEVICE Source find(const Params& p, const u32* batch, const u32* tables, const unsigned char* weights, u32 wide_sites,
                   u32 each, u32 index, u32 first, u32 end) {
    Source source = {0, 0, 0, 0.0f, 0, 0, 0, 0, 0};
    const u32 pack = index / p.sites;
    source.site = index % p.sites;
    source.pack = p.packs_at + PACK_WORDS * pack;
    u32 zero = pack * each;
#pragma unroll
    for (u32 s = 0; s + 1 < MAX_SITES; s++)
        if (s < source.site) zero += tiles_of(p, s);
    const u32 tiles = tiles_of(p, source.site);
    if (zero >= end || zero + tiles <= first) return source;
    source.first = first > zero ? first - zero : 0;
    source.end = end - zero < tiles ? end - zero : tiles;
    const Pair pair = expand_pair_of<u16>(p, p.site[source.site], tables, (int)batch[source.pack]);
    const u32 whole = p.site[source.site].out_features / OUTPUTS;
    const bool plain = (wide_sites >> source.site & 1) && whole > source.first;
    source.whole = !plain ? source.first : whole < source.end ? whole : source.end;
    source.rank = pair.rank;
    source.scale = pair.scale;
    source.b = (u64)weights + pair.offset;
    source.gains = (u64)gains_of(weights, pair, 0);
    return source;
}

// This lane's four ranks of a chunk of a row of z: the sum of the parts. `z`: where part 0 has them.
DEVICE float4 sum_of_parts(const Params& p, const float* z, u32 chunk, u32 rank) {
    const u32 parts = parts_of(p.in_features);
    const u64 stride = z_strides(p).part;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    z += chunk * RANKS;
    float4 v[Z_PARTS];
#pragma unroll
    for (u32 i = 0; i < Z_PARTS; i++)
        v[i] = i < parts ? shared_cache16(z + i * stride) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (u32 i = 0; i < Z_PARTS; i++) {
        sum.x = __fadd_rn(sum.x, v[i].x);
        sum.y = __fadd_rn(sum.y, v[i].y);
        sum.z = __fadd_rn(sum.z, v[i].z);
        sum.w = __fadd_rn(sum.w, v[i].w);
    }
    // What no adapter's rank has written means nothing.
    const u32 r = chunk * RANKS + threadIdx.x % 4 * 2;
    if (r >= rank) sum.x = 0.0f;
    if (r + 1 >= rank) sum.y = 0.0f;
    if (r + 8 >= rank) sum.z = 0.0f;
    if (r + 9 >= rank) sum.w = 0.0f;
    return sum;
}

// A chunk of z as the 16-row sides of two products, of 8 rows each: z is the sum of three bf16, which it is exactly.
// The first has the high parts and below them the middle ones, the second nothing and below it the low parts.
struct Chunk {
    uint4 first, second;
};
DEVICE Chunk split(float4 f) {
    Chunk c;
    c.first.x = take_high(f.x, f.y);
    c.first.z = take_high(f.z, f.w);
    c.first.y = take_high(f.x, f.y);
    c.first.w = take_high(f.z, f.w);
    c.second = make_uint4(0, take_high(f.x, f.y), 0, take_high(f.z, f.w));
    return c;
}
// From what a warp keeps of it.
DEVICE Chunk join(uint4 first, uint2 low) { return {first, make_uint4(0, low.x, 0, low.y)}; }
// Eight outputs of which this lane names two ranks each, times z; the sums are in two halves.
DEVICE void multiply(float (&sum)[4], u32 b0, u32 b1, const Chunk& z) {
    mma(sum, z.second.x, z.second.y, z.second.z, z.second.w, b0, b1);
    mma(sum, z.first.x, z.first.y, z.first.z, z.first.w, b0, b1);
}
// A word of y plus what the lane's two sums add to it. `gains`: of its first output; null: none.
DEVICE u32 expand2(const SiteParams& site, u32 y, float site_scale, float row_scale, const float (&sum)[4],
                   const float* gains) {
    const float low = __fadd_rn(sum[2], sum[0]), high = __fadd_rn(sum[3], sum[1]);
    if (!gains) return add2(y, __fmul_rn(site_scale, row_scale), low, high);
    // Words begin at even outputs, and vectors are padded past odd ends.
    return shape2(y, site_scale, row_scale, low, high, *reinterpret_cast<const float2*>(gains),
                  *reinterpret_cast<const float2*>(gains + vector_len(site)));
}

// Two neighbouring elements, of which the first `count` are there.
DEVICE u32 some2(const u16* from, u32 count) { return (count > 0 ? from[0] : 0) | (count > 1 ? from[1] : 0) << 16; }

// Of the 32 outputs that four products give: which one column `c` of product `j` is, and which of its four words this
// lane's columns are.
DEVICE u32 output_of(u32 j, u32 c) { return c / 2 * 8 + (j + c / 2) % 4 * 2 + c % 2; }
DEVICE u32 word_of(u32 j) { return (j + threadIdx.x) % 4; }

// A tile that can't be copied as it is: ragged ranks or outputs, or rows of y at odd places.
static __device__ __noinline__ void odd_tile(const Params& p, const u32* batch, const u16* b, const float* gains,
                                             const float* z, u16* y, u32 at, const u32* pack, u32 rank,
                                             float site_scale, u32 first) {
    const u32 g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const SiteParams& site = p.site[at];
    const ZStrides strides = z_strides(p);
    const u32 row = pack[2 + g] - p.row_first;
    const bool live = g < pack[1] && row < p.rows;
    const float own_scale = live ? row_scale(p, batch, row) : 0.0f;
#pragma unroll 1
    for (u32 half = first; half < first + OUTPUTS && half < site.out_features; half += OUTPUTS / 2) {
        float sum[4][4] = {};
#pragma unroll 1
        for (u32 chunk = 0; chunk * RANKS < rank; chunk++) {
            float4 f = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (live) f = sum_of_parts(p, z + (row * strides.row + at * strides.site + q * 4), chunk, rank);
            const Chunk c = split(f);
            __syncwarp();
            const u32 r = chunk * RANKS + q * 2;
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 n = half + output_of(j, g);
                const u16* from = b + (n * (u64)p.b_stride + r);
                const bool there = n < site.out_features;
                const u32 low = there ? saturating(rank, r) : 0, high = there ? saturating(rank, r + 8) : 0;
                multiply(sum[j], some2(from, low), some2(from + 8, high), c);
            }
        }
        if (!live) continue;
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const u32 n = half + q * 8 + word_of(j) * 2, left = saturating(site.out_features, n);
            u16* to = y + ((u64)row * site.y_stride + n);
            if (left == 0) continue;
            const u32 word = expand2(site, some2(to, left), site_scale, own_scale, sum[j], gains ? gains + n : nullptr);
            to[0] = (u16)word;
            if (left > 1) to[1] = (u16)(word >> 16);
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    lorapool_bgmv_expand_bf16_bf16(const u32* __restrict__ batch, const u32* __restrict__ tables,
                                   const unsigned char* __restrict__ weights, const float* z, u16* y0, u16* y1, u16* y2,
                                   u16* y3, const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char memory[];
    launch_next();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const u32 slots = shared_address(memory) + warp * (SLOTS * SLOT_BYTES);
    const u32 chunks_kept = div_ceil(p.max_rank, RANKS) < KEPT ? div_ceil(p.max_rank, RANKS) : KEPT;
    const u32 rings = blockDim.x / 32 * SLOTS * SLOT_BYTES;
    const u32 kept = shared_address(memory) + rings + warp * chunks_kept * KEPT_BYTES + lane * 16;
    // Where this lane writes B (half l % 2 of 16 ranks of outputs l / 2 + 16 i) and y (eighth l % 8 of rows l / 8 and
    // l / 8 + 4), and the words of y that it adds to.
    const u32 b_to = slots + lane * 16, y_to = slots + OUTPUTS * B_LINE + lane / 8 * Y_LINE + lane % 8 * 16;
    const u32 y_word = slots + OUTPUTS * B_LINE + g * Y_LINE + q * 16;
    // What it names of B, from the slot's begin: half l / 8 % 2 of an output of product l / 16, and of that + 2.
    const u32 b_half = lane / 8 % 2 * 16, column = lane % 8;
    const u32 b_row = slots + output_of(lane / 16, column) * B_LINE + b_half;
    const u32 b_next = output_of(lane / 16 + 2, column) * B_LINE - output_of(lane / 16, column) * B_LINE;
    const ZStrides strides = z_strides(p);
    const u32 each = tiles_of(p, 0) + tiles_of(p, 1) + tiles_of(p, 2) + tiles_of(p, 3);
    Share share = {0, 0};
    // Unless this warp has nothing to do in any batch.
    if (warp * gridDim.x + blockIdx.x < p.tiles * each) share = share_of(live_packs(p, batch) * each);
    // From 16 outputs to the next.
    const u64 sixteen = 32 * (u64)p.b_stride;
    auto y_of_site = [&](const SiteParams& site) {
        return reinterpret_cast<u16*>(y_of(site.y_operand, y0, y1, y2, y3)) + site.y_offset;
    };
    u32 wide_sites = 0;
#pragma unroll
    for (u32 s = 0; s < MAX_SITES; s++)
        if (s < p.sites && is_wide(y_of_site(p.site[s]), p.site[s].y_stride)) wide_sites |= 1 << s;
    bool waited = false;
    // The next 32 sites of packs from the one that has the warp's first tile.
    const u32 last = share.end > share.first ? div_ceil(share.end, each) * p.sites : 0;
#pragma unroll 1
    for (u32 base = share.first / each * p.sites; base < last; base += 32) {
        const Source mine = find(p, batch, tables, weights, wide_sites, each, base + lane, share.first, share.end);
        u32 odd = __ballot_sync(~0u, mine.rank != 0 && mine.whole < mine.end);
        u32 sources = __ballot_sync(~0u, mine.rank != 0 && mine.whole > mine.first);
        if (sources) {
            // The run that is asked for: tiles left, chunk of the next stage, this lane's part of that, where it goes.
            u32 ask_sources = sources, ask_left = 0, ask_chunk = 0, ask_rank = 0, ask_b_to = b_to, ask_y_to = y_to;
            u64 b_from = 0, b_jump = 0, y_from[2] = {0, 0};
            bool y_live[2] = {false, false};
            auto begin = [&]() {
                const u32 from = __ffs(ask_sources) - 1;
                ask_sources &= ask_sources - 1;
                const u32 first = from_lane(mine.first, from);
                const SiteParams& site = p.site[from_lane(mine.site, from)];
                ask_left = from_lane(mine.whole, from) - first;
                ask_rank = from_lane(mine.rank, from);
                b_from = from_lane(mine.b, from) + (first * OUTPUTS + lane / 2) * (2 * (u64)p.b_stride) + lane % 2 * 16;
                b_jump = 4 * sixteen - div_ceil(ask_rank, RANKS) * (2 * RANKS);
                const u32* pack = batch + from_lane(mine.pack, from);
                const u16* y = y_of_site(site) + first * OUTPUTS + lane % 8 * 8;
                const u32 rows = pack[1];
#pragma unroll
                for (u32 h = 0; h < 2; h++) {
                    const u32 i = lane / 8 + 4 * h, row = pack[2 + i] - p.row_first;
                    y_live[h] = i < rows && row < p.rows;
                    y_from[h] = (u64)(y + (u64)row * site.y_stride);
                }
            };
            // The next stage's B.
            auto ask_b = [&]() {
                const u32 ranks = ask_rank - ask_chunk * RANKS;
                if (ranks >= RANKS) {
#pragma unroll
                    for (u32 i = 0; i < 4; i++) copy16(ask_b_to + i * 512, b_from + i * sixteen, 16);
                } else {
#pragma unroll 1
                    for (u32 i = 0; i < 4; i++)
                        copy16(ask_b_to + i * 512, b_from + i * sixteen, clamp16(2 * saturating(ranks, lane % 2 * 8)));
                }
                ask_b_to = after<SLOTS, SLOT_BYTES>(ask_b_to, b_to);
                b_from += 2 * RANKS;
                ask_chunk++;
                if (ranks > RANKS) return;
                b_from += b_jump;
                ask_chunk = 0;
                ask_left--;
            };
            // The next tile's y.
            auto ask_y = [&]() {
#pragma unroll
                for (u32 h = 0; h < 2; h++) {
                    copy16_if(ask_y_to + h * 4 * Y_LINE, y_from[h], y_live[h]);
                    y_from[h] += OUTPUTS * 2;
                }
                ask_y_to = after<SLOTS, SLOT_BYTES>(ask_y_to, y_to);
            };
            auto ask = [&]() {
                if (ask_left == 0) {
                    if (ask_sources == 0) return;
                    begin();
                }
                if (ask_chunk == 0) ask_y();
                ask_b();
            };

            // The run that is worked on.
            u32 left = 0, rank = 0, at_site = 0, at_b = b_row, at_y = y_word, at_store = y_to;
            float site_scale = 0.0f, own_scale = 0.0f;
            const float* z_row = nullptr;   // this lane's ranks of row g, with own_scale; null for no such row
            const float* gains = nullptr;   // of the eight outputs with the lane's first words; null: there are none
            u64 to[2] = {0, 0};             // its eighth of rows l / 8 and l / 8 + 4
            bool live[2] = {false, false}, more = false;
            auto enter = [&]() {
                const u32 from = __ffs(sources) - 1;
                sources &= sources - 1;
                const u32 at = from_lane(mine.site, from), first = from_lane(mine.first, from);
                const SiteParams& site = p.site[at];
                const u32* pack = batch + from_lane(mine.pack, from);
                at_site = at;
                site_scale = from_lane(mine.scale, from);
                rank = from_lane(mine.rank, from);
                left = from_lane(mine.whole, from) - first;
                const u16* y = y_of_site(site) + first * OUTPUTS + lane % 8 * 8;
                const u32 rows = pack[1], own = pack[2 + g] - p.row_first;
                const bool there = g < rows && own < p.rows;
                more = rows > 4;
                z_row = there ? z + (own * strides.row + at * strides.site + q * 4) : nullptr;
                own_scale = there ? row_scale(p, batch, own) : 0.0f;
                gains = reinterpret_cast<const float*>(from_lane(mine.gains, from));
                if (gains) gains += first * OUTPUTS + q * 8;
#pragma unroll
                for (u32 h = 0; h < 2; h++) {
                    const u32 i = lane / 8 + 4 * h, row = pack[2 + i] - p.row_first;
                    live[h] = i < rows && row < p.rows;
                    to[h] = (u64)(y + (u64)row * site.y_stride);
                }
            };
            // The weights are no one's to write: only y and z wait for the launch before.
            begin();
            u32 asked = 0, y_asked = 0;
#pragma unroll 1
            for (; asked < SLOTS && ask_left; asked++) {
                y_asked += ask_chunk == 0;
                ask_b();
            }
            enter();
            if (!waited) wait_for_last();
            waited = true;
#pragma unroll 1
            for (; y_asked; y_asked--) ask_y();
#pragma unroll 1
            for (; asked < SLOTS; asked++) ask();
            commit();
            // A stage is in the commit that is SLOTS - 1 before the last one when it is waited for.
#pragma unroll
            for (u32 i = 1; i < SLOTS; i++) commit();

            bool fresh = true;
            u32 chunk = 0, keep = kept;
            float sum[8][4] = {};
#pragma unroll 1
            for (;;) {
                // Each lane reads back only what it has kept itself.
                const u32 keep_low = keep + 512 - lane * 8;
                if (fresh || rank > KEPT * RANKS) {
                    float4 f = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (z_row) f = sum_of_parts(p, z_row, chunk, rank);
                    const Chunk c = split(f);
                    keep16(keep, c.first);
                    keep8(keep_low, make_uint2(c.second.y, c.second.w));
                    __syncwarp();
                }
                const Chunk c = join(shared16(keep), shared8(keep_low));
                arrived<SLOTS - 1>();
#pragma unroll
                for (u32 j = 0; j < 8; j += 2) {
                    const uint4 b = matrices(at_b + j / 4 * (32 * B_LINE) + (j % 4 ? b_next : 0));
                    multiply(sum[j], b.x, b.y, c);
                    multiply(sum[j + 1], b.z, b.w, c);
                }
                at_b = after<SLOTS, SLOT_BYTES>(at_b, b_row);
                chunk++;
                keep = chunk % KEPT ? keep + KEPT_BYTES : kept;
                if (chunk * RANKS < rank) {
                    __syncwarp();
                    ask();
                    commit();
                    continue;
                }
                // sum[j]: a word of eight adjacent outputs of row g.
                u32 words[8];
#pragma unroll
                for (u32 j = 0; j < 8; j++) words[j] = shared4(at_y + j / 4 * 64 + word_of(j) * 4);
                const SiteParams& site = p.site[at_site];
                if (gains) {
#pragma unroll
                    for (u32 j = 0; j < 8; j++) {
                        const float* from = gains + j / 4 * 32 + word_of(j) * 2;
                        words[j] = expand2(site, words[j], site_scale, own_scale, sum[j], from);
                    }
                    gains += OUTPUTS;
                } else {
#pragma unroll
                    for (u32 j = 0; j < 8; j++)
                        words[j] = expand2(site, words[j], site_scale, own_scale, sum[j], nullptr);
                }
#pragma unroll
                for (u32 j = 0; j < 8; j++) keep4(at_y + j / 4 * 64 + word_of(j) * 4, words[j]);
                __syncwarp();
                store16_if(to[0], shared16(at_store), live[0]);
                if (more) store16_if(to[1], shared16(at_store + 4 * Y_LINE), live[1]);
                to[0] += OUTPUTS * 2;
                to[1] += OUTPUTS * 2;
                at_store = after<SLOTS, SLOT_BYTES>(at_store, y_to);
                at_y = after<SLOTS, SLOT_BYTES>(at_y, y_word);
#pragma unroll
                for (u32 j = 0; j < 8; j++) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0.0f;
                chunk = 0;
                keep = kept;
                fresh = false;
                __syncwarp();
                ask();
                commit();
                if (--left) continue;
                if (sources == 0) break;
                enter();
                fresh = true;
            }
        }
        if (odd && !waited) wait_for_last();
        waited = waited || odd;
#pragma unroll 1
        for (; odd; odd &= odd - 1) {
            const u32 from = __ffs(odd) - 1, at = from_lane(mine.site, from), rank = from_lane(mine.rank, from);
            const u16* b = reinterpret_cast<const u16*>(from_lane(mine.b, from));
            const u32* pack = batch + from_lane(mine.pack, from);
            const float* gains = reinterpret_cast<const float*>(from_lane(mine.gains, from));
            const float scale = from_lane(mine.scale, from);
            const u32 end = from_lane(mine.end, from);
#pragma unroll 1
            for (u32 tile = from_lane(mine.whole, from); tile < end; tile++)
                odd_tile(p, batch, b, gains, z, y_of_site(p.site[at]), at, pack, rank, scale, tile * OUTPUTS);
        }
    }
    if (!waited && blockIdx.x == 0) wait_for_last();
}
