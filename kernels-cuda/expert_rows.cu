// expert_rows for any device (expert_rows.cuh).
#include "expert_rows.cuh"

// The same for all types.
#define ENTRY(act, act_code, weight, weight_code)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) lorapool_expert_rows_##act##_##weight(                       \
        const u32* __restrict__ batch, const u32* __restrict__ experts, u32* __restrict__ rows,                        \
        const u32* __restrict__ tokens, const __grid_constant__ Params p) {                                            \
        expert_rows(batch, experts, rows, tokens, p);                                                                  \
    }
FOR_EACH_SPEC(ENTRY)
