//! The inner loops, compiled once for each vector unit and picked at run time.
//!
//! All are `#[inline(always)]`, so that they belong to the `dispatch!` that calls them: one call for
//! each piece of work, none inside it. Sums run in lanes whose number and order are fixed here, and terms
//! are multiplied and added, never fused: every vector unit gives the same bits.

use bytemuck::Pod;
use fearless_simd::prelude::*;
use fearless_simd::{Level, f32x16};

use crate::dtype::DType;

/// Independent sums of [`dot`]: term `k` goes to sum `k % LANES`.
pub(super) const LANES: usize = 16;

/// Independent sums of [`project`]: term `r` goes to sum `r % CHUNK`.
pub(super) const CHUNK: usize = 8;

/// Outputs that [`pack`] and [`project`] take at a time.
pub(super) const OUTPUTS: usize = 32;

/// Ranks `CHUNK * c..CHUNK * (c + 1)` of [`OUTPUTS`] rows of B.
pub(super) type Packed = [[f32; CHUNK]; OUTPUTS];

/// The vector unit of this processor.
pub(super) fn level() -> Level {
    Level::new()
}

/// `bytes`, whole elements of `dtype`, as f32: in place where they are, in `buffer` otherwise. Exact.
#[inline(always)]
pub(super) fn widen<'a>(dtype: DType, bytes: &'a [u8], buffer: &'a mut [f32]) -> &'a [f32] {
    match dtype {
        DType::F32 => bytemuck::cast_slice(bytes),
        DType::F16 => widen_by(bytes, buffer, f16_value),
        DType::Bf16 => widen_by(bytes, buffer, bf16_value),
    }
}

#[inline(always)]
fn widen_by<'a>(bytes: &[u8], buffer: &'a mut [f32], value: impl Fn(u16) -> f32) -> &'a [f32] {
    let from: &[u16] = bytemuck::cast_slice(bytes);
    let out = &mut buffer[..from.len()];
    for (out, from) in out.iter_mut().zip(from) {
        *out = value(*from);
    }
    out
}

/// The value of a bfloat16.
#[inline(always)]
fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The value of an IEEE binary16, without branches.
#[inline(always)]
fn f16_value(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let (sign, magnitude) = ((bits & 0x8000) << 16, bits & 0x7fff);
    // Exponents are 15 apart from f32's 127; the largest stays the largest (infinity, NaN).
    let bias = if magnitude >= 0x7c00 { 224 << 23 } else { 112 << 23 };
    let normal = (magnitude << 13) + bias;
    // Below that, multiples of 2^-24.
    let subnormal = (magnitude as i32 as f32 * f32::from_bits(103 << 23)).to_bits();
    f32::from_bits(sign | if magnitude < 0x400 { subnormal } else { normal })
}

/// Rounds `values` to `dtype`, to nearest and ties to even, each at the same index of `out`.
#[inline(always)]
pub(super) fn narrow(dtype: DType, values: &[f32], out: &mut [u8]) {
    match dtype {
        DType::F32 => out.copy_from_slice(bytemuck::cast_slice(values)),
        DType::F16 => narrow_by(values, out, f16_bits),
        DType::Bf16 => narrow_by(values, out, bf16_bits),
    }
}

#[inline(always)]
fn narrow_by(values: &[f32], out: &mut [u8], bits: impl Fn(f32) -> u16) {
    for (out, value) in bytemuck::cast_slice_mut(out).iter_mut().zip(values) {
        *out = bits(*value);
    }
}

/// The bfloat16 next to `value`.
#[inline(always)]
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    // Rounding up may carry into the exponent, up to infinity, as it should.
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let nan = bits >> 16 | 0x40;
    (if value.is_nan() { nan } else { rounded }) as u16
}

/// The IEEE binary16 next to `value`, without branches.
#[inline(always)]
fn f16_bits(value: f32) -> u16 {
    let (sign, magnitude) = (value.to_bits() >> 16 & 0x8000, value.to_bits() & 0x7fff_ffff);
    // As for bfloat16, the carry included: 65,520 and above become infinity.
    let normal = magnitude.wrapping_add(0xfff + (magnitude >> 13 & 1)).wrapping_sub(112 << 23) >> 13;
    // Beside 0.5 an f32 has steps of 2^-24, binary16's smallest: the addition rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let special = if magnitude > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
    let finite = if magnitude < 113 << 23 { subnormal } else { normal };
    (sign | if magnitude >= 143 << 23 { special } else { finite }) as u16
}

/// Adds the products of `x` with each of `rows`, all of one length, to that row's lanes.
/// All blocks of a sum but its last must be multiples of [`LANES`] long, for the order to hold.
#[inline(always)]
pub(super) fn dot<S: Simd, const N: usize>(simd: S, x: &[f32], rows: [&[f32]; N], sums: &mut [[f32; LANES]]) {
    let (x, x_rest) = x.as_chunks::<LANES>();
    let mut whole: [&[[f32; LANES]]; N] = [&[]; N];
    let mut rest: [&[f32]; N] = [&[]; N];
    for n in 0..N {
        (whole[n], rest[n]) = rows[n].as_chunks();
        (whole[n], rest[n]) = (&whole[n][..x.len()], &rest[n][..x_rest.len()]);
    }
    let sums = &mut sums[..N];
    let mut lanes: [f32x16<S>; N] = std::array::from_fn(|n| sums[n].simd_into(simd));
    for (k, x) in x.iter().enumerate() {
        let x: f32x16<S> = (*x).simd_into(simd);
        for n in 0..N {
            let row: f32x16<S> = whole[n][k].simd_into(simd);
            lanes[n] += x * row;
        }
    }
    for (n, sums) in sums.iter_mut().enumerate() {
        *sums = lanes[n].into();
        for ((sum, x), row) in sums.iter_mut().zip(x_rest).zip(rest[n]) {
            *sum += x * row;
        }
    }
}

/// The sum of the lanes, as a tree.
#[inline(always)]
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

/// Widens the first `depth` elements of `count` rows of B, `stride` elements apart; ranks from `depth`
/// to the end of their chunk become 0, outputs from `count` on keep what was there.
#[inline(always)]
pub(super) fn pack(dtype: DType, b: &[u8], shape: [usize; 3], out: &mut [Packed]) {
    match dtype {
        DType::F32 => pack_by(b, shape, out, |v: f32| v),
        DType::F16 => pack_by(b, shape, out, f16_value),
        DType::Bf16 => pack_by(b, shape, out, bf16_value),
    }
}

#[inline(always)]
fn pack_by<T: Pod>(b: &[u8], [count, stride, depth]: [usize; 3], out: &mut [Packed], value: impl Fn(T) -> f32) {
    let b: &[T] = bytemuck::cast_slice(b);
    for (c, out) in out.iter_mut().enumerate() {
        let first = c * CHUNK;
        for (n, out) in out.iter_mut().enumerate().take(count) {
            let row = &b[n * stride + first..];
            *out = match row.first_chunk::<CHUNK>() {
                Some(chunk) if first + CHUNK <= depth => std::array::from_fn(|lane| value(chunk[lane])),
                _ => std::array::from_fn(|lane| if first + lane < depth { value(row[lane]) } else { 0.0 }),
            };
        }
    }
}

/// `sum_r b[n][r] * z[r]` for each output `n`; `z` in chunks as `b` is, padded with 0.
#[inline(always)]
pub(super) fn project<S: Simd>(simd: S, b: &[Packed], z: &[[f32; CHUNK]]) -> [f32; OUTPUTS] {
    const HALF: usize = OUTPUTS / 2;
    let mut out = [0.0; OUTPUTS];
    for (half, out) in out.as_chunks_mut::<HALF>().0.iter_mut().enumerate() {
        // Two outputs to a vector, side by side.
        let mut lanes = [f32x16::splat(simd, 0.0); CHUNK];
        for (b, z) in b.iter().zip(z) {
            let z: [f32; LANES] = bytemuck::cast([*z, *z]);
            let z: f32x16<S> = z.simd_into(simd);
            let b: &[[f32; LANES]; CHUNK] = bytemuck::cast_ref(&b.as_chunks::<HALF>().0[half]);
            for n in 0..CHUNK {
                let b: f32x16<S> = b[n].simd_into(simd);
                lanes[n] += b * z;
            }
        }
        // Each step adds neighbouring lanes of two vectors and puts them in one.
        let add = |a: f32x16<S>, b: f32x16<S>| simd.unzip_low_f32x16(a, b) + simd.unzip_high_f32x16(a, b);
        let [a, b, c, d, e, f, g, h] = lanes;
        *out = add(add(add(a, b), add(c, d)), add(add(e, f), add(g, h))).into();
    }
    out
}

/// Turns each of `sums` into what a row with vectors makes of `y`: `y + row_scale * ((gain - 1) * y + offset +
/// site_scale * gain * sum)`, without the term in y where the gain is 1.
#[inline(always)]
pub(super) fn shape(sums: &mut [f32], y: &[f32], [gain, offset]: [&[f32]; 2], [site_scale, row_scale]: [f32; 2]) {
    for (((sum, y), gain), offset) in sums.iter_mut().zip(y).zip(gain).zip(offset) {
        let of_y = if *gain == 1.0 { 0.0 } else { (gain - 1.0) * y };
        *sum = y + row_scale * (of_y + (offset + site_scale * gain * *sum));
    }
}

#[cfg(test)]
mod tests {
    use fearless_simd::dispatch;
    use half::{bf16, f16};

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
        let same = |value: f32| {
            let (found, expected) = (bf16_bits(value), bf16::from_f32(value).to_bits());
            assert_eq!(found, expected, "bf16 of {value:e}");
            let (found, expected) = (f16::from_bits(f16_bits(value)), f16::from_f32(value));
            assert!(found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(), "f16 of {value:e}");
        };
        (0..u32::MAX).step_by(1021).map(f32::from_bits).for_each(same);
        // Values of either type, halfway between two neighbours, and next to both.
        for bits in 0..=u16::MAX {
            let (bf16, f16) = (u32::from(bits) << 16, f16::from_bits(bits).to_f32().to_bits());
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                same(f32::from_bits(bf16 | low));
            }
            for low in [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff] {
                same(f32::from_bits(f16.wrapping_add(low)));
            }
            // Halfway between subnormals of binary16.
            same(f32::from(bits) * 2f32.powi(-25));
        }
    }

    #[test]
    fn every_vector_unit_gives_the_same_bits() {
        let wave = |len: usize, step: f32| -> Vec<f32> { (0..len).map(|i| (i as f32 * step).sin()).collect() };
        let (x, w) = (wave(1003, 0.37), wave(1003, 0.11));
        let mut b = vec![[[0.0; CHUNK]; OUTPUTS]; 3];
        pack(DType::F32, bytemuck::cast_slice(&wave(OUTPUTS * 20, 0.07)), [OUTPUTS, 20, 20], &mut b);
        let z: [[f32; CHUNK]; 3] = bytemuck::cast_slice(&wave(24, 0.9)).try_into().unwrap();
        let mut found = Vec::new();
        for level in [level(), Level::baseline()] {
            let mut whole = [[0.0; LANES]];
            dispatch!(level, simd => dot(simd, &x, [&w], &mut whole));
            let mut blocks = [[0.0; LANES]];
            for (x, w) in x.chunks(16 * 7).zip(w.chunks(16 * 7)) {
                dispatch!(level, simd => dot(simd, x, [w], &mut blocks));
            }
            assert_eq!(whole, blocks, "in blocks");
            found.push((whole, dispatch!(level, simd => project(simd, &b, &z))));
        }
        assert_eq!(found[0], found[1]);
        let expected: f64 = x.iter().zip(&w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
        assert!((f64::from(total(found[0].0[0])) - expected).abs() < 1e-4);
        for (n, found) in found[0].1.iter().enumerate().take(OUTPUTS) {
            let expected: f64 =
                (0..24).map(|r| f64::from(b[r / CHUNK][n][r % CHUNK]) * f64::from(z[r / CHUNK][r % CHUNK])).sum();
            assert!((f64::from(*found) - expected).abs() < 1e-5, "output {n}");
        }
    }
}
