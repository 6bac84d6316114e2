#version 460
// z[row][r] = sum_k A[slot(tile)][r][k] * x[x_row(row)][k], for the rows of a tile
//
// Grid: x (folded into x and y) = tiles * ceil(max_rank / SGMV_SHRINK_RANKS), z = sites.
// A workgroup takes one tile and SGMV_SHRINK_RANKS ranks. x and A pass through shared memory, SGMV_DEPTH
// columns at a time; each (row, rank) is summed by one thread in order of k.
// batch: Tile[tiles] at word tiles_at, tables: u32[], weights: bytes, x: ACT[][x_stride], z: f32[rows][z_stride]

#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// A column of padding keeps rows in different banks.
const uint PITCH = SGMV_DEPTH + 1u;
// Sums of a thread: one rank, every THREADS / SGMV_SHRINK_RANKS-th row.
const uint SUMS = SGMV_TILE_ROWS * SGMV_SHRINK_RANKS / THREADS;

shared float x_tile[SGMV_TILE_ROWS * PITCH];
shared float a_tile[SGMV_SHRINK_RANKS * PITCH];
// Rows of x that the tile's rows read; NO_ROW: zeros.
shared uint x_rows[SGMV_TILE_ROWS];

void main() {
    EnvelopeAt at = EnvelopeAt(envelope_at);
    uint parts = div_ceil(at.envelope.params.max_rank, SGMV_SHRINK_RANKS);
    uint item = work_item();
    uint tile = item / parts;
    uint first_rank = item % parts * SGMV_SHRINK_RANKS;
    if (tile >= at.envelope.params.tiles) {
        return;
    }
    uint site = gl_WorkGroupID.z;
    TileRows of_tile = tile_rows(at, tile);
    Adapter adapter;
    if (of_tile.count == 0u || !find(at, site, of_tile.slot, adapter) || first_rank >= adapter.rank) {
        return;
    }
    uint rows = at.envelope.params.rows;
    uint in_features = at.envelope.params.in_features;

    uint thread = gl_LocalInvocationID.x;
    if (thread < SGMV_TILE_ROWS) {
        uint row = of_tile.first + thread;
        x_rows[thread] = thread < of_tile.count && row < rows ? x_row(at, row) : NO_ROW;
    }
    barrier();
    float sums[SUMS];
    for (uint s = 0u; s < SUMS; s++) {
        sums[s] = 0.0;
    }
    for (uint first = 0u; first < in_features; first += SGMV_DEPTH) {
        for (uint i = thread; i < SGMV_TILE_ROWS * SGMV_DEPTH / 2u; i += THREADS) {
            uint t = i / (SGMV_DEPTH / 2u);
            uint column = i % (SGMV_DEPTH / 2u) * 2u;
            uint k = first + column;
            uint row = x_rows[t];
            vec2 pair = vec2(0.0);
            if (row != NO_ROW && k < in_features) {
                uvec2 x = element_at(at.envelope.operand[3], row, at.envelope.params.x_stride, 0u, log2_size(ACT));
                pair = act_pair(x, k, k + 1u < in_features);
            }
            x_tile[t * PITCH + column] = pair.x;
            x_tile[t * PITCH + column + 1u] = pair.y;
        }
        for (uint i = thread; i < SGMV_SHRINK_RANKS * SGMV_DEPTH / 2u; i += THREADS) {
            uint r = i / (SGMV_DEPTH / 2u);
            uint column = i % (SGMV_DEPTH / 2u) * 2u;
            uint k = first + column;
            vec2 pair = vec2(0.0);
            if (first_rank + r < adapter.rank && k < in_features) {
                uvec2 a = weight_row(adapter.matrix, first_rank + r, at.envelope.params.a_stride);
                pair = weight_pair(a, k, k + 1u < in_features);
            }
            a_tile[r * PITCH + column] = pair.x;
            a_tile[r * PITCH + column + 1u] = pair.y;
        }
        barrier();
        for (uint column = 0u; column < SGMV_DEPTH; column++) {
            float weight = a_tile[thread % SGMV_SHRINK_RANKS * PITCH + column];
            for (uint s = 0u; s < SUMS; s++) {
                sums[s] += weight * x_tile[(thread + s * THREADS) / SGMV_SHRINK_RANKS * PITCH + column];
            }
        }
        barrier();
    }
    for (uint s = 0u; s < SUMS; s++) {
        uint cell = thread + s * THREADS;
        uint t = cell / SGMV_SHRINK_RANKS;
        uint row = of_tile.first + t;
        uint r = first_rank + thread % SGMV_SHRINK_RANKS;
        if (t < of_tile.count && row < rows && r < adapter.rank) {
            Outputs(add64(z_at(at, 4u, site, row), uvec2(r * 4u, 0u))).word = floatBitsToUint(sums[s]);
        }
    }
}
