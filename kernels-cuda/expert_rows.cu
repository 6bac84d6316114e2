// expert_rows for any device (expert_rows.cuh).
#include "expert_rows.cuh"

#define ENTRY(act, act_code, weight, weight_code) EXPERT_ROWS_ENTRY(, act, weight)
FOR_EACH_SPEC(ENTRY)
