#version 460
// z[row][r] = A^T[slot(row)][ids[row]][r], 0 where ids[row] is no row of A^T
//
// Grid: x (folded into x and y) = rows. A workgroup takes one row, its threads the ranks.
// batch: RowRef[row_first + rows], tables: u32[], weights: bytes, ids: u32[rows], z: f32[rows][z_stride]

#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

void main() {
    EnvelopeAt at = EnvelopeAt(envelope_at);
    uint row = work_item();
    if (row >= at.envelope.params.rows) {
        return;
    }
    Adapter adapter;
    if (!find(at, 0u, row_slot(at, at.envelope.params.row_first + row), adapter)) {
        return;
    }
    uint id = Words(element_at(at.envelope.operand[3], row, 1u, 0u, 2u)).word[0];
    bool known = id < at.envelope.params.in_features;
    uvec2 a = weight_row(adapter.matrix, known ? id : 0u, at.envelope.params.a_stride);
    uvec2 z = z_at(at, 4u, 0u, row);
    for (uint r = gl_LocalInvocationID.x; r < adapter.rank; r += THREADS) {
        float value = known ? weight_at(a, r) : 0.0;
        Outputs(add64(z, uvec2(r * 4u, 0u))).word = floatBitsToUint(value);
    }
}
