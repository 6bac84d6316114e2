// The operands of the expand kernels: z is read, y is read and written.
//
// y is words of 4 bytes. Where both halves of a word belong to one thread it stores the word; otherwise
// it turns its own half, which nobody else writes, into the new one by an exclusive or with their
// difference, and the neighbour's half keeps whatever it holds at that moment.

@group(0) @binding(3) var<storage, read> z: array<f32>;
@group(0) @binding(4) var<storage, read_write> y0: array<atomic<u32>>;
@group(0) @binding(5) var<storage, read_write> y1: array<atomic<u32>>;
@group(0) @binding(6) var<storage, read_write> y2: array<atomic<u32>>;
@group(0) @binding(7) var<storage, read_write> y3: array<atomic<u32>>;

fn y_load(operand: u32, word: u32) -> u32 {
    switch operand {
        case 0u: { return atomicLoad(&y0[word]); }
        case 1u: { return atomicLoad(&y1[word]); }
        case 2u: { return atomicLoad(&y2[word]); }
        default: { return atomicLoad(&y3[word]); }
    }
}

fn y_store(operand: u32, word: u32, value: u32) {
    switch operand {
        case 0u: { atomicStore(&y0[word], value); }
        case 1u: { atomicStore(&y1[word], value); }
        case 2u: { atomicStore(&y2[word], value); }
        default: { atomicStore(&y3[word], value); }
    }
}

fn y_flip(operand: u32, word: u32, difference: u32) {
    switch operand {
        case 0u: { atomicXor(&y0[word], difference); }
        case 1u: { atomicXor(&y1[word], difference); }
        case 2u: { atomicXor(&y2[word], difference); }
        default: { atomicXor(&y3[word], difference); }
    }
}

// vec4s of a gain or an offset for every output.
fn vector_len(site: SiteParams) -> u32 {
    return site.out_features / VECTOR_ALIGN + select(0u, 1u, site.out_features % VECTOR_ALIGN != 0u);
}

// `pair`, or rank 0 where it should have vectors behind it that don't lie in the site's span.
fn with_vectors(site: SiteParams, pair: Pair) -> Pair {
    var out = pair;
    if pair.rank == 0u || !pair.shaped {
        return out;
    }
    let row_words = select(envelope.params.b_stride / 2u, envelope.params.b_stride, WEIGHT == DTYPE_F32);
    // By division, since the products may pass 2^32.
    if row_words == 0u || site.span / row_words < site.out_features {
        out.rank = 0u;
        return out;
    }
    let matrix = site.out_features * row_words;
    if (site.span - matrix) / (2u * VECTOR_ALIGN) < vector_len(site) {
        out.rank = 0u;
        return out;
    }
    out.gains = pair.base + matrix / 4u;
    return out;
}

// What a row does to two adjacent outputs: y + scale * sum, or, where its adapter has vectors,
// y + scale * (slope * y + sum).
struct Change {
    sum: vec2<f32>,
    scale: f32,
    shaped: bool,
    slope: vec2<f32>,
}

// The change of outputs `n`, which is even, and the next, whose sums over B are `sums`.
fn change_of(site: SiteParams, pair: Pair, batch_row: u32, n: u32, sums: vec2<f32>) -> Change {
    let scale = row_scale(batch_row);
    if !pair.shaped {
        return Change(sums, pair.scale * scale, false, vec2<f32>());
    }
    let gains = bitcast<vec4<f32>>(weights[pair.gains + n / 4u]);
    let offsets = bitcast<vec4<f32>>(weights[pair.gains + vector_len(site) + n / 4u]);
    let low = n % 4u == 0u;
    let gain = select(gains.zw, gains.xy, low);
    let offset = select(offsets.zw, offsets.xy, low);
    return Change(fma(pair.scale * gain, sums, offset), scale, true, gain - vec2<f32>(1.0));
}

// `y` as `change` makes it, `i` of its two outputs.
fn changed(y: f32, change: Change, i: u32) -> f32 {
    var sum = change.sum[i];
    // No slope is no factor for an infinite y.
    if change.shaped && change.slope[i] != 0.0 {
        sum = fma(change.slope[i], y, sum);
    }
    return fma(change.scale, sum, y);
}

// The same in the activation type, rounded; `y` has its high half clear.
fn changed_half(y: u32, change: Change, i: u32) -> u32 {
    let value = changed(half_value(ACT, y), change, i);
    if ACT == DTYPE_BF16 {
        return bf16_bits(value);
    }
    return f16_bits(value);
}

fn change_word(operand: u32, word: u32, change: Change, i: u32) {
    let value = changed(bitcast<f32>(y_load(operand, word)), change, i);
    y_store(operand, word, bitcast<u32>(value));
}

fn change_half(operand: u32, at: u32, change: Change, i: u32) {
    let shift = 16u * (at & 1u);
    let old = (y_load(operand, at / 2u) >> shift) & 0xffffu;
    y_flip(operand, at / 2u, (old ^ changed_half(old, change, i)) << shift);
}

// Changes outputs `n`, which is even, and `n + 1` of `row`; the first alone where it is the last one.
fn change_outputs(site: SiteParams, pair: Pair, row: u32, n: u32, sums: vec2<f32>) {
    let change = change_of(site, pair, envelope.params.row_first + row, n, sums);
    let operand = site.y_operand;
    let element = site.y_offset + row * site.y_stride + n;
    let both = n + 1u < site.out_features;
    if ACT == DTYPE_F32 {
        let word = origin(4u + operand) / 4u + element;
        change_word(operand, word, change, 0u);
        if both {
            change_word(operand, word + 1u, change, 1u);
        }
        return;
    }
    let at = origin(4u + operand) / 2u + element;
    if both && (at & 1u) == 0u {
        let old = y_load(operand, at / 2u);
        let lo = changed_half(old & 0xffffu, change, 0u);
        let hi = changed_half(old >> 16u, change, 1u);
        y_store(operand, at / 2u, lo | (hi << 16u));
        return;
    }
    change_half(operand, at, change, 0u);
    if both {
        change_half(operand, at + 1u, change, 1u);
    }
}

// Where z of `row` and rank `r` lies.
fn z_index(site: SiteParams, row: u32, r: u32) -> u32 {
    return origin(3u) / 4u + row * envelope.params.z_stride + site.z_offset + r;
}
