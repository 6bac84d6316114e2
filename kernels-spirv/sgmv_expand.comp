#version 460
// y[row][n] += scale * sum_r B[slot(tile)][n][r] * z[row][r], for the rows of a tile
//
// Grid: x (folded into x and y) = tiles * ceil(max_out / SGMV_EXPAND_OUTPUTS), z = sites.
// A workgroup takes one tile and SGMV_EXPAND_OUTPUTS outputs. z and B pass through shared memory, SGMV_DEPTH
// ranks at a time; each (row, output) is summed by one thread in order of r.
// Vectors behind B change y as the contract says.
// batch: RowRef[row_first + rows], Tile[tiles] at word tiles_at, tables: u32[], weights: bytes,
// z: f32[rows][z_stride], y0..y3: ACT[rows][y_stride]

#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// A column of padding keeps rows in different banks.
const uint PITCH = SGMV_DEPTH + 1u;
// Pairs of adjacent outputs; a thread sums one pair of every THREADS / ROW_PAIRS-th row.
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
    TileRows of_tile = tile_rows(at, tile);
    Adapter adapter;
    if (of_tile.count == 0u || first_output >= out_features || !find_expand(at, site, of_tile.slot, adapter)) {
        return;
    }
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
            uint row = of_tile.first + t;
            float value = 0.0;
            if (t < of_tile.count && row < rows && first + column < adapter.rank) {
                value = f32_at(z_at(at, 3u, site, row), first + column);
            }
            z_tile[t * PITCH + column] = value;
        }
        for (uint i = thread; i < SGMV_EXPAND_OUTPUTS * SGMV_DEPTH / 2u; i += THREADS) {
            uint n = i / (SGMV_DEPTH / 2u);
            uint column = i % (SGMV_DEPTH / 2u) * 2u;
            uint r = first + column;
            vec2 pair = vec2(0.0);
            if (first_output + n < out_features && r < adapter.rank) {
                uvec2 b = weight_row(adapter.matrix, first_output + n, at.envelope.params.b_stride);
                pair = weight_pair(b, r, r + 1u < adapter.rank);
            }
            b_tile[n * PITCH + column] = pair.x;
            b_tile[n * PITCH + column + 1u] = pair.y;
        }
        barrier();
        uint b_row = thread % ROW_PAIRS * 2u * PITCH;
        for (uint column = 0u; column < SGMV_DEPTH; column++) {
            vec2 weights = vec2(b_tile[b_row + column], b_tile[b_row + PITCH + column]);
            for (uint s = 0u; s < PAIRS; s++) {
                sums[s] += weights * z_tile[(thread + s * THREADS) / ROW_PAIRS * PITCH + column];
            }
        }
        barrier();
    }
    for (uint s = 0u; s < PAIRS; s++) {
        uint cell = thread + s * THREADS;
        uint t = cell / ROW_PAIRS;
        uint row = of_tile.first + t;
        uint n = first_output + thread % ROW_PAIRS * 2u;
        if (t < of_tile.count && row < rows && n < out_features) {
            Change change = change_of(at, site, adapter, at.envelope.params.row_first + row, n, sums[s]);
            change_outputs(output_at(at, site, row, n), change, n + 1u < out_features);
        }
    }
}
