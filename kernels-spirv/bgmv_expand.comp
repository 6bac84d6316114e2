#version 460
// y[row][n] += scale * sum_r B[slot(row)][n][r] * z[row][r]
//
// Grid: x (folded into x and y) = rows * ceil(max_out / BGMV_EXPAND_OUTPUTS), z = sites.
// A workgroup takes one row and BGMV_EXPAND_OUTPUTS outputs, two adjacent ones a thread; each thread sums
// over r in order.
// batch: RowRef[row_first + rows], tables: u32[], weights: bytes, z: f32[rows][z_stride], y0..y3: ACT[rows][y_stride]

#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

shared float z_row[MAX_RANK];

// B[n][..] times z, in order of r.
float dot_row(uvec2 b, uint rank) {
    float sum = 0.0;
    uint per = weights_per_quad();
    for (uint first = 0u, quad = 0u; first < rank; first += per, quad++) {
        uint count = min(rank - first, per);
        uvec4 loaded = weight_quad(b, quad, count);
        for (uint i = 0u; i < count; i += 2u) {
            vec2 weights = WEIGHT == DTYPE_F32 ? uintBitsToFloat(i == 0u ? loaded.xy : loaded.zw)
                                               : weight_halves(loaded[i >> 1]);
            sum += weights.x * z_row[first + i];
            if (i + 1u < count) {
                sum += weights.y * z_row[first + i + 1u];
            }
        }
    }
    return sum;
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
    if (first_output >= out_features || !find(at, site, row_slot(at, batch_row), adapter)) {
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
    float scale = adapter.scale * row_scale(at, batch_row);
    vec2 delta = vec2(scale * dot_row(weight_row(adapter.matrix, n, stride), adapter.rank), 0.0);
    if (both) {
        delta.y = scale * dot_row(weight_row(adapter.matrix, n + 1u, stride), adapter.rank);
    }
    add_to_outputs(output_at(at, site, row, n), delta, both);
}
