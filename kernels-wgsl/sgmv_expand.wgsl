// y[row][n] += scale * sum_r B[slot(tile)][n][r] * z[row][r]
//
// A workgroup: one tile of up to SGMV_TILE_ROWS rows, SGMV_EXPAND_OUTPUTS outputs, one site (z of the
// grid). SGMV_DEPTH terms of the sums at a time pass through workgroup memory. A thread: one row, four
// adjacent outputs. Vectors behind B change y as the contract says.

// Threads on one row of the tile; each stages PART terms of it.
const TEAM: u32 = THREADS / SGMV_TILE_ROWS;
const PART: u32 = SGMV_DEPTH / TEAM;
// One more than the depth keeps the rows of a column in different banks.
const PITCH: u32 = SGMV_DEPTH + 1u;
// Threads that stage one row of B, a chunk each.
const B_TEAM: u32 = SGMV_DEPTH / CHUNK;

var<workgroup> z_tile: array<f32, SGMV_TILE_ROWS * PITCH>;
var<workgroup> b_tile: array<f32, SGMV_EXPAND_OUTPUTS * PITCH>;

@compute @workgroup_size(THREADS)
fn sgmv_expand(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let parts = (envelope.params.max_out + SGMV_EXPAND_OUTPUTS - 1u) / SGMV_EXPAND_OUTPUTS;
    let item = group.y * groups.x + group.x;
    if item / parts >= envelope.params.tiles {
        return;
    }
    let tile = tile_at(item / parts);
    let site = envelope.params.site[group.z];
    let pair = with_vectors(site, find_pair(site, tile.slot));
    let first = (item % parts) * SGMV_EXPAND_OUTPUTS;
    if pair.rank == 0u || first >= site.out_features {
        return;
    }
    let index = thread / TEAM;
    let member = thread % TEAM;
    let row = tile_row(tile, index);
    let b_row = first + thread / B_TEAM;
    let b_part = thread % B_TEAM;
    var sums = vec4<f32>();
    for (var k = 0u; k < pair.rank; k += SGMV_DEPTH) {
        for (var i = 0u; i < PART; i++) {
            let r = k + member * PART + i;
            var value = 0.0;
            if row != NO_ROW && r < pair.rank {
                value = z[z_index(site, row, r)];
            }
            z_tile[index * PITCH + member * PART + i] = value;
        }
        var b: Eight;
        let at = k + b_part * CHUNK;
        if b_row < site.out_features && at < pair.rank {
            b = weight_chunk(pair.base, b_row * envelope.params.b_stride, at / CHUNK, pair.rank);
        }
        for (var i = 0u; i < 4u; i++) {
            b_tile[(thread / B_TEAM) * PITCH + b_part * CHUNK + i] = b.lo[i];
            b_tile[(thread / B_TEAM) * PITCH + b_part * CHUNK + 4u + i] = b.hi[i];
        }
        workgroupBarrier();
        for (var i = 0u; i < SGMV_DEPTH; i++) {
            let column = 4u * member * PITCH + i;
            let values = vec4<f32>(
                b_tile[column],
                b_tile[column + PITCH],
                b_tile[column + 2u * PITCH],
                b_tile[column + 3u * PITCH],
            );
            sums = fma(values, vec4<f32>(z_tile[index * PITCH + i]), sums);
        }
        workgroupBarrier();
    }
    if row == NO_ROW {
        return;
    }
    let n = first + 4u * member;
    if n < site.out_features {
        change_outputs(site, pair, row, n, sums.xy);
    }
    if n + 2u < site.out_features {
        change_outputs(site, pair, row, n + 2u, sums.zw);
    }
}
