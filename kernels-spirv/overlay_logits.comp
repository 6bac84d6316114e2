#version 460
// y[row][id j] = sum_k rows[slot(row)][j][k] * x[row][k], rounded once, for each of the slot's ids j below out_features;
// all else of y keeps its bits
//
// Grid: x (folded into x and y) = rows * ceil(max_rank / OVERLAY_ROWS).
// A workgroup takes one row and OVERLAY_ROWS of its slot's token rows, 32 lanes each; the sums are taken as in bgmv_shrink.
// batch: RowRef[row_first + rows], tables: u32[], weights: bytes, x: ACT[rows][x_stride], y0: ACT[rows][y_stride]

#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "tokens.glsl"

const uint LANES = THREADS / OVERLAY_ROWS;

shared float partial[THREADS];

void main() {
    EnvelopeAt at = EnvelopeAt(envelope_at);
    uint parts = div_ceil(at.envelope.params.max_rank, OVERLAY_ROWS);
    uint item = work_item();
    uint row = item / parts;
    uint first = item % parts * OVERLAY_ROWS;
    if (row >= at.envelope.params.rows) {
        return;
    }
    Overlay overlay;
    if (!find_overlay(at, row_slot(at, at.envelope.params.row_first + row), overlay) || first >= overlay.count) {
        return;
    }

    uint thread = gl_LocalInvocationID.x;
    uint lane = thread % LANES;
    uint j = first + thread / LANES;
    float sum = 0.0;
    if (j < overlay.count) {
        uint in_features = at.envelope.params.in_features;
        uvec2 x = element_at(at.envelope.operand[3], row, at.envelope.params.x_stride, 0u, log2_size(ACT));
        uvec2 from = weight_row(overlay.rows, j, at.envelope.params.a_stride);
        uint eights = in_features / 8u;
        uint piece = lane;
        for (; piece < eights; piece += LANES) {
            sum = add_eight(sum, load_eight(WEIGHT, from, piece), act_eight(x, piece));
        }
        if (piece == eights) {
            for (uint k = eights * 8u; k < in_features; k++) {
                sum += weight_at(from, k) * act_at(x, k);
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
    if (lane == 0u && j < overlay.count) {
        uint id = Words(overlay.ids).word[j];
        if (id < at.envelope.params.site[0].out_features) {
            set_output(output_at(at, 0u, row, id), partial[thread]);
        }
    }
}
