// Products of a warpgroup for sm_90a: of 64 rows, 16 of each of its warps, by 64 columns, both sides or the right one in shared
// memory. The bits of a sum are those of mma.sync's in the same order, which conformance tests.
#pragma once
#include "words.cuh"

// A lane's sums: d[4 j + i] is row lane / 4 + 8 (i / 2) of the warp's 16, column 8 j + lane % 4 * 2 + i % 2.
typedef float WideSums[32];
#define WIDE_SUMS(d)                                                                                                   \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),                    \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),              \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),            \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define WIDE_PRODUCT(type)                                                                                             \
    "wgmma.mma_async.sync.aligned.m64n64k16.f32." #type "." #type " "                                                  \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                          \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"

// Where a product finds rows of 128 bytes from address `at` on (a multiple of 1024). The eight pieces of 16 bytes of row r lie in
// places piece ^ r % 8. A product takes two pieces: `at` may begin at any even one.
DEVICE u64 wide_rows(u32 at) { return (at >> 4 & 0x3fff) | 1ull << 16 | 1024ull >> 4 << 32 | 1ull << 62; }

template <class E> struct Wide;
#define WIDE(E, type)                                                                                                  \
    template <> struct Wide<E> {                                                                                       \
        /* d += A B: 64x16 and 16x64 elements in shared memory. */                                                     \
        DEVICE void multiply(WideSums& d, u64 a, u64 b) {                                                              \
            asm volatile(WIDE_PRODUCT(type) "%32,%33,1,1,1,0,0;" : WIDE_SUMS(d) : "l"(a), "l"(b));                     \
        }                                                                                                              \
        /* The same of A in registers, as mma.sync's left side of the warp's rows; where not `add`, d = A B. */        \
        DEVICE void multiply(WideSums& d, const u32 (&a)[4], u64 b, bool add) {                                        \
            asm volatile("{.reg .pred add; setp.ne.u32 add, %37, 0;\n" WIDE_PRODUCT(type)                              \
                         "{%32,%33,%34,%35},%36,add,1,1,0;}"                                                           \
                         : WIDE_SUMS(d)                                                                                \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)add));                         \
        }                                                                                                              \
    };
WIDE(Bf16, bf16)
WIDE(F16, f16)
#undef WIDE

// Around a group of products: sums and left sides are settled before, and the sums theirs until all groups have ended.
DEVICE void wide_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wide_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wide_wait(WideSums& d) { asm volatile("wgmma.wait_group.sync.aligned 0;" : WIDE_SUMS(d)::"memory"); }

// What this thread has written or copied to shared memory is there for products that begin later.
DEVICE void show_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
