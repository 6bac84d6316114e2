#version 460
// y[row][n] += scale * sum_r B[slot(row)][n][r] * z[row][r]
//
// Grid: x (folded into x and y) = rows * ceil(max_out / BGMV_EXPAND_OUTPUTS), z = sites.
// A workgroup takes one row and BGMV_EXPAND_OUTPUTS outputs, two adjacent ones a thread; each thread sums
// over r in order. Vectors behind B change y as the contract says.
// batch: RowRef[row_first + rows], tables: u32[], weights: bytes, z: f32[rows][z_stride], y0..y3: ACT[rows][y_stride]

#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

shared float z_row[MAX_RANK];

Eight z_eight(uint i) {
    uint r = i * 8u;
    return Eight(
        vec4(z_row[r], z_row[r + 1u], z_row[r + 2u], z_row[r + 3u]),
        vec4(z_row[r + 4u], z_row[r + 5u], z_row[r + 6u], z_row[r + 7u])
    );
}

void main() {
    EnvelopeAt at = EnvelopeAt(envelope_at);
    uint parts = div_ceil(at.envelope.params.max_out, BGMV_EXPAND_OUTPUTS);
    uint item = work_item();
    uint row = item / parts;
    uint first_output = item % parts * BGMV_EXPAND_OUTPUTS;
    if (row >= at.envelope.params.rows) {
        return;
    }
    uint site = gl_WorkGroupID.z;
    uint out_features = at.envelope.params.site[site].out_features;
    uint batch_row = at.envelope.params.row_first + row;
    Adapter adapter;
    if (first_output >= out_features || !find_expand(at, site, row_slot(at, batch_row), adapter)) {
        return;
    }

    uint thread = gl_LocalInvocationID.x;
    uvec2 z = z_at(at, 3u, site, row);
    for (uint r = thread; r < adapter.rank; r += THREADS) {
        z_row[r] = f32_at(z, r);
    }
    barrier();

    uint n = first_output + thread * 2u;
    if (n >= out_features) {
        return;
    }
    bool both = n + 1u < out_features;
    uint stride = at.envelope.params.b_stride;
    uvec2 b0 = weight_row(adapter.matrix, n, stride);
    uvec2 b1 = weight_row(adapter.matrix, both ? n + 1u : n, stride);
    vec2 sum = vec2(0.0);
    uint eights = adapter.rank / 8u;
    for (uint i = 0u; i < eights; i++) {
        Eight z_part = z_eight(i);
        sum.x = add_eight(sum.x, load_eight(WEIGHT, b0, i), z_part);
        sum.y = add_eight(sum.y, load_eight(WEIGHT, b1, i), z_part);
    }
    for (uint r = eights * 8u; r < adapter.rank; r++) {
        sum.x += weight_at(b0, r) * z_row[r];
        sum.y += weight_at(b1, r) * z_row[r];
    }
    change_outputs(output_at(at, site, row, n), change_of(at, site, adapter, batch_row, n, sum), both);
}
