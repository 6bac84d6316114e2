// What all kernels share: 64-bit addresses as uvec2, the exact conversions, loads and stores.
//
// Nothing optional is used: no 64-bit integers, 16-bit types, float atomics or subgroup operations, and no
// pointer inside a struct, so that drivers without them (SwiftShader) run the same binary.

#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require
#include "contract.glsl"

// contract::Spec, given when the pipeline is made.
layout(constant_id = 0) const uint ACT = DTYPE_F32;
layout(constant_id = 1) const uint WEIGHT = DTYPE_F32;

// THREADS; a layout qualifier takes no uint constant.
layout(local_size_x = 128) in;

layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer EnvelopeAt { Envelope envelope; };
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer Words { uint word[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Quads { uvec4 quad[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Outputs { uint word; };

layout(push_constant) uniform Push { uvec2 envelope_at; };

// ---- 64-bit arithmetic, low word first ----

uvec2 add64(uvec2 a, uvec2 b) {
    uint carry;
    uint lo = uaddCarry(a.x, b.x, carry);
    return uvec2(lo, a.y + b.y + carry);
}

uvec2 sub64(uvec2 a, uvec2 b) {
    uint borrow;
    uint lo = usubBorrow(a.x, b.x, borrow);
    return uvec2(lo, a.y - b.y - borrow);
}

bool less64(uvec2 a, uvec2 b) {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

// Address of element `row * stride + offset` of an array at `base` whose elements take 1 << log2_size bytes.
uvec2 element_at(uvec2 base, uint row, uint stride, uint offset, uint log2_size) {
    uint hi, lo;
    umulExtended(row, stride, hi, lo);
    uvec2 element = add64(uvec2(lo, hi), uvec2(offset, 0u));
    uvec2 bytes = uvec2(element.x << log2_size, (element.y << log2_size) | (element.x >> (32u - log2_size)));
    return add64(base, bytes);
}

uint div_ceil(uint a, uint b) {
    return a / b + (a % b == 0u ? 0u : 1u);
}

uint log2_size(uint dtype) {
    return dtype == DTYPE_F32 ? 2u : 1u;
}

// ---- Conversions by integer code: packing instructions may flush subnormals or round otherwise ----

float f16_to_f32(uint h) {
    uint sign = (h & 0x8000u) << 16;
    uint exponent = (h >> 10) & 31u;
    uint mantissa = h & 0x3ffu;
    uint normal = (exponent + 112u) << 23 | mantissa << 13;
    // A subnormal is a whole number of 2^-24, an f32 with an exponent to spare.
    uint subnormal = floatBitsToUint(float(mantissa) * 5.9604644775390625e-8);
    uint special = 0x7f800000u | mantissa << 13;
    uint magnitude = exponent == 0u ? subnormal : (exponent == 31u ? special : normal);
    return uintBitsToFloat(sign | magnitude);
}

// Nearest, ties to even.
uint f32_to_f16(float value) {
    uint bits = floatBitsToUint(value);
    uint sign = (bits >> 16) & 0x8000u;
    uint magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    }
    if (magnitude >= 0x47800000u) {
        return sign | 0x7c00u;
    }
    if (magnitude >= 0x38800000u) {
        // A carry out of the mantissa goes to the exponent, and from the largest one to infinity.
        return sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
    }
    uint shift = 126u - (magnitude >> 23);
    if (shift > 24u) {
        return sign;
    }
    uint mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    uint kept = mantissa >> shift;
    uint rest = mantissa & ((1u << shift) - 1u);
    uint middle = 1u << (shift - 1u);
    bool up = rest > middle || (rest == middle && (kept & 1u) == 1u);
    return sign | (kept + (up ? 1u : 0u));
}

// Nearest, ties to even.
uint f32_to_bf16(float value) {
    uint bits = floatBitsToUint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return bits >> 16 | 0x40u;
    }
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// A 2-byte element in the low half of `half_word`.
float decode(uint dtype, uint half_word) {
    return dtype == DTYPE_F16 ? f16_to_f32(half_word & 0xffffu) : uintBitsToFloat(half_word << 16);
}

uint encode(uint dtype, float value) {
    return dtype == DTYPE_F16 ? f32_to_f16(value) : f32_to_bf16(value);
}

// ---- Loads ----

float f32_at(uvec2 base, uint index) {
    return uintBitsToFloat(Words(base).word[index]);
}

// Elements k and k + 1 of the activations at `base`, a multiple of their size; k is even; the second one is
// 0 and not loaded where `both` is false.
vec2 act_pair(uvec2 base, uint k, bool both) {
    if (ACT == DTYPE_F32) {
        return vec2(f32_at(base, k), both ? f32_at(base, k + 1u) : 0.0);
    }
    uvec2 aligned = uvec2(base.x & ~3u, base.y);
    uint first = Words(aligned).word[k >> 1];
    if ((base.x & 2u) == 0u) {
        return vec2(decode(ACT, first), both ? decode(ACT, first >> 16) : 0.0);
    }
    return vec2(decode(ACT, first >> 16), both ? decode(ACT, Words(aligned).word[(k >> 1) + 1u]) : 0.0);
}

// Element k of the activations at `base`.
float act_at(uvec2 base, uint k) {
    if (ACT == DTYPE_F32) {
        return f32_at(base, k);
    }
    uvec2 address = add64(base, uvec2(k << 1, k >> 31));
    return decode(ACT, Words(uvec2(address.x & ~3u, address.y)).word[0] >> ((address.x & 2u) << 3));
}

// Elements k and k + 1 of a row of weights; k is even; the second one is 0 where `both` is false.
vec2 weight_pair(uvec2 row, uint k, bool both) {
    if (WEIGHT == DTYPE_F32) {
        return vec2(f32_at(row, k), both ? f32_at(row, k + 1u) : 0.0);
    }
    uint word = Words(row).word[k >> 1];
    return vec2(decode(WEIGHT, word), both ? decode(WEIGHT, word >> 16) : 0.0);
}

// Element k of a row of weights.
float weight_at(uvec2 row, uint k) {
    if (WEIGHT == DTYPE_F32) {
        return f32_at(row, k);
    }
    return decode(WEIGHT, Words(row).word[k >> 1] >> ((k & 1u) * 16u));
}

// Eight consecutive elements.
struct Eight {
    vec4 low;
    vec4 high;
};

Eight decode_eight(uint dtype, uvec4 words) {
    return Eight(
        vec4(decode(dtype, words.x), decode(dtype, words.x >> 16), decode(dtype, words.y), decode(dtype, words.y >> 16)),
        vec4(decode(dtype, words.z), decode(dtype, words.z >> 16), decode(dtype, words.w), decode(dtype, words.w >> 16))
    );
}

// Elements 8i to 8i + 7 of an array at `base`, a multiple of 16.
Eight load_eight(uint dtype, uvec2 base, uint i) {
    if (dtype == DTYPE_F32) {
        return Eight(uintBitsToFloat(Quads(base).quad[2u * i]), uintBitsToFloat(Quads(base).quad[2u * i + 1u]));
    }
    return decode_eight(dtype, Quads(base).quad[i]);
}

// Elements 8i to 8i + 7 of a row of activations.
Eight act_eight(uvec2 base, uint i) {
    if ((base.x & 15u) == 0u) {
        return load_eight(ACT, base, i);
    }
    uint k = i * 8u;
    return Eight(
        vec4(act_pair(base, k, true), act_pair(base, k + 2u, true)),
        vec4(act_pair(base, k + 4u, true), act_pair(base, k + 6u, true))
    );
}

// `sum` plus eight products, added in order.
float add_eight(float sum, Eight a, Eight b) {
    sum += a.low.x * b.low.x;
    sum += a.low.y * b.low.y;
    sum += a.low.z * b.low.z;
    sum += a.low.w * b.low.w;
    sum += a.high.x * b.high.x;
    sum += a.high.y * b.high.y;
    sum += a.high.z * b.high.z;
    sum += a.high.w * b.high.w;
    return sum;
}

// ---- Tables ----

// The launch's own view of one slot at one site.
struct Adapter {
    uvec2 matrix;
    uint rank;
    float scale;
    // Of an expand: whether gains and offsets lie behind the matrix, and their address.
    bool shaped;
    uvec2 vectors;
};

// Looks `slot` up for site `site`; false: the row has no delta here. Nothing read from the tables is believed:
// a cell must lie 16-aligned in the weights with `span` words behind it, a rank within the launch's.
bool find(EnvelopeAt at, uint site, int slot, out Adapter adapter) {
    adapter = Adapter(uvec2(0u), 0u, 0.0, false, uvec2(0u));
    uint first = at.envelope.params.slot_first;
    if (slot < 0 || uint(slot) < first || uint(slot) - first >= at.envelope.params.slot_count) {
        return false;
    }
    uvec2 tables = at.envelope.operand[1];
    uint index = uint(slot);
    uvec2 cell_at = element_at(tables, index, 2u, at.envelope.params.site[site].cells, 2u);
    adapter.matrix = uvec2(Words(cell_at).word[0], Words(cell_at).word[1]);
    if (adapter.matrix == uvec2(0u) || (adapter.matrix.x & 15u) != 0u) {
        return false;
    }
    uvec2 weights = uvec2(at.envelope.params.weights_lo, at.envelope.params.weights_hi);
    uvec2 length = uvec2(at.envelope.params.weights_len_lo, at.envelope.params.weights_len_hi);
    uint words = at.envelope.params.site[site].span;
    uvec2 span = uvec2(words << 2, words >> 30);
    if (less64(adapter.matrix, weights) || less64(length, span)) {
        return false;
    }
    if (less64(sub64(length, span), sub64(adapter.matrix, weights))) {
        return false;
    }
    uvec2 rank_at = element_at(tables, index, 1u, at.envelope.params.site[site].ranks, 2u);
    uint rank_word = Words(rank_at).word[0];
    adapter.rank = rank_word & RANK_MASK;
    adapter.shaped = (rank_word & RANK_VECTORS) != 0u;
    if (adapter.rank == 0u || adapter.rank > at.envelope.params.max_rank) {
        return false;
    }
    adapter.scale = f32_at(element_at(tables, index, 1u, at.envelope.params.site[site].scales, 2u), 0u);
    return true;
}

// f32 from the start of one vector behind a matrix to the end of its padding.
uint vector_len(uint out_features) {
    return div_ceil(out_features, VECTOR_ALIGN) * VECTOR_ALIGN;
}

// The same for an expand, whose matrix may have vectors behind it: if so, they must lie in the span too.
bool find_expand(EnvelopeAt at, uint site, int slot, out Adapter adapter) {
    if (!find(at, site, slot, adapter)) {
        return false;
    }
    if (!adapter.shaped) {
        return true;
    }
    uint rows = at.envelope.params.site[site].out_features;
    uint row_words = WEIGHT == DTYPE_F32 ? at.envelope.params.b_stride : at.envelope.params.b_stride / 2u;
    uint span = at.envelope.params.site[site].span;
    // By division, since the products may pass 2^32.
    if (row_words == 0u || span / row_words < rows) {
        return false;
    }
    uint left = span - rows * row_words;
    if (left / (2u * VECTOR_ALIGN) < div_ceil(rows, VECTOR_ALIGN)) {
        return false;
    }
    adapter.vectors = element_at(adapter.matrix, rows, row_words, 0u, 2u);
    return true;
}

// Slot of a row of the batch.
int row_slot(EnvelopeAt at, uint row) {
    return int(Words(element_at(at.envelope.operand[0], row, 2u, 0u, 2u)).word[0]);
}

// The row's own multiplier.
float row_scale(EnvelopeAt at, uint row) {
    return f32_at(element_at(at.envelope.operand[0], row, 2u, 1u, 2u), 0u);
}

// No row.
const uint NO_ROW = 0xffffffffu;

// The row of x that row `row` of the launch reads; NO_ROW: zeros.
uint x_row(EnvelopeAt at, uint row) {
    uint x_rows_at = at.envelope.params.x_rows_at;
    if (x_rows_at == 0u) {
        return row;
    }
    uint batch_row = at.envelope.params.row_first + row;
    uint named = Words(element_at(at.envelope.operand[0], batch_row, 1u, x_rows_at, 2u)).word[0];
    return named < at.envelope.params.x_rows ? named : NO_ROW;
}

// ---- The one store of y ----

// What a row does to two adjacent outputs: y + delta, or, where its adapter has vectors,
// y + scale * (slope * y + delta).
struct Change {
    vec2 delta;
    bool shaped;
    vec2 slope;
    float scale;
};

// The change of outputs `n`, which is even, and the next, whose sums over B are `sum`.
Change change_of(EnvelopeAt at, uint site, Adapter adapter, uint batch_row, uint n, vec2 sum) {
    float scale = row_scale(at, batch_row);
    if (!adapter.shaped) {
        return Change(adapter.scale * scale * sum, false, vec2(0.0), 0.0);
    }
    // Vectors are padded past odd ends.
    vec2 gain = vec2(f32_at(adapter.vectors, n), f32_at(adapter.vectors, n + 1u));
    uint offsets = vector_len(at.envelope.params.site[site].out_features);
    vec2 offset = vec2(f32_at(adapter.vectors, offsets + n), f32_at(adapter.vectors, offsets + n + 1u));
    return Change(offset + adapter.scale * gain * sum, true, gain - 1.0, scale);
}

float changed(float y, Change change, uint i) {
    if (!change.shaped) {
        return y + change.delta[i];
    }
    // No slope is no factor for an infinite y.
    float of_y = change.slope[i] == 0.0 ? 0.0 : change.slope[i] * y;
    return y + change.scale * (of_y + change.delta[i]);
}

// Changes a 2-byte element. Its word's other half may be another thread's, which changes it at any time: flip
// only the bits of this half that differ.
void change_half(uvec2 address, Change change, uint i) {
    Outputs at = Outputs(uvec2(address.x & ~3u, address.y));
    uint shift = (address.x & 2u) << 3;
    uint old = (at.word >> shift) & 0xffffu;
    uint new = encode(ACT, changed(decode(ACT, old), change, i)) & 0xffffu;
    atomicXor(at.word, (old ^ new) << shift);
}

// Changes two adjacent elements of one row of a site's outputs, or, unless `both`, the first alone.
void change_outputs(uvec2 address, Change change, bool both) {
    if (ACT == DTYPE_F32) {
        Outputs first = Outputs(address);
        first.word = floatBitsToUint(changed(uintBitsToFloat(first.word), change, 0u));
        if (both) {
            Outputs second = Outputs(add64(address, uvec2(4u, 0u)));
            second.word = floatBitsToUint(changed(uintBitsToFloat(second.word), change, 1u));
        }
        return;
    }
    if (both && (address.x & 2u) == 0u) {
        // Both halves of the word are this thread's.
        Outputs pair = Outputs(address);
        uint old = pair.word;
        uint lo = encode(ACT, changed(decode(ACT, old), change, 0u)) & 0xffffu;
        uint hi = encode(ACT, changed(decode(ACT, old >> 16), change, 1u));
        pair.word = lo | hi << 16;
        return;
    }
    change_half(address, change, 0u);
    if (both) {
        change_half(add64(address, uvec2(2u, 0u)), change, 1u);
    }
}

// Address of output `n` of row `row` of the launch.
uvec2 output_at(EnvelopeAt at, uint site, uint row, uint n) {
    uvec2 base = at.envelope.operand[4u + at.envelope.params.site[site].y_operand];
    uint size = log2_size(ACT);
    uvec2 first = element_at(base, row, at.envelope.params.site[site].y_stride, at.envelope.params.site[site].y_offset, size);
    return add64(first, uvec2(n << size, n >> (32u - size)));
}

// Address of the site's part of z of row `row` of the launch.
uvec2 z_at(EnvelopeAt at, uint operand, uint site, uint row) {
    return element_at(at.envelope.operand[operand], row, at.envelope.params.z_stride, at.envelope.params.site[site].z_offset, 2u);
}

// Address of row `row` of a matrix of weights.
uvec2 weight_row(uvec2 matrix, uint row, uint stride) {
    return element_at(matrix, row, stride, 0u, log2_size(WEIGHT));
}

// ---- Work ----

// Which work item of x this workgroup is: contract::fold undone.
uint work_item() {
    return gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
}

// The rows that a tile of the batch asks for, as rows of the launch: `first` on, of which those from the launch's
// `rows` on are another launch's (rows before its first wrap to numbers past its last). Nothing read is
// believed: no more rows than a tile has, and none past the last number there is.
struct TileRows {
    int slot;
    uint first;
    uint count;
};

TileRows tile_rows(EnvelopeAt at, uint tile) {
    Words words = Words(element_at(at.envelope.operand[0], tile, 4u, at.envelope.params.tiles_at, 2u));
    uint first = words.word[1];
    uint count = min(min(words.word[2], SGMV_TILE_ROWS), ~first);
    return TileRows(int(words.word[0]), first - at.envelope.params.row_first, count);
}
