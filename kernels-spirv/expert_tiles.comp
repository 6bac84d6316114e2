#version 460
// The tiles of a routed layer's batch, in the order of their rows. Those in use come first, and their number stands at word
// counts_at. A tile is in one workgroup: of its rows of one slot, the last tile may have fewer than SGMV_TILE_ROWS.
//
// Grid: x (folded into x and y) = ceil(rows / THREADS), a thread for a row.
// rows: RowRef[rows], Tile[rows] at word tiles_at, at word counts_at + 1 how many tiles the rows of each workgroup begin

#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "routed.glsl"

// How many tiles begin at rows of this workgroup before a thread's.
shared uint begun[THREADS];
// Tiles of the workgroups before, and of all.
shared uint before;
shared uint all;

void put_tile(EnvelopeAt at, uint index, uint words[3]) {
    uvec2 tile_at = element_at(at.envelope.operand[0], index, 4u, at.envelope.params.tiles_at, 2u);
    for (uint i = 0u; i < 3u; i++) {
        Outputs(add64(tile_at, uvec2(4u * i, 0u))).word = words[i];
    }
    Outputs(add64(tile_at, uvec2(12u, 0u))).word = 0u;
}

void main() {
    EnvelopeAt at = EnvelopeAt(envelope_at);
    uvec2 rows_at = at.envelope.operand[0];
    uint thread = gl_LocalInvocationID.x;
    uint rows = at.envelope.params.rows;
    uint counts_at = at.envelope.params.counts_at;
    uint group = work_item();
    uint row = group * THREADS + thread;
    int slot = -1;
    if (row < rows) {
        slot = int(Words(element_at(rows_at, row, 2u, 0u, 2u)).word[0]);
    }
    slots[thread] = slot;
    if (thread == 0u) {
        before = 0u;
        all = 0u;
    }
    barrier();
    uint earlier = 0u;
    uint any = 0u;
    for (uint i = thread; i < div_ceil(rows, THREADS); i += THREADS) {
        uint count = Words(element_at(rows_at, 1u + i, 1u, counts_at, 2u)).word[0];
        any += count;
        if (i < group) {
            earlier += count;
        }
    }
    atomicAdd(before, earlier);
    atomicAdd(all, any);
    bool begins = begins_tile(thread);
    begun[thread] = begins ? 1u : 0u;
    barrier();

    if (begins) {
        uint index = before;
        for (uint i = 0u; i < thread; i++) {
            index += begun[i];
        }
        uint end = min(thread + SGMV_TILE_ROWS, THREADS);
        uint last = thread + 1u;
        // Rows past the last one have no slot.
        while (last < end && slots[last] == slot) {
            last++;
        }
        // The counts are memory's, and not trusted.
        if (index < rows) {
            put_tile(at, index, uint[3](uint(slot), row, last - thread));
        }
    }
    if (row < rows && row >= all) {
        put_tile(at, row, uint[3](0xffffffffu, 0u, 0u));
    }
    if (row == 0u) {
        Outputs(element_at(rows_at, counts_at, 1u, 0u, 2u)).word = all;
    }
}
