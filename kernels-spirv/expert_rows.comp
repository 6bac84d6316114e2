#version 460
// The batch of a routed layer from that of its tokens: a row for each of a token's experts, whose slot is
// slot(token) * slot_stride + expert, and its token as the row of x that it reads.
//
// Grid: x (folded into x and y) = ceil(rows / THREADS), a thread for a row.
// batch: RowRef[x_rows], experts: u32[rows], or u32[experts + 1] prefix sums with ROUTED_OFFSETS,
// rows: RowRef[rows], Tile[rows] at word tiles_at, u32[rows] at word x_rows_at, tokens: u32[rows] with ROUTED_TOKENS

#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

shared int slots[THREADS];

// The expert of row `row`, or `experts` and more where it has none.
uint expert_of(EnvelopeAt at, uint row) {
    Words words = Words(at.envelope.operand[1]);
    if ((at.envelope.params.routed & ROUTED_OFFSETS) == 0u) {
        return words.word[row];
    }
    // The first whose rows end past this one.
    uint low = 0u;
    uint high = at.envelope.params.experts;
    while (low < high) {
        uint middle = low + (high - low) / 2u;
        if (words.word[middle + 1u] <= row) {
            low = middle + 1u;
        } else {
            high = middle;
        }
    }
    if (low < at.envelope.params.experts && words.word[low] > row) {
        return NO_ROW;
    }
    return low;
}

void main() {
    EnvelopeAt at = EnvelopeAt(envelope_at);
    uint thread = gl_LocalInvocationID.x;
    uint rows = at.envelope.params.rows;
    uint row = work_item() * THREADS + thread;
    int slot = -1;
    uint scale = 0u;
    uint token = NO_ROW;
    if (row < rows) {
        uint place = row;
        if ((at.envelope.params.routed & ROUTED_TOKENS) != 0u) {
            place = Words(at.envelope.operand[3]).word[row];
        }
        uint of_token = place / at.envelope.params.top_k;
        uint expert = expert_of(at, row);
        if (of_token < at.envelope.params.x_rows && expert < at.envelope.params.experts) {
            Words entry = Words(element_at(at.envelope.operand[0], of_token, 2u, 0u, 2u));
            uint slot_of_token = entry.word[0];
            // A negative slot is past any.
            if (slot_of_token < at.envelope.params.slots) {
                slot = int(slot_of_token * at.envelope.params.slot_stride + expert);
                scale = entry.word[1];
                token = of_token;
            }
        }
    }
    slots[thread] = slot;
    barrier();
    if (row >= rows) {
        return;
    }

    uvec2 out_at = at.envelope.operand[2];
    Outputs(element_at(out_at, row, 2u, 0u, 2u)).word = uint(slot);
    Outputs(element_at(out_at, row, 2u, 1u, 2u)).word = scale;
    if (at.envelope.params.x_rows_at != 0u) {
        Outputs(element_at(out_at, row, 1u, at.envelope.params.x_rows_at, 2u)).word = token;
    }
    if (at.envelope.params.tiles == 0u) {
        return;
    }
    // Tiles begin where the slot changes, and at multiples of their largest number of rows.
    uint count = 0u;
    if (slot >= 0 && (thread % SGMV_TILE_ROWS == 0u || slots[max(thread, 1u) - 1u] != slot)) {
        uint end = min((thread / SGMV_TILE_ROWS + 1u) * SGMV_TILE_ROWS, thread + (rows - row));
        uint last = thread + 1u;
        while (last < end && slots[last] == slot) {
            last++;
        }
        count = last - thread;
    }
    uint words[4] = uint[4](count == 0u ? 0xffffffffu : uint(slot), count == 0u ? 0u : row, count, 0u);
    uvec2 tile_at = element_at(out_at, row, 4u, at.envelope.params.tiles_at, 2u);
    for (uint i = 0u; i < 4u; i++) {
        Outputs(add64(tile_at, uvec2(4u * i, 0u))).word = words[i];
    }
}
