// y[row] = rows[slot(row)][j], rounded once, where ids[row] is the slot's id j; elsewhere y[row] keeps its bits
//
// A workgroup: one row. Each thread looks the id up, all with one result, and then writes a chunk at a time.

// In x's place.
@group(0) @binding(3) var<storage, read> ids: array<u32>;

// Elements `n` and `n + 1`; the first alone where it is the last one of the row.
fn set_outputs(row: u32, n: u32, values: vec2<f32>) {
    let both = n + 1u < envelope.params.in_features;
    let element = envelope.params.site[0].y_offset + row * envelope.params.site[0].y_stride + n;
    let at = origin(4u) / 2u + element;
    if ACT != DTYPE_F32 && both && (at & 1u) == 0u {
        atomicStore(&y0[at / 2u], half_bits(values.x) | (half_bits(values.y) << 16u));
        return;
    }
    set_output(row, n, values.x);
    if both {
        set_output(row, n + 1u, values.y);
    }
}

@compute @workgroup_size(THREADS)
fn overlay_embed(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group.y * groups.x + group.x;
    if row >= envelope.params.rows {
        return;
    }
    let overlay = find_overlay(row_slot(envelope.params.row_first + row));
    if overlay.count == 0u {
        return;
    }
    let id = ids[origin(3u) / 4u + row];
    // The first j whose id is not below: in low..=high.
    var low = 0u;
    var high = overlay.count;
    while low < high {
        let middle = low + (high - low) / 2u;
        if overlay_id(overlay, middle) < id {
            low = middle + 1u;
        } else {
            high = middle;
        }
    }
    if low == overlay.count || overlay_id(overlay, low) != id {
        return;
    }
    let width = envelope.params.in_features;
    for (var chunk = thread; chunk < chunks(width); chunk += THREADS) {
        let values = weight_chunk(overlay.rows, low * envelope.params.a_stride, chunk, width);
        let n = chunk * CHUNK;
        set_outputs(row, n, values.lo.xy);
        if n + 2u < width {
            set_outputs(row, n + 2u, values.lo.zw);
        }
        if n + 4u < width {
            set_outputs(row, n + 4u, values.hi.xy);
        }
        if n + 6u < width {
            set_outputs(row, n + 6u, values.hi.zw);
        }
    }
}
