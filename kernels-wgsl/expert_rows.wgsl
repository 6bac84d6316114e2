// The batch of a routed layer from that of its tokens: a row for each of a token's experts, whose slot is
// slot(token) * slot_stride + expert, and its token as the row of x that it reads.
//
// A thread: one row. At word counts_at + 1 of rows, the workgroup leaves how many tiles its rows begin.

@group(0) @binding(1) var<storage, read> experts: array<u32>;
@group(0) @binding(2) var<storage, read_write> rows: array<u32>;
@group(0) @binding(3) var<storage, read> tokens: array<u32>;

var<workgroup> count: atomic<u32>;

// The expert of row `row`; NO_ROW, or another number past the last, where it has none.
fn expert_of(row: u32) -> u32 {
    let at = origin(1u) / 4u;
    if (envelope.params.routed & ROUTED_OFFSETS) == 0u {
        return experts[at + row];
    }
    // The first whose rows end past this one.
    var low = 0u;
    var high = envelope.params.experts;
    while low < high {
        let middle = low + (high - low) / 2u;
        if experts[at + middle + 1u] <= row {
            low = middle + 1u;
        } else {
            high = middle;
        }
    }
    if low < envelope.params.experts && experts[at + low] > row {
        return NO_ROW;
    }
    return low;
}

@compute @workgroup_size(THREADS)
fn expert_rows(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let all = envelope.params.rows;
    let row = (group.y * groups.x + group.x) * THREADS + thread;
    var slot = -1;
    var scale = 0u;
    var token = NO_ROW;
    if row < all {
        var place = row;
        if (envelope.params.routed & ROUTED_TOKENS) != 0u {
            place = tokens[origin(3u) / 4u + row];
        }
        let of_token = place / envelope.params.top_k;
        let expert = expert_of(row);
        if of_token < envelope.params.x_rows && expert < envelope.params.experts {
            let entry = origin(0u) / 4u + 2u * of_token;
            // A negative slot is past any.
            if batch[entry] < envelope.params.slots {
                slot = bitcast<i32>(batch[entry] * envelope.params.slot_stride + expert);
                scale = batch[entry + 1u];
                token = of_token;
            }
        }
    }
    slots[thread] = slot;
    if thread == 0u {
        atomicStore(&count, 0u);
    }
    workgroupBarrier();
    if begins_tile(thread) {
        atomicAdd(&count, 1u);
    }
    workgroupBarrier();
    if row >= all {
        return;
    }

    let at = origin(2u) / 4u;
    rows[at + 2u * row] = bitcast<u32>(slot);
    rows[at + 2u * row + 1u] = scale;
    if envelope.params.x_rows_at != 0u {
        rows[at + envelope.params.x_rows_at + row] = token;
    }
    if envelope.params.counts_at != 0u && thread == 0u {
        rows[at + envelope.params.counts_at + 1u + row / THREADS] = atomicLoad(&count);
    }
}
