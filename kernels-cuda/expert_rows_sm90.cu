// expert_rows for sm_90 (expert_rows.cuh): started before the end of the launch before.
#include "expert_rows.cuh"
#include "sm90.cuh"

#define ENTRY(act, act_code, weight, weight_code) EXPERT_ROWS_ENTRY(start_in_turn();, act, weight)
FOR_EACH_SPEC(ENTRY)
