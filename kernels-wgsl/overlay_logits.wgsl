// y[row][id j] = sum_k rows[slot(row)][j][k] * x[row][k], rounded once, for each of the slot's ids j below out_features;
// all else of y keeps its bits
//
// A workgroup: one row, OVERLAY_ROWS of its slot's token rows. LANES threads a token row, each with every LANES-th chunk
// of the sum; then a tree over the lanes.

const LANES: u32 = THREADS / OVERLAY_ROWS;

var<workgroup> partial: array<f32, THREADS>;

// Element `k` of row `row` of x, 0 from in_features on.
fn x_value(row: u32, k: u32) -> f32 {
    if k >= envelope.params.in_features {
        return 0.0;
    }
    let element = row * envelope.params.x_stride + k;
    if ACT == DTYPE_F32 {
        return bitcast<f32>(x[origin(3u) / 4u + element]);
    }
    let at = origin(3u) / 2u + element;
    return half_value(ACT, (x[at / 2u] >> (16u * (at & 1u))) & 0xffffu);
}

fn x_quad(row: u32, k: u32) -> vec4<f32> {
    return vec4<f32>(x_value(row, k), x_value(row, k + 1u), x_value(row, k + 2u), x_value(row, k + 3u));
}

@compute @workgroup_size(THREADS)
fn overlay_logits(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let parts = (envelope.params.max_rank + OVERLAY_ROWS - 1u) / OVERLAY_ROWS;
    let item = group.y * groups.x + group.x;
    let row = item / parts;
    if row >= envelope.params.rows {
        return;
    }
    let overlay = find_overlay(row_slot(envelope.params.row_first + row));
    let first = (item % parts) * OVERLAY_ROWS;
    if first >= overlay.count {
        return;
    }
    let j = first + thread / LANES;
    let lane = thread % LANES;
    var sums = vec4<f32>();
    if j < overlay.count {
        let width = envelope.params.in_features;
        for (var chunk = lane; chunk < chunks(width); chunk += LANES) {
            let values = weight_chunk(overlay.rows, j * envelope.params.a_stride, chunk, width);
            sums = fma(values.lo, x_quad(row, chunk * CHUNK), sums);
            sums = fma(values.hi, x_quad(row, chunk * CHUNK + 4u), sums);
        }
    }
    partial[thread] = total(sums);
    for (var step = LANES / 2u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if lane < step {
            partial[thread] += partial[thread + step];
        }
    }
    if lane == 0u && j < overlay.count {
        let id = overlay_id(overlay, j);
        if id < envelope.params.site[0].out_features {
            set_output(row, id, partial[thread]);
        }
    }
}
