#version 460
// y[row] = rows[slot(row)][j], rounded once, where ids[row] is the slot's id j; elsewhere y[row] keeps its bits
//
// Grid: x (folded into x and y) = rows. A workgroup takes one row; each thread looks the id up, all with one result, and
// then writes two adjacent elements at a time.
// batch: RowRef[row_first + rows], tables: u32[], weights: bytes, ids: u32[rows], y0: ACT[rows][y_stride]

#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "tokens.glsl"

void main() {
    EnvelopeAt at = EnvelopeAt(envelope_at);
    uint row = work_item();
    if (row >= at.envelope.params.rows) {
        return;
    }
    Overlay overlay;
    if (!find_overlay(at, row_slot(at, at.envelope.params.row_first + row), overlay)) {
        return;
    }
    uint id = Words(element_at(at.envelope.operand[3], row, 1u, 0u, 2u)).word[0];
    // The first j whose id is not below: in low..=high.
    uint low = 0u;
    uint high = overlay.count;
    while (low < high) {
        uint middle = low + (high - low) / 2u;
        if (Words(overlay.ids).word[middle] < id) {
            low = middle + 1u;
        } else {
            high = middle;
        }
    }
    if (low == overlay.count || Words(overlay.ids).word[low] != id) {
        return;
    }
    uint width = at.envelope.params.in_features;
    uvec2 from = weight_row(overlay.rows, low, at.envelope.params.a_stride);
    for (uint k = gl_LocalInvocationID.x * 2u; k < width; k += THREADS * 2u) {
        bool both = k + 1u < width;
        set_outputs(output_at(at, 0u, row, k), weight_pair(from, k, both), both);
    }
}
