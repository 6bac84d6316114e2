// What the kernels of token ids and replaced rows share, after common.glsl: a slot's overlay, and stores of y.

// A slot's overlay at the launch's one site: `count` ids, ascending, and as many rows.
struct Overlay {
    uvec2 ids;
    uvec2 rows;
    uint count;
};

// Ids are padded to 16 bytes for the largest number of rows: contract::overlay_ids_bytes.
bool find_overlay(EnvelopeAt at, int slot, out Overlay overlay) {
    Adapter adapter;
    overlay = Overlay(uvec2(0u), uvec2(0u), 0u);
    if (!find(at, 0u, slot, adapter)) {
        return false;
    }
    uint ids_bytes = (at.envelope.params.max_rank * 4u + 15u) & ~15u;
    overlay = Overlay(adapter.matrix, add64(adapter.matrix, uvec2(ids_bytes, 0u)), adapter.rank);
    return true;
}

// Replaces a 2-byte element, whose word's other half may be another thread's: flips the bits that differ.
void set_half(uvec2 address, uint value) {
    Outputs at = Outputs(uvec2(address.x & ~3u, address.y));
    uint shift = (address.x & 2u) << 3;
    uint old = (at.word >> shift) & 0xffffu;
    atomicXor(at.word, (old ^ (value & 0xffffu)) << shift);
}

// y[0] = value, rounded once.
void set_output(uvec2 address, float value) {
    if (ACT == DTYPE_F32) {
        Outputs(address).word = floatBitsToUint(value);
        return;
    }
    set_half(address, encode(ACT, value));
}

// y[0] = values.x and, if `both`, y[1] = values.y, for two adjacent elements of one row.
void set_outputs(uvec2 address, vec2 values, bool both) {
    if (ACT != DTYPE_F32 && both && (address.x & 2u) == 0u) {
        // Both halves of the word are this thread's.
        Outputs(address).word = (encode(ACT, values.x) & 0xffffu) | encode(ACT, values.y) << 16;
        return;
    }
    set_output(address, values.x);
    if (both) {
        set_output(add64(address, uvec2(1u << log2_size(ACT), 0u)), values.y);
    }
}
