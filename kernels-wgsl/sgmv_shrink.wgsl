// z[row][r] = sum_k A[slot(tile)][r][k] * x[x_row(row)][k]
//
// A workgroup: one tile of up to SGMV_TILE_ROWS rows, SGMV_SHRINK_RANKS ranks, one site (z of the grid).
// SGMV_DEPTH terms of the sums at a time pass through workgroup memory. A thread: one row, two ranks.

// Threads on one row of the tile; each stages PART terms of it.
const TEAM: u32 = THREADS / SGMV_TILE_ROWS;
const PART: u32 = SGMV_DEPTH / TEAM;
// One more than the depth keeps the rows of a column in different banks.
const PITCH: u32 = SGMV_DEPTH + 1u;

var<workgroup> x_tile: array<f32, SGMV_TILE_ROWS * PITCH>;
var<workgroup> a_tile: array<f32, SGMV_SHRINK_RANKS * PITCH>;

@compute @workgroup_size(THREADS)
fn sgmv_shrink(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let parts = (envelope.params.max_rank + SGMV_SHRINK_RANKS - 1u) / SGMV_SHRINK_RANKS;
    let item = group.y * groups.x + group.x;
    if item / parts >= envelope.params.tiles {
        return;
    }
    let tile = tile_at(item / parts);
    let site = envelope.params.site[group.z];
    let pair = find_pair(site, tile.slot);
    let first = (item % parts) * SGMV_SHRINK_RANKS;
    if first >= pair.rank {
        return;
    }
    // Row `thread / TEAM` of the tile, and rank `first + thread / TEAM` while staging.
    let index = thread / TEAM;
    let member = thread % TEAM;
    let row = tile_row(tile, index);
    var x_from = NO_ROW;
    if row != NO_ROW {
        x_from = x_row(row);
    }
    let width = envelope.params.in_features;
    var sums = vec2<f32>();
    for (var k = 0u; k < width; k += SGMV_DEPTH) {
        for (var i = 0u; i < PART; i++) {
            let at = k + member * PART + i;
            var value = 0.0;
            if x_from != NO_ROW && at < width {
                value = x_value(x_from, at);
            }
            x_tile[index * PITCH + member * PART + i] = value;
        }
        // A chunk for every second member.
        if (member & 1u) == 0u {
            var a: Eight;
            let at = k + member * PART;
            if first + index < pair.rank && at < width {
                a = weight_chunk(pair.base, (first + index) * envelope.params.a_stride, at / CHUNK, width);
            }
            for (var i = 0u; i < 4u; i++) {
                a_tile[index * PITCH + member * PART + i] = a.lo[i];
                a_tile[index * PITCH + member * PART + 4u + i] = a.hi[i];
            }
        }
        workgroupBarrier();
        for (var i = 0u; i < SGMV_DEPTH; i++) {
            let a = vec2<f32>(a_tile[member * PITCH + i], a_tile[(member + TEAM) * PITCH + i]);
            sums = fma(a, vec2<f32>(x_tile[index * PITCH + i]), sums);
        }
        workgroupBarrier();
    }
    if row != NO_ROW {
        if first + member < pair.rank {
            z[z_index(site, row, first + member)] = sums.x;
        }
        if first + member + TEAM < pair.rank {
            z[z_index(site, row, first + member + TEAM)] = sums.y;
        }
    }
}
