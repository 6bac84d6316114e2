// The operands of the overlay kernels and a slot's overlay: ids or x are read, y is written.
//
// y is words of 4 bytes. Where both halves of a word belong to one thread it stores the word; otherwise it turns its
// own half, which nobody else writes, into the new one by an exclusive or with their difference.

@group(0) @binding(3) var<storage, read> x: array<u32>;
@group(0) @binding(4) var<storage, read_write> y0: array<atomic<u32>>;

// A slot's overlay at the launch's one site: `count` ids, ascending, and as many rows.
struct Overlay {
    // 0: nothing is replaced here.
    count: u32,
    // Indices in `weights` of the ids' first vector, and of the rows'.
    ids: u32,
    rows: u32,
}

fn find_overlay(slot: i32) -> Overlay {
    let pair = find_pair(envelope.params.site[0], slot);
    // Ids are padded to vectors for the largest number of rows: contract::overlay_ids_bytes.
    return Overlay(pair.rank, pair.base, pair.base + (envelope.params.max_rank + 3u) / 4u);
}

fn overlay_id(overlay: Overlay, j: u32) -> u32 {
    return weights[overlay.ids + j / 4u][j % 4u];
}

// `value`, rounded to a 2-byte activation type.
fn half_bits(value: f32) -> u32 {
    if ACT == DTYPE_BF16 {
        return bf16_bits(value);
    }
    return f16_bits(value);
}

fn set_half(at: u32, value: f32) {
    let shift = 16u * (at & 1u);
    let old = (atomicLoad(&y0[at / 2u]) >> shift) & 0xffffu;
    atomicXor(&y0[at / 2u], (old ^ half_bits(value)) << shift);
}

// Element `n` of `row` of y = `value`.
fn set_output(row: u32, n: u32, value: f32) {
    let element = envelope.params.site[0].y_offset + row * envelope.params.site[0].y_stride + n;
    if ACT == DTYPE_F32 {
        atomicStore(&y0[origin(4u) / 4u + element], bitcast<u32>(value));
        return;
    }
    set_half(origin(4u) / 2u + element, value);
}
