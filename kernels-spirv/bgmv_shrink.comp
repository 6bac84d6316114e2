#version 460
// z[row][r] = sum_k A[slot(row)][r][k] * x[x_row(row)][k]
//
// Grid: x (folded into x and y) = rows * ceil(max_rank / BGMV_SHRINK_RANKS), z = sites.
// A workgroup takes one row and BGMV_SHRINK_RANKS ranks, 32 lanes each; lane l sums the pieces l, l + 32,
// ... of eight terms of its row of A in order, then the lanes are added pairwise. The order depends on
// in_features alone.
// batch: RowRef[row_first + rows], tables: u32[], weights: bytes, x: ACT[][x_stride], z: f32[rows][z_stride]

#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

const uint LANES = THREADS / BGMV_SHRINK_RANKS;

shared float partial[THREADS];

void main() {
    EnvelopeAt at = EnvelopeAt(envelope_at);
    uint parts = div_ceil(at.envelope.params.max_rank, BGMV_SHRINK_RANKS);
    uint item = work_item();
    uint row = item / parts;
    uint first_rank = item % parts * BGMV_SHRINK_RANKS;
    if (row >= at.envelope.params.rows) {
        return;
    }
    uint site = gl_WorkGroupID.z;
    Adapter adapter;
    if (!find(at, site, row_slot(at, at.envelope.params.row_first + row), adapter) || first_rank >= adapter.rank) {
        return;
    }

    uint thread = gl_LocalInvocationID.x;
    uint lane = thread % LANES;
    uint r = first_rank + thread / LANES;
    float sum = 0.0;
    if (r < adapter.rank) {
        uint from = x_row(at, row);
        uint in_features = from == NO_ROW ? 0u : at.envelope.params.in_features;
        uvec2 x = element_at(at.envelope.operand[3], from, at.envelope.params.x_stride, 0u, log2_size(ACT));
        uvec2 a = weight_row(adapter.matrix, r, at.envelope.params.a_stride);
        uint eights = in_features / 8u;
        uint piece = lane;
        for (; piece < eights; piece += LANES) {
            sum = add_eight(sum, load_eight(WEIGHT, a, piece), act_eight(x, piece));
        }
        if (piece == eights) {
            for (uint k = eights * 8u; k < in_features; k++) {
                sum += weight_at(a, k) * act_at(x, k);
            }
        }
    }

    partial[thread] = sum;
    for (uint half_lanes = LANES / 2u; half_lanes > 0u; half_lanes /= 2u) {
        barrier();
        if (lane < half_lanes) {
            partial[thread] += partial[thread + half_lanes];
        }
    }
    if (lane == 0u && r < adapter.rank) {
        Outputs(add64(z_at(at, 4u, site, row), uvec2(r * 4u, 0u))).word = floatBitsToUint(partial[thread]);
    }
}
