// z as a lane of the decode expand for sm_90 keeps it and multiplies it, by the type of B.
//
// bf16 takes a group of ranks in one step, z as the sum of three bf16, which it is exactly. f16 has no such range: it is taken as
// tf32, which it is exactly, in two steps of eight ranks, and z as the sum of two tf32, which is off by its last bit at most.
#pragma once
#include "copies.cuh"
#include "packs.cuh"

// Bytes that a warp keeps of a group of ranks at most: six words a lane.
constexpr u32 KEPT = 32 * 24;

// What a step multiplies B with. Of one row a lane, `upper` is the high or the middle parts, by its column, and `lower` the
// low ones or none; of two, they are the high and the low ones. Two tf32 are high and middle parts.
struct Parts {
    u32 upper[2], lower[2], middle[2];
};

// A group of ranks of z: made by `of` from a lane's four, which two lanes share if each has one row.
template <class E, u32 ROWS> struct Sides;

template <u32 ROWS> struct Sides<Bf16, ROWS> {
    static constexpr u32 STEPS = 1;
    static constexpr bool LOWER = true;
    Parts all;

    DEVICE Sides of(float4 z) {
        const u32 high[2] = {take_high(z.x, z.y), take_high(z.z, z.w)};
        const u32 middle[2] = {take_high(z.x, z.y), take_high(z.z, z.w)};
        const u32 low[2] = {take_high(z.x, z.y), take_high(z.z, z.w)};
        const bool second = ROWS == 1 && threadIdx.x / 4 % 2;
        Sides sides;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            sides.all.upper[i] = second ? middle[i] : high[i];
            sides.all.lower[i] = second ? 0 : low[i];
            sides.all.middle[i] = middle[i];
        }
        return sides;
    }
    // What this lane keeps, where the warp's begins.
    DEVICE void keep(u32 at, const Sides& z) {
        const u32 lane = threadIdx.x % 32;
        write16(at + lane * 16, make_uint4(z.all.upper[0], z.all.upper[1], z.all.lower[0], z.all.lower[1]));
        if (ROWS == 2) write8(at + 512 + lane * 8, make_uint2(z.all.middle[0], z.all.middle[1]));
    }
    DEVICE Sides kept(u32 at) {
        const u32 lane = threadIdx.x % 32;
        const uint4 v = read16(at + lane * 16);
        const uint2 m = ROWS == 2 ? read8(at + 512 + lane * 8) : make_uint2(0, 0);
        return {{{v.x, v.y}, {v.z, v.w}, {m.x, m.y}}};
    }
    __device__ __forceinline__ Parts parts(u32) const { return all; }
    // What a step takes of this lane's share of B.
    DEVICE void take(const u32 (&w)[4], u32, u32 (&b)[4]) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) b[i] = w[i];
    }
    // Adds a product; `fresh`: to nothing. EIGHT: of eight ranks.
    template <bool EIGHT> DEVICE void multiply(float (&sum)[4], bool fresh, const u32 (&b)[4], const u32 (&z)[2]) {
        typedef Words<Bf16> W;
        if (EIGHT && fresh) W::first_mma8(sum, b[0], b[1], z[0]);
        else if (EIGHT) W::mma8(sum, b[0], b[1], z[0]);
        else if (fresh) W::first_mma(sum, b[0], b[1], b[2], b[3], z[0], z[1]);
        else W::mma(sum, b[0], b[1], b[2], b[3], z[0], z[1]);
    }
};

template <u32 ROWS> struct Sides<F16, ROWS> {
    static constexpr u32 STEPS = 2;
    static constexpr bool LOWER = false;
    // Of one row a lane, the part that is its column's; of two, all.
    float z[4];

    DEVICE Sides of(float4 z) {
        const bool second = ROWS == 1 && threadIdx.x / 4 % 2;
        Sides sides = {{z.x, z.y, z.z, z.w}};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const HighLow parts = split_tf32(sides.z[i]);
            if (ROWS == 1) sides.z[i] = __uint_as_float(second ? parts.low : parts.high);
        }
        return sides;
    }
    DEVICE void keep(u32 at, const Sides& s) {
        write16(at + threadIdx.x % 32 * 16, make_uint4(__float_as_uint(s.z[0]), __float_as_uint(s.z[1]),
                                                       __float_as_uint(s.z[2]), __float_as_uint(s.z[3])));
    }
    DEVICE Sides kept(u32 at) {
        const uint4 v = read16(at + threadIdx.x % 32 * 16);
        return {{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)}};
    }
    // Ranks 2q and 2q + 1 of a step's eight, as columns q and q + 4 of the product.
    __device__ __forceinline__ Parts parts(u32 step) const {
        Parts parts;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const float own = z[2 * step + i];
            const HighLow both = split_tf32(own);
            parts.upper[i] = ROWS == 1 ? __float_as_uint(own) : both.high;
            parts.middle[i] = both.low, parts.lower[i] = 0;
        }
        return parts;
    }
    DEVICE void take(const u32 (&w)[4], u32 step, u32 (&b)[4]) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            b[i] = __float_as_uint(Words<F16>::low(w[2 * step + i]));
            b[i + 2] = __float_as_uint(Words<F16>::high(w[2 * step + i]));
        }
    }
    template <bool EIGHT> DEVICE void multiply(float (&sum)[4], bool fresh, const u32 (&b)[4], const u32 (&z)[2]) {
        if (fresh) first_mma_tf32(sum, b[0], b[1], b[2], b[3], z[0], z[1]);
        else mma_tf32(sum, b[0], b[1], b[2], b[3], z[0], z[1]);
    }
};
