// What the kernels of token ids and replaced rows share: a slot's overlay, and their entries.
#pragma once
#include "common.cuh"

// A slot's overlay at the launch's one site: `count` ids, ascending, and as many rows, `a_stride` elements apart.
template <class Bits> struct Overlay {
    const u32* ids;
    const Bits* rows;
    // 0: nothing is replaced here.
    u32 count;
};

// Ids are padded to 16 bytes for the largest number of rows: contract::overlay_ids_bytes.
template <class Bits>
DEVICE Overlay<Bits> overlay_of(const Params& p, const u32* tables, const unsigned char* weights, int slot) {
    const Pair pair = pair_of(p, p.site[0], tables, slot);
    const unsigned char* ids = weights + pair.offset;
    Overlay<Bits> overlay = {reinterpret_cast<const u32*>(ids),
                             reinterpret_cast<const Bits*>(ids + ((4ull * p.max_rank + 15) & ~15ull)), pair.rank};
    return overlay;
}

// The entry of a kernel of token ids, around `kernel<act, weight>`.
#define IDS_ENTRY(kernel, output, act, act_code, weight, weight_code)                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) lorapool_##kernel##_##act##_##weight(                        \
        const u32* __restrict__ batch, const u32* __restrict__ tables, const unsigned char* __restrict__ weights,     \
        const u32* __restrict__ ids, output* __restrict__ out, const __grid_constant__ Params p) {                     \
        kernel<Element<act_code>, Element<weight_code> >(batch, tables, weights, ids, out, p);                         \
    }
