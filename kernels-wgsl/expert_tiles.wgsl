// The tiles of a routed layer's batch, in the order of their rows. Those in use come first, and their number stands at word
// counts_at.
//
// A thread: one row. A tile is in one workgroup: of its rows of one slot, the last tile may have fewer than SGMV_TILE_ROWS.

@group(0) @binding(0) var<storage, read_write> rows: array<u32>;

// How many tiles begin at rows of this workgroup before a thread's.
var<workgroup> begun: array<u32, THREADS>;
// Tiles of the workgroups before, and of all.
var<workgroup> before: atomic<u32>;
var<workgroup> all: atomic<u32>;

fn put_tile(index: u32, slot: i32, first: u32, count: u32) {
    let tile = origin(0u) / 4u + envelope.params.tiles_at + 4u * index;
    rows[tile] = bitcast<u32>(slot);
    rows[tile + 1u] = first;
    rows[tile + 2u] = count;
    rows[tile + 3u] = 0u;
}

@compute @workgroup_size(THREADS)
fn expert_tiles(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let at = origin(0u) / 4u;
    let counts = at + envelope.params.counts_at;
    let own_group = group.y * groups.x + group.x;
    let row = own_group * THREADS + thread;
    var slot = -1;
    if row < envelope.params.rows {
        slot = bitcast<i32>(rows[at + 2u * row]);
    }
    slots[thread] = slot;
    if thread == 0u {
        atomicStore(&before, 0u);
        atomicStore(&all, 0u);
    }
    workgroupBarrier();
    let number_of_groups = (envelope.params.rows + THREADS - 1u) / THREADS;
    for (var i = thread; i < number_of_groups; i += THREADS) {
        let count = rows[counts + 1u + i];
        atomicAdd(&all, count);
        if i < own_group {
            atomicAdd(&before, count);
        }
    }
    let begins = begins_tile(thread);
    begun[thread] = select(0u, 1u, begins);
    workgroupBarrier();

    if begins {
        var index = atomicLoad(&before);
        for (var i = 0u; i < thread; i++) {
            index += begun[i];
        }
        let end = min(thread + SGMV_TILE_ROWS, THREADS);
        var last = thread + 1u;
        // Rows past the last one have no slot.
        while last < end && slots[last] == slot {
            last++;
        }
        // The counts are memory's, and not trusted.
        if index < envelope.params.rows {
            put_tile(index, slot, row, last - thread);
        }
    }
    if row < envelope.params.rows && row >= atomicLoad(&all) {
        put_tile(row, -1, 0u, 0u);
    }
    if row == 0u {
        rows[counts] = atomicLoad(&all);
    }
}
