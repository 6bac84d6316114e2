// What the kernels of a pair share: its bindings, a work item, a pair, and the 2-byte types.
//
// Such a kernel is contract.wgsl + envelope.wgsl + this file + shrink.wgsl or expand.wgsl + its own file. It needs no optional
// feature: the 2-byte types are taken apart with integers, exact on every device, whether or not the
// device has f16 and whatever it does with subnormals in unpack2x16float.
//
// Everything that decides about control flow comes from uniform or read-only memory at an index that is
// the same for the whole workgroup, so that barriers are in uniform control flow.

@group(0) @binding(1) var<storage, read> tables: array<u32>;
// Cells and rows of A and B are 16-byte aligned, and so is the start of the binding.
@group(0) @binding(2) var<storage, read> weights: array<vec4<u32>>;

// Elements of A or B that are unpacked together: 16 bytes of a 2-byte type.
const CHUNK: u32 = 8u;

// The slot of row `row` of the batch.
fn row_slot(row: u32) -> i32 {
    return bitcast<i32>(batch[origin(0u) / 4u + 2u * row]);
}

// The multiplier of row `row` of the batch.
fn row_scale(row: u32) -> f32 {
    return bitcast<f32>(batch[origin(0u) / 4u + 2u * row + 1u]);
}

fn tile_at(index: u32) -> Tile {
    let at = origin(0u) / 4u + envelope.params.tiles_at + 4u * index;
    return Tile(bitcast<i32>(batch[at]), batch[at + 1u], batch[at + 2u], 0u);
}

// The launch's row that row `index` of `tile` is, or NO_ROW: rows past the tile's end, or another launch's.
fn tile_row(tile: Tile, index: u32) -> u32 {
    let batch_row = tile.first_row + index;
    let row = batch_row - envelope.params.row_first;
    // A row number past 2^32 must not become a small one.
    let wraps = batch_row < tile.first_row || batch_row < envelope.params.row_first;
    return select(NO_ROW, row, !wraps && index < tile.rows && row < envelope.params.rows);
}

// One slot's matrix at one site.
struct Pair {
    // 0: no delta here.
    rank: u32,
    scale: f32,
    // Index in `weights` of the matrix' first vec4.
    base: u32,
    // The rank's word has RANK_VECTORS.
    shaped: bool,
    // Of an expand: index in `weights` of the gains behind the matrix.
    gains: u32,
}

// What `slot` has at `site`; rank 0 for everything that is not there, not in the window, or not in bounds.
fn find_pair(site: SiteParams, slot: i32) -> Pair {
    let none = Pair(0u, 0.0, 0u, false, 0u);
    let slot_index = bitcast<u32>(slot);
    // A negative slot is past any window.
    if slot_index - envelope.params.slot_first >= envelope.params.slot_count || slot < 0 {
        return none;
    }
    let table = origin(1u) / 4u;
    let lo = tables[table + site.cells + 2u * slot_index];
    let hi = tables[table + site.cells + 2u * slot_index + 1u];
    // An address is buffer << 32 | offset, and no buffer is as long as 4 GiB.
    if hi != envelope.params.weights_hi || lo < envelope.params.weights_lo {
        return none;
    }
    let offset = lo - envelope.params.weights_lo;
    let len = envelope.params.weights_len_lo;
    if offset > len || site.span > (len - offset) / 4u {
        return none;
    }
    let word = tables[table + site.ranks + slot_index];
    let rank = word & RANK_MASK;
    if rank > envelope.params.max_rank {
        return none;
    }
    let scale = bitcast<f32>(tables[table + site.scales + slot_index]);
    return Pair(rank, scale, (offset + origin(2u)) / 16u, (word & RANK_VECTORS) != 0u, 0u);
}

// The f32 that equals the binary16 number in the low half of `h`; NaN stays NaN.
fn f16_value(h: u32) -> f32 {
    let sign = (h & 0x8000u) << 16u;
    let magnitude = h & 0x7fffu;
    var bits = (magnitude << 13u) + 0x38000000u;
    if magnitude >= 0x7c00u {
        bits = (magnitude << 13u) | 0x7f800000u;
    } else if magnitude < 0x0400u {
        // Exact: at most 10 bits times a power of two, and a normal f32.
        bits = bitcast<u32>(f32(magnitude) * 0x1p-24f);
    }
    return bitcast<f32>(sign | bits);
}

// The binary16 number nearest to `value`, ties to even.
fn f16_bits(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if magnitude > 0x7f800000u {
        return sign | 0x7e00u | ((magnitude >> 13u) & 0x03ffu);
    }
    // 65520, half way past the largest number, and above.
    if magnitude >= 0x477ff000u {
        return sign | 0x7c00u;
    }
    // 2^-14, the smallest normal number, and above: a carry out of the mantissa is the next exponent.
    if magnitude >= 0x38800000u {
        return sign | ((magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13u) & 1u)) >> 13u);
    }
    // Below 2^-25, half the smallest subnormal number.
    if magnitude < 0x33000000u {
        return sign;
    }
    let shift = 126u - (magnitude >> 23u);
    let mantissa = (magnitude & 0x007fffffu) | 0x00800000u;
    let quotient = mantissa >> shift;
    let rest = mantissa & ((1u << shift) - 1u);
    let half = 1u << (shift - 1u);
    let up = rest > half || (rest == half && (quotient & 1u) == 1u);
    return sign | (quotient + select(0u, 1u, up));
}

// The bfloat16 number nearest to `value`, ties to even.
fn bf16_bits(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    if (bits & 0x7fffffffu) > 0x7f800000u {
        return (bits >> 16u) | 0x0040u;
    }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

// The value of a 2-byte number in the low half of `h`, whose high half is zero.
fn half_value(dtype: u32, h: u32) -> f32 {
    if dtype == DTYPE_BF16 {
        return bitcast<f32>(h << 16u);
    }
    return f16_value(h);
}

// The two 2-byte numbers of a word, in memory order.
fn pair_values(dtype: u32, word: u32) -> vec2<f32> {
    if dtype == DTYPE_BF16 {
        return vec2<f32>(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
    }
    return vec2<f32>(f16_value(word & 0xffffu), f16_value(word >> 16u));
}

// CHUNK consecutive elements.
struct Eight {
    lo: vec4<f32>,
    hi: vec4<f32>,
}

// Chunk `chunk` of the matrix row that begins `row_elements` after vec4 `base`: `row_elements` is a
// multiple of CHUNK. Elements from `width` on, which hold anything, read as 0.
fn weight_chunk(base: u32, row_elements: u32, chunk: u32, width: u32) -> Eight {
    var out: Eight;
    let at = row_elements / CHUNK + chunk;
    if WEIGHT == DTYPE_F32 {
        out.lo = bitcast<vec4<f32>>(weights[base + 2u * at]);
        out.hi = bitcast<vec4<f32>>(weights[base + 2u * at + 1u]);
    } else {
        let words = weights[base + at];
        out.lo = vec4<f32>(pair_values(WEIGHT, words.x), pair_values(WEIGHT, words.y));
        out.hi = vec4<f32>(pair_values(WEIGHT, words.z), pair_values(WEIGHT, words.w));
    }
    return clip(out, chunk * CHUNK, width);
}

// `eight` at elements `first`.., with zeros from element `width` on.
fn clip(eight: Eight, first: u32, width: u32) -> Eight {
    if first + CHUNK <= width {
        return eight;
    }
    let at = vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u);
    let zero = vec4<f32>();
    let end = vec4<u32>(width);
    return Eight(select(zero, eight.lo, at < end), select(zero, eight.hi, at + vec4<u32>(4u) < end));
}

// Number of chunks that hold `width` elements.
fn chunks(width: u32) -> u32 {
    return (width + CHUNK - 1u) / CHUNK;
}

// A sum kept as four, in one order for every row.
fn total(sums: vec4<f32>) -> f32 {
    return (sums.x + sums.y) + (sums.z + sums.w);
}
