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

// `y` + `scale` * `sum`, rounded to the activation type; `y` has its high half clear.
fn half_sum(y: u32, scale: f32, sum: f32) -> u32 {
    let value = fma(scale, sum, half_value(ACT, y));
    if ACT == DTYPE_BF16 {
        return bf16_bits(value);
    }
    return f16_bits(value);
}

fn add_word(operand: u32, word: u32, scale: f32, sum: f32) {
    let value = fma(scale, sum, bitcast<f32>(y_load(operand, word)));
    y_store(operand, word, bitcast<u32>(value));
}

fn add_half(operand: u32, at: u32, scale: f32, sum: f32) {
    let shift = 16u * (at & 1u);
    let old = (y_load(operand, at / 2u) >> shift) & 0xffffu;
    y_flip(operand, at / 2u, (old ^ half_sum(old, scale, sum)) << shift);
}

// Adds `scale * sums` to outputs `n` and `n + 1` of `row`; to the first alone where it is the last one.
fn add_outputs(site: SiteParams, row: u32, n: u32, scale: f32, sums: vec2<f32>) {
    let operand = site.y_operand;
    let element = site.y_offset + row * site.y_stride + n;
    let both = n + 1u < site.out_features;
    if ACT == DTYPE_F32 {
        let word = origin(4u + operand) / 4u + element;
        add_word(operand, word, scale, sums.x);
        if both {
            add_word(operand, word + 1u, scale, sums.y);
        }
        return;
    }
    let at = origin(4u + operand) / 2u + element;
    if both && (at & 1u) == 0u {
        let old = y_load(operand, at / 2u);
        let lo = half_sum(old & 0xffffu, scale, sums.x);
        let hi = half_sum(old >> 16u, scale, sums.y);
        y_store(operand, at / 2u, lo | (hi << 16u));
        return;
    }
    add_half(operand, at, scale, sums.x);
    if both {
        add_half(operand, at + 1u, scale, sums.y);
    }
}

// Where z of `row` and rank `r` lies.
fn z_index(site: SiteParams, row: u32, r: u32) -> u32 {
    return origin(3u) / 4u + row * envelope.params.z_stride + site.z_offset + r;
}
