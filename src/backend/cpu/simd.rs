//! The inner loops, compiled once for each vector unit and picked at run time.
//!
//! They are plain loops over fixed-size arrays which the compiler vectorises: lanes are independent
//! sums, multiplied and added (never fused) in one order, so every vector unit gives the same bits.

use fearless_simd::{Level, dispatch};
use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::dtype::DType;

/// Independent sums of a dot product: term `k` goes to sum `k % LANES`.
pub(super) const LANES: usize = 16;

/// Outputs that [`accumulate`] takes at a time.
pub(super) const OUTPUTS: usize = 32;

/// The vector unit of this processor.
pub(super) fn level() -> Level {
    Level::new()
}

/// `bytes`, whole elements of `dtype`, as f32: in place where they are, in `buffer` otherwise. Exact.
pub(super) fn widen<'a>(level: Level, dtype: DType, bytes: &'a [u8], buffer: &'a mut [f32]) -> &'a [f32] {
    if dtype == DType::F32 {
        return bytemuck::cast_slice(bytes);
    }
    let out = &mut buffer[..bytes.len() / 2];
    if dtype == DType::F16 {
        bytemuck::cast_slice::<u8, f16>(bytes).convert_to_f32_slice(out);
    } else {
        dispatch!(level, _ => widen_bf16(bytemuck::cast_slice(bytes), out));
    }
    out
}

#[inline(always)]
fn widen_bf16(from: &[u16], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = bf16_value(*from);
    }
}

/// The value of a bfloat16.
#[inline(always)]
fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds `values` to `dtype`, to nearest and ties to even, each at the same index of `out`.
pub(super) fn narrow(level: Level, dtype: DType, values: &[f32], out: &mut [u8]) {
    match dtype {
        DType::F32 => out.copy_from_slice(bytemuck::cast_slice(values)),
        DType::F16 => bytemuck::cast_slice_mut::<u8, f16>(out).convert_from_f32_slice(values),
        DType::Bf16 => dispatch!(level, _ => narrow_bf16(values, bytemuck::cast_slice_mut(out))),
    }
}

#[inline(always)]
fn narrow_bf16(from: &[f32], to: &mut [u16]) {
    for (to, from) in to.iter_mut().zip(from) {
        let bits = from.to_bits();
        // Rounding up may carry into the exponent, up to infinity, as it should.
        let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1))) >> 16;
        let nan = bits >> 16 | 0x40;
        *to = if from.is_nan() { nan } else { rounded } as u16;
    }
}

/// Adds the products of `x` with each of `rows`, all of one length, to that row's lanes.
/// Lengths but the last must be multiples of [`LANES`] for the order of the sums to hold.
pub(super) fn dot<const N: usize>(level: Level, x: &[f32], rows: [&[f32]; N], sums: &mut [[f32; LANES]]) {
    dispatch!(level, _ => dot_lanes(x, rows, sums));
}

#[inline(always)]
fn dot_lanes<const N: usize>(x: &[f32], rows: [&[f32]; N], sums: &mut [[f32; LANES]]) {
    let (x, x_rest) = x.as_chunks::<LANES>();
    let rows = rows.map(|row| {
        let (row, rest) = row.as_chunks::<LANES>();
        (&row[..x.len()], &rest[..x_rest.len()])
    });
    let mut lanes: [[f32; LANES]; N] = std::array::from_fn(|i| sums[i]);
    for k in 0..x.len() {
        for n in 0..N {
            for lane in 0..LANES {
                lanes[n][lane] += x[k][lane] * rows[n].0[k][lane];
            }
        }
    }
    for n in 0..N {
        for lane in 0..x_rest.len() {
            lanes[n][lane] += x_rest[lane] * rows[n].1[lane];
        }
    }
    sums[..N].copy_from_slice(&lanes);
}

/// The sum of the lanes, as a tree.
pub(super) fn total(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Turns the first `depth` elements of `count` rows of `matrix`, `stride` elements apart, into f32
/// columns: `out[r][row]`.
pub(super) fn transpose(
    level: Level,
    dtype: DType,
    matrix: &[u8],
    [count, stride, depth]: [usize; 3],
    out: &mut [[f32; OUTPUTS]],
) {
    let shape = [count, stride, depth];
    match dtype {
        DType::F32 => dispatch!(level, _ => transpose_by(bytemuck::cast_slice(matrix), shape, out, |v: f32| v)),
        DType::F16 => dispatch!(level, _ => transpose_by(bytemuck::cast_slice(matrix), shape, out, f16_value)),
        DType::Bf16 => dispatch!(level, _ => transpose_by(bytemuck::cast_slice(matrix), shape, out, bf16_value)),
    }
}

#[inline(always)]
fn transpose_by<T: Copy>(
    matrix: &[T],
    [count, stride, depth]: [usize; 3],
    out: &mut [[f32; OUTPUTS]],
    value: impl Fn(T) -> f32,
) {
    for n in 0..count {
        for (column, v) in out.iter_mut().zip(&matrix[n * stride..][..depth]) {
            column[n] = value(*v);
        }
    }
}

/// The value of an IEEE binary16, without branches.
#[inline(always)]
fn f16_value(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let (sign, magnitude) = ((bits & 0x8000) << 16, bits & 0x7fff);
    // Exponents are 15 apart from f32's 127; the largest stays the largest (infinity, NaN).
    let bias = if magnitude >= 0x7c00 { 224 << 23 } else { 112 << 23 };
    let normal = (magnitude << 13) + bias;
    let subnormal = (magnitude as f32 * f32::from_bits(0x3380_0000)).to_bits();
    f32::from_bits(sign | if magnitude < 0x400 { subnormal } else { normal })
}

/// Adds `sum_r columns[r] * z[r]` to `sums`, `r` ascending.
pub(super) fn accumulate(level: Level, columns: &[[f32; OUTPUTS]], z: &[f32], sums: &mut [f32; OUTPUTS]) {
    dispatch!(level, _ => accumulate_columns(columns, z, sums));
}

#[inline(always)]
fn accumulate_columns(columns: &[[f32; OUTPUTS]], z: &[f32], sums: &mut [f32; OUTPUTS]) {
    let mut acc = *sums;
    for (column, z) in columns.iter().zip(z) {
        for n in 0..OUTPUTS {
            acc[n] += column[n] * z;
        }
    }
    *sums = acc;
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn every_f16_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (found, expected) = (f16_value(bits), f16::from_bits(bits).to_f32());
            assert!(found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(), "{bits:#x}");
        }
    }

    #[test]
    fn bf16_and_f16_are_rounded_as_the_half_crate_does() {
        let mut values: Vec<f32> = (0..u32::MAX).step_by(65_521).map(f32::from_bits).collect();
        // Halfway between two neighbours, and next to that.
        values.extend(
            (0..=u16::MAX).flat_map(|b| [0x7fff, 0x8000, 0x8001].map(|l| f32::from_bits(u32::from(b) << 16 | l))),
        );
        let mut out = vec![0u16; values.len()];
        narrow(level(), DType::Bf16, &values, bytemuck::cast_slice_mut(&mut out));
        for (value, bits) in values.iter().zip(&out) {
            assert_eq!(*bits, bf16::from_f32(*value).to_bits(), "{value:e}");
        }
        narrow(level(), DType::F16, &values, bytemuck::cast_slice_mut(&mut out));
        for (value, bits) in values.iter().zip(&out) {
            let found = f16::from_bits(*bits);
            assert!(
                found.to_bits() == f16::from_f32(*value).to_bits() || found.is_nan() && value.is_nan(),
                "{value:e}"
            );
        }
    }

    #[test]
    fn a_dot_product_in_blocks_has_the_bits_of_one_in_one_piece() {
        let x: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.37).sin()).collect();
        let w: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.11).cos()).collect();
        let mut whole = [[0.0; LANES]];
        dot(level(), &x, [&w], &mut whole);
        let mut blocks = [[0.0; LANES]];
        for (x, w) in x.chunks(16 * 7).zip(w.chunks(16 * 7)) {
            dot(level(), x, [w], &mut blocks);
        }
        let mut fallback = [[0.0; LANES]];
        dot_lanes(&x, [&w], &mut fallback);
        assert_eq!(whole, blocks);
        assert_eq!(whole, fallback);
    }
}
