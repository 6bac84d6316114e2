// expert_tiles for sm_90 (expert_tiles.cuh): started before the end of the launch before.
#include "expert_tiles.cuh"
#include "sm90.cuh"

// The same for all types.
#define ENTRY(act, act_code, weight, weight_code)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) lorapool_expert_tiles_##act##_##weight(                      \
        u32* rows, const __grid_constant__ Params p) {                                                                 \
        start_in_turn();                                                                                               \
        expert_tiles(rows, p);                                                                                         \
    }
FOR_EACH_SPEC(ENTRY)
