// What the prefill kernels for sm_90 share: barriers of copies and work, and the batch's tiles as runs of one slot.
#pragma once
#include "copies.cuh"

// Tiles that a block has at hand at a time; the next ones are looked up when these are done.
constexpr u32 WINDOW = 256;
static_assert(SGMV_TILE_ROWS == 16, "a tile is a product's 16 rows");

// Barriers in shared memory, for threads that meet without all waiting.
DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t, [%0];}" ::"r"(barrier) : "memory");
}
// Arrives when this thread's copies so far have come.
DEVICE void barrier_arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits for the end of the phase of that parity.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
                     barrier),
                 "r"(parity)
                 : "memory");
}

// The tiles of a window, in shared memory.
struct Tiles {
    // First row (in the batch), rows (0: nothing to do) and slot of each.
    u32 first[WINDOW];
    u32 rows[WINDOW];
    int slot[WINDOW];
    // A bit for each tile whose slot isn't that of the tile before it.
    u32 begins[WINDOW / 32];
};

// Reads the window that begins at tile `at`; all threads of a block of at least WINDOW threads.
DEVICE void read_tiles(const Params& p, const u32* batch, u32 at, Tiles& tiles) {
    const u32 i = threadIdx.x;
    if (i < WINDOW) {
        // All loads at once.
        const u32* words = batch + ((u64)p.tiles_at + 4ull * (at + i));
        const bool is = at + i < p.tiles, after = i % 32 == 0 && i && at + i - 1 < p.tiles;
        int slot = -1, last = -1;
        u32 first = 0, rows = 0, last_rows = 0;
        if (is) slot = (int)words[0], first = words[1], rows = words[2];
        if (after) last = (int)words[-4], last_rows = words[-2];
        // Negative: it has nothing to do.
        if (slot < 0 || rows == 0) slot = -1, rows = 0;
        if (last < 0 || last_rows == 0) last = -1;
        const int before = __shfl_up_sync(0xffffffffu, slot, 1);
        if (i % 32) last = before;
        const u32 begins = __ballot_sync(0xffffffffu, i == 0 || slot != last);
        // Of the window before, all is done.
        if (at) __syncthreads();
        tiles.first[i] = first, tiles.rows[i] = rows < SGMV_TILE_ROWS ? rows : SGMV_TILE_ROWS, tiles.slot[i] = slot;
        if (i % 32 == 0) tiles.begins[i / 32] = begins;
    } else if (at) {
        __syncthreads();
    }
    __syncthreads();
}

// The first tile after `i` whose slot is another, at most WINDOW.
DEVICE u32 run_end(const Tiles& tiles, u32 i) {
    u32 word = ++i / 32;
    if (word >= WINDOW / 32) return WINDOW;
    u32 bits = tiles.begins[word] & (0xffffffffu << (i % 32));
    while (bits == 0 && ++word < WINDOW / 32) bits = tiles.begins[word];
    return bits ? word * 32 + __ffs(bits) - 1 : WINDOW;
}

// The first tile of the run that tile `i` is in.
DEVICE u32 run_begin(const Tiles& tiles, u32 i) {
    u32 word = i / 32, bits = tiles.begins[word] & (0xffffffffu >> (31 - i % 32));
    while (bits == 0) bits = tiles.begins[--word];
    return word * 32 + 31 - __clz(bits);
}

// Tiles of the launch: those in use, where the batch tells.
DEVICE u32 tiles_of(const Params& p, const u32* batch) {
    if (p.counts_at == 0) return p.tiles;
    const u32 used = batch[p.counts_at];
    return used < p.tiles ? used : p.tiles;
}

// Row `i` of tile `t` in x, y and z, or -1 where it is another launch's or none.
DEVICE long long tile_row(const Params& p, const Tiles& tiles, u32 t, u32 i) {
    const long long row = (long long)tiles.first[t] - (long long)p.row_first + i;
    return i < tiles.rows[t] && row >= 0 && row < (long long)p.rows ? row : -1;
}
