// y[row][n] += scale * sum_r B[slot(row)][n][r] * z[row][r]
//
// A workgroup: one row, BGMV_EXPAND_OUTPUTS outputs, one site (z of the grid). Two adjacent outputs a
// thread, so that a word of two 2-byte outputs has one owner wherever the row begins at a word.
// Vectors behind B change y as the contract says.

var<workgroup> staged: array<vec4<f32>, MAX_RANK / 4>;

// sum_r B[n][r] * z[r], with z in workgroup memory.
fn row_sum(pair: Pair, n: u32) -> f32 {
    var sums = vec4<f32>();
    for (var chunk = 0u; chunk < chunks(pair.rank); chunk++) {
        let b = weight_chunk(pair.base, n * envelope.params.b_stride, chunk, pair.rank);
        sums = fma(b.lo, staged[2u * chunk], sums);
        sums = fma(b.hi, staged[2u * chunk + 1u], sums);
    }
    return total(sums);
}

@compute @workgroup_size(THREADS)
fn bgmv_expand(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let parts = (envelope.params.max_out + BGMV_EXPAND_OUTPUTS - 1u) / BGMV_EXPAND_OUTPUTS;
    let item = group.y * groups.x + group.x;
    let row = item / parts;
    if row >= envelope.params.rows {
        return;
    }
    let site = envelope.params.site[group.z];
    let batch_row = envelope.params.row_first + row;
    let pair = with_vectors(site, find_pair(site, row_slot(batch_row)));
    let first = (item % parts) * BGMV_EXPAND_OUTPUTS;
    if pair.rank == 0u || first >= site.out_features {
        return;
    }
    // One vector a thread is enough for MAX_RANK. Past the rank are zeros, whole chunks of them.
    if thread < 2u * chunks(pair.rank) {
        var values = vec4<f32>();
        for (var i = 0u; i < 4u; i++) {
            let r = 4u * thread + i;
            if r < pair.rank {
                values[i] = z[z_index(site, row, r)];
            }
        }
        staged[thread] = values;
    }
    workgroupBarrier();
    let n = first + 2u * thread;
    if n >= site.out_features {
        return;
    }
    var sums = vec2<f32>(row_sum(pair, n), 0.0);
    if n + 1u < site.out_features {
        sums.y = row_sum(pair, n + 1u);
    }
    change_outputs(site, pair, row, n, sums);
}
