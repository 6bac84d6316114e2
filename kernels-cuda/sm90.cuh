// What the kernels for sm_90 share: words of elements, and the start before the end of the launch before.
#pragma once
#include "words.cuh"

// Ranks that one product takes.
constexpr u32 RANKS = 16;

// The first `count` of eight elements, the others zero.
DEVICE uint4 some8(const u16* p, u32 count) {
    u32 e[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) e[i] = i < count ? p[i] : 0;
    return make_uint4(e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16);
}

// Writes the first `count` of eight elements.
DEVICE void keep_some8(u16* p, u32 count, const uint4& v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 8; i++)
        if (i < count) p[i] = (u16)(words[i / 2] >> (i % 2 * 16));
}

DEVICE void clear(float (&sum)[4][4]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.0f;
}

// Has the value looked up by now, not when it is first used.
DEVICE void settle(float& value) { asm volatile("" : "+f"(value)); }
DEVICE void settle(u32& value) { asm volatile("" : "+r"(value)); }
template <class T> DEVICE void settle(T*& value) { asm volatile("" : "+l"(value)); }

DEVICE float4 add4(const float4& a, const float4& b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}
// What a lane of the warp has, of any 4 or 8 bytes.
template <class T> DEVICE T from_lane(T value, u32 lane) { return __shfl_sync(~0u, value, lane); }

DEVICE u32 saturating(u32 a, u32 b) { return a > b ? a - b : 0; }

// The share of one of `all` of `total` items: neighbours, as many as any other's or one less. Nobody else has any.
struct Share {
    u32 first, end;
};
DEVICE Share share_of(u32 total, u32 own, u32 all) {
    if (own >= all) return {0, 0};
    const u32 each = total / all, more = total % all;
    const u32 first = own * each + (own < more ? own : more);
    return {first, first + each + (own < more)};
}

// Two elements of y, to which `scale` times two sums is added.
template <class E> DEVICE u32 add2(u32 word, float scale, float low, float high) {
    typedef Words<E> W;
    return W::pair(__fmaf_rn(scale, low, W::low(word)), __fmaf_rn(scale, high, W::high(word)));
}

// The same with gains and, `offsets` floats behind them, offsets of two outputs of which the first is even: vectors are padded past
// odd ends.
template <class E>
DEVICE u32 shape2(u32 word, float site_scale, float row_scale, float low, float high, const float* gains, u64 offsets) {
    const float2 gain = *reinterpret_cast<const float2*>(gains), offset = *reinterpret_cast<const float2*>(gains + offsets);
    typedef Words<E> W;
    return W::pair(shaped(W::low(word), low, site_scale, row_scale, gain.x, offset.x),
                   shaped(W::high(word), high, site_scale, row_scale, gain.y, offset.y));
}

// Eight outputs of a row, from output `n` on: columns `half` and the next of four products. `gains`: of the pair.
template <class E>
DEVICE uint4 expand8(const SiteParams& site, const uint4& y, float site_scale, float row_scale, const float (&s)[4][4],
                     u32 half, const float* gains, u32 n) {
    u32 word[4] = {y.x, y.y, y.z, y.w};
    const float scale = __fmul_rn(site_scale, row_scale);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if (!gains) {
            word[i] = add2<E>(word[i], scale, s[i][half], s[i][half + 1]);
        } else if (n + 2 * i < site.out_features) {
            word[i] = shape2<E>(word[i], site_scale, row_scale, s[i][half], s[i][half + 1], gains + (n + 2 * i),
                                vector_len(site));
        }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

// The launch before may still run when this one starts: weights, tables and batch are not its to write. All else
// waits for its end. Of what has no work one thread waits: that is enough for the end of a launch to be the end of all
// before it.
DEVICE void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Of a kernel all of whose inputs the launch before may write. The next one begins when that has ended.
DEVICE void start_in_turn() {
    wait_for_last();
    launch_next();
}
