// Copies from global to shared memory that run beside the work.
#pragma once
#include "sm90.cuh"

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory, the first `count` of them read and the others zero.
DEVICE void copy16(u32 to, const void* from, u32 count) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(count) : "memory");
}
// The same of all 16.
DEVICE void copy_all16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The same where `is` isn't 0.
DEVICE void copy16_if(u32 is, u32 to, const void* from) {
    asm volatile("{.reg .pred is; setp.ne.u32 is, %0, 0; @is cp.async.cg.shared.global.L2::128B [%1], [%2], 16;}" ::"r"(is),
                 "r"(to), "l"(from)
                 : "memory");
}
DEVICE void store16_if(u32 is, void* to, const uint4& v) {
    asm volatile("{.reg .pred is; setp.ne.u32 is, %0, 0; @is st.global.v4.u32 [%1], {%2, %3, %4, %5};}" ::"r"(is), "l"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
DEVICE uint4 read16(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
// Four 8x8 matrices of 2-byte elements; each lane points to a row of one.
DEVICE void load_matrices(u32 from, u32 (&m)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(from)
                 : "memory");
}
DEVICE uint2 read8(u32 from) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
    return v;
}
DEVICE void write16(u32 to, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void write8(u32 to, const uint2& v) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// This thread's groups of copies have come, but the last `pending`.
template <u32 pending> DEVICE void wait_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }
