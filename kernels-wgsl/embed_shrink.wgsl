// z[row][r] = A^T[slot(row)][ids[row]][r], 0 where ids[row] is no row of A^T
//
// A workgroup: one row; its threads take the ranks.

// In x's place.
@group(0) @binding(3) var<storage, read> ids: array<u32>;

@compute @workgroup_size(THREADS)
fn embed_shrink(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group.y * groups.x + group.x;
    if row >= envelope.params.rows {
        return;
    }
    let site = envelope.params.site[0];
    let pair = find_pair(site, row_slot(envelope.params.row_first + row));
    let first = thread * CHUNK;
    if first >= pair.rank {
        return;
    }
    let id = ids[origin(3u) / 4u + row];
    var a: Eight;
    if id < envelope.params.in_features {
        a = weight_chunk(pair.base, id * envelope.params.a_stride, thread, pair.rank);
    }
    for (var i = 0u; i < CHUNK / 2u; i++) {
        if first + i < pair.rank {
            z[z_index(site, row, first + i)] = a.lo[i];
        }
        if first + 4u + i < pair.rank {
            z[z_index(site, row, first + 4u + i)] = a.hi[i];
        }
    }
}
