#version 460
// y[row][n] += scale * sum_r B[slot(tile)][n][r] * z[row][r], for the rows of a tile
//
// Grid: x (folded into x and y) = tiles * ceil(max_out / SGMV_EXPAND_OUTPUTS), z = sites.
// A workgroup takes one tile and SGMV_EXPAND_OUTPUTS outputs. z and B pass through shared memory, SGMV_DEPTH
// ranks at a time; each (row, output) is summed by one thread in order of r.
// batch: RowRef[row_first + rows], Tile[tiles] at word tiles_at, tables: u32[], weights: bytes,
// z: f32[rows][z_stride], y0..y3: ACT[rows][y_stride]

#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// A column of padding keeps rows in different banks.
const uint PITCH = SGMV_DEPTH + 1u;
// Pairs of adjacent outputs, of which a thread sums PAIRS.
const uint ROW_PAIRS = SGMV_EXPAND_OUTPUTS / 2u;
const uint PAIRS = SGMV_TILE_ROWS * ROW_PAIRS / THREADS;

shared float z_tile[SGMV_TILE_ROWS * PITCH];
shared float b_tile[SGMV_EXPAND_OUTPUTS * PITCH];

void main() {
    EnvelopeAt at = EnvelopeAt(envelope_at);
    uint parts = div_ceil(at.envelope.params.max_out, SGMV_EXPAND_OUTPUTS);
    uint item = work_item();
    uint tile = item / parts;
    uint first_output = item % parts * SGMV_EXPAND_OUTPUTS;
    if (tile >= at.envelope.params.tiles) {
        return;
    }
    uint site = gl_WorkGroupID.z;
    uint out_features = at.envelope.params.site[site].out_features;
    Words tile_words = Words(element_at(at.envelope.operand[0], tile, 4u, at.envelope.params.tiles_at, 2u));
    uint tile_rows = min(tile_words.word[2], SGMV_TILE_ROWS);
    Adapter adapter;
    if (tile_rows == 0u || first_output >= out_features || !find(at, site, int(tile_words.word[0]), adapter)) {
        return;
    }
    // Rows before the launch's first wrap to numbers past its last.
    uint first_row = tile_words.word[1] - at.envelope.params.row_first;
    uint rows = at.envelope.params.rows;

    uint thread = gl_LocalInvocationID.x;
    vec2 sums[PAIRS];
    for (uint s = 0u; s < PAIRS; s++) {
        sums[s] = vec2(0.0);
    }
    for (uint first = 0u; first < adapter.rank; first += SGMV_DEPTH) {
        for (uint i = thread; i < SGMV_TILE_ROWS * SGMV_DEPTH; i += THREADS) {
            uint t = i / SGMV_DEPTH;
            uint column = i % SGMV_DEPTH;
            uint row = first_row + t;
            float value = 0.0;
            if (t < tile_rows && row < rows && first + column < adapter.rank) {
                value = f32_at(z_at(at, 3u, site, row), first + column);
            }
            z_tile[t * PITCH + column] = value;
        }
        for (uint i = thread; i < SGMV_EXPAND_OUTPUTS * SGMV_DEPTH; i += THREADS) {
            uint n = first_output + i / SGMV_DEPTH;
            uint column = i % SGMV_DEPTH;
            float weight = 0.0;
            if (n < out_features && first + column < adapter.rank) {
                weight = weight_at(weight_row(adapter.matrix, n, at.envelope.params.b_stride), first + column);
            }
            b_tile[i / SGMV_DEPTH * PITCH + column] = weight;
        }
        barrier();
        for (uint s = 0u; s < PAIRS; s++) {
            uint cell = thread + s * THREADS;
            uint z_row = cell / ROW_PAIRS * PITCH;
            uint b_row = cell % ROW_PAIRS * 2u * PITCH;
            for (uint column = 0u; column < SGMV_DEPTH; column++) {
                float value = z_tile[z_row + column];
                sums[s].x += b_tile[b_row + column] * value;
                sums[s].y += b_tile[b_row + PITCH + column] * value;
            }
        }
        barrier();
    }
    for (uint s = 0u; s < PAIRS; s++) {
        uint cell = thread + s * THREADS;
        uint t = cell / ROW_PAIRS;
        uint row = first_row + t;
        uint n = first_output + cell % ROW_PAIRS * 2u;
        if (t < tile_rows && row < rows && n < out_features) {
            float scale = adapter.scale * row_scale(at, at.envelope.params.row_first + row);
            add_to_outputs(output_at(at, site, row, n), scale * sums[s], n + 1u < out_features);
        }
    }
}
