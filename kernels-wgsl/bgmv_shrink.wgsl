// z[row][r] = sum_k A[slot(row)][r][k] * x[x_row(row)][k]
//
// A workgroup: one row, BGMV_SHRINK_RANKS ranks, one site (z of the grid). LANES threads a rank, each with
// every LANES-th chunk of the sum; then a tree over the lanes.

const LANES: u32 = THREADS / BGMV_SHRINK_RANKS;

var<workgroup> partial: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn bgmv_shrink(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let parts = (envelope.params.max_rank + BGMV_SHRINK_RANKS - 1u) / BGMV_SHRINK_RANKS;
    let item = group.y * groups.x + group.x;
    let row = item / parts;
    if row >= envelope.params.rows {
        return;
    }
    let site = envelope.params.site[group.z];
    let pair = find_pair(site, row_slot(envelope.params.row_first + row));
    let first = (item % parts) * BGMV_SHRINK_RANKS;
    if first >= pair.rank {
        return;
    }
    let r = first + thread / LANES;
    let lane = thread % LANES;
    var sums = vec4<f32>();
    let x_from = x_row(row);
    if r < pair.rank && x_from != NO_ROW {
        let width = envelope.params.in_features;
        for (var chunk = lane; chunk < chunks(width); chunk += LANES) {
            let a = weight_chunk(pair.base, r * envelope.params.a_stride, chunk, width);
            let b = x_chunk(x_from, chunk);
            sums = fma(a.lo, b.lo, sums);
            sums = fma(a.hi, b.hi, sums);
        }
    }
    partial[thread] = total(sums);
    for (var step = LANES / 2u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if lane < step {
            partial[thread] += partial[thread + step];
        }
    }
    if lane == 0u && r < pair.rank {
        z[z_index(site, row, r)] = partial[thread];
    }
}
