// The operands of the shrink kernels: x is read, z is written.

@group(0) @binding(3) var<storage, read> x: array<u32>;
@group(0) @binding(4) var<storage, read_write> z: array<f32>;

// The row of x that row `row` of the launch reads; NO_ROW: zeros.
fn x_row(row: u32) -> u32 {
    let x_rows_at = envelope.params.x_rows_at;
    if x_rows_at == 0u {
        return row;
    }
    let named = batch[origin(0u) / 4u + x_rows_at + envelope.params.row_first + row];
    return select(NO_ROW, named, named < envelope.params.x_rows);
}

// Element `k` of row `row` of x.
fn x_value(row: u32, k: u32) -> f32 {
    let element = row * envelope.params.x_stride + k;
    if ACT == DTYPE_F32 {
        return bitcast<f32>(x[origin(3u) / 4u + element]);
    }
    let at = origin(3u) / 2u + element;
    return half_value(ACT, (x[at / 2u] >> (16u * (at & 1u))) & 0xffffu);
}

// Chunk `chunk` of row `row` of x, with zeros from in_features on.
fn x_chunk(row: u32, chunk: u32) -> Eight {
    let k = chunk * CHUNK;
    let width = envelope.params.in_features;
    var out: Eight;
    if k + CHUNK > width {
        // Past the row's end lies another row, or nothing.
        for (var i = 0u; i < CHUNK / 2u; i++) {
            if k + i < width {
                out.lo[i] = x_value(row, k + i);
            }
            if k + 4u + i < width {
                out.hi[i] = x_value(row, k + 4u + i);
            }
        }
        return out;
    }
    let element = row * envelope.params.x_stride + k;
    if ACT == DTYPE_F32 {
        let at = origin(3u) / 4u + element;
        out.lo = bitcast<vec4<f32>>(vec4<u32>(x[at], x[at + 1u], x[at + 2u], x[at + 3u]));
        out.hi = bitcast<vec4<f32>>(vec4<u32>(x[at + 4u], x[at + 5u], x[at + 6u], x[at + 7u]));
        return out;
    }
    let half = origin(3u) / 2u + element;
    let at = half / 2u;
    var words = vec4<u32>(x[at], x[at + 1u], x[at + 2u], x[at + 3u]);
    if (half & 1u) == 1u {
        let next = vec4<u32>(words.yzw, x[at + 4u]);
        words = (words >> vec4<u32>(16u)) | (next << vec4<u32>(16u));
    }
    out.lo = vec4<f32>(pair_values(ACT, words.x), pair_values(ACT, words.y));
    out.hi = vec4<f32>(pair_values(ACT, words.z), pair_values(ACT, words.w));
    return out;
}

// Where z of `row` and rank `r` lies.
fn z_index(site: SiteParams, row: u32, r: u32) -> u32 {
    return origin(4u) / 4u + row * envelope.params.z_stride + site.z_offset + r;
}
