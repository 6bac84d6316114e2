// expert_tiles for any device (expert_tiles.cuh).
#include "expert_tiles.cuh"

#define ENTRY(act, act_code, weight, weight_code) EXPERT_TILES_ENTRY(, act, weight)
FOR_EACH_SPEC(ENTRY)
