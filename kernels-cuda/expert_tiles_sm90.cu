// expert_tiles for sm_90 (expert_tiles.cuh): started before the end of the launch before.
#include "expert_tiles.cuh"
#include "sm90.cuh"

#define ENTRY(act, act_code, weight, weight_code) EXPERT_TILES_ENTRY(start_in_turn();, act, weight)
FOR_EACH_SPEC(ENTRY)
