// expert_tiles for any device (expert_tiles.cuh).
#include "expert_tiles.cuh"

// The same for all types.
#define ENTRY(act, act_code, weight, weight_code)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) lorapool_expert_tiles_##act##_##weight(                      \
        u32* rows, const __grid_constant__ Params p) {                                                                 \
        expert_tiles(rows, p);                                                                                         \
    }
FOR_EACH_SPEC(ENTRY)
