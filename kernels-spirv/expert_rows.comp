#version 460
// The batch of a routed layer from that of its tokens: a row for each of a token's experts, whose slot is
// slot(token) * slot_stride + expert, and its token as the row of x that it reads.
//
// Grid: x (folded into x and y) = ceil(rows / THREADS), a thread for a row.
// batch: RowRef[x_rows], experts: u32[rows], or u32[experts + 1] prefix sums with ROUTED_OFFSETS,
// rows: RowRef[rows], u32[rows] at word x_rows_at, at word counts_at + 1 how many tiles the rows of each workgroup begin,
// tokens: u32[rows] with ROUTED_TOKENS

#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "routed.glsl"

shared uint count;

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
    uvec2 out_at = at.envelope.operand[2];
    if (row < rows) {
        Outputs(element_at(out_at, row, 2u, 0u, 2u)).word = uint(slot);
        Outputs(element_at(out_at, row, 2u, 1u, 2u)).word = scale;
        if (at.envelope.params.x_rows_at != 0u) {
            Outputs(element_at(out_at, row, 1u, at.envelope.params.x_rows_at, 2u)).word = token;
        }
    }
    uint counts_at = at.envelope.params.counts_at;
    if (counts_at == 0u) {
        return;
    }
    slots[thread] = slot;
    if (thread == 0u) {
        count = 0u;
    }
    barrier();
    if (begins_tile(thread)) {
        atomicAdd(count, 1u);
    }
    barrier();
    if (thread == 0u && row < rows) {
        Outputs(element_at(out_at, 1u + row / THREADS, 1u, counts_at, 2u)).word = count;
    }
}
