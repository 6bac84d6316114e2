// Words of two elements of a 2-byte type, and what the tensor cores of sm_90 multiply, by that type.
#pragma once
#include "common.cuh"

typedef Element<DTYPE_BF16> Bf16;
typedef Element<DTYPE_F16> F16;

// c += A B and c = A B, of 16x16 and 16x8 elements; the same of 16x8 and 8x8; and the rounding to a word.
#define PRODUCTS(type)                                                                                                 \
    DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {                                   \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." #type "." #type                                          \
                     ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"                                         \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                  \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                          \
    }                                                                                                                  \
    DEVICE void first_mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {                             \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." #type "." #type                                          \
                     ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"                                     \
                     : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])                                                  \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));                               \
    }                                                                                                                  \
    DEVICE void mma8(float (&c)[4], u32 a0, u32 a1, u32 b0) {                                                          \
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." #type "." #type                                           \
                     ".f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"                                                  \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                  \
                     : "r"(a0), "r"(a1), "r"(b0));                                                                     \
    }                                                                                                                  \
    DEVICE void first_mma8(float (&c)[4], u32 a0, u32 a1, u32 b0) {                                                    \
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." #type "." #type                                           \
                     ".f32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%7,%7,%7};"                                                  \
                     : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])                                                  \
                     : "r"(a0), "r"(a1), "r"(b0), "f"(0.0f));                                                          \
    }                                                                                                                  \
    /* Two floats rounded once, side by side. */                                                                       \
    DEVICE u32 pair(float low, float high) {                                                                           \
        u32 word;                                                                                                      \
        asm("cvt.rn." #type "x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));                                  \
        return word;                                                                                                   \
    }

template <class E> struct Words;

template <> struct Words<Bf16> {
    PRODUCTS(bf16)
    DEVICE float low(u32 word) { return __uint_as_float(word << 16); }
    DEVICE float high(u32 word) { return __uint_as_float(word & 0xffff0000u); }
};

template <> struct Words<F16> {
    PRODUCTS(f16)
    DEVICE float low(u32 word) {
        float value;
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(value) : "r"(word));
        return value;
    }
    DEVICE float high(u32 word) {
        float value;
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(value) : "r"(word));
        return value;
    }
};

// Floats of 11 significant bits, which any f16 is: c += A B and c = A B, of 16x8 and 8x8.
DEVICE void mma_tf32(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void first_mma_tf32(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

// The upper halves of two floats, side by side: bf16. What is left of the floats stays in them; three times take all of any float.
DEVICE u32 take_high(float& low, float& high) {
    const u32 a = __float_as_uint(low) & 0xffff0000u, b = __float_as_uint(high) & 0xffff0000u;
    low = __fsub_rn(low, __uint_as_float(a));
    high = __fsub_rn(high, __uint_as_float(b));
    return a >> 16 | b;
}
// A float as the sum of two tf32, off by its last bit at most.
struct HighLow {
    u32 high, low;
};
DEVICE HighLow split_tf32(float value) {
    const u32 high = __float_as_uint(value) + 0x1000u & 0xffffe000u;
    return {high, __float_as_uint(__fsub_rn(value, __uint_as_float(high))) & 0xffffe000u};
}
