//! What a row must be: naive f64 arithmetic, and how far f32 arithmetic may stray from it.
//!
//! The bound of an output element is
//!
//! ```text
//! (k + rank + 3) * 2^-24 * (|y| + |scale| * sum_r |B[n][r]| * sum_k |A[r][k]| |x[k]|)  +  one ulp of y's type
//! ```
//!
//! with `k` = in_features; of a pair with vectors
//!
//! ```text
//! (k + rank + 6) * 2^-24 * (|y| + |row_scale| * (|gain - 1| |y| + |offset| + |site_scale * gain| * sum_r ...))  +  one ulp
//! ```
//!
//! Every f32 operation errs by at most 2^-24 of its result; a product that
//! reaches y passes through at most k roundings in z, rank in the sum over B, and three after it (the
//! product of the scales, the product with it, the addition to y), in any order of summation; with vectors six (two
//! products, the sums with offset, old y's part and y, and the row's scale; old y's part itself passes six). The
//! rounding to y's type is the ulp. A last term, below 1e-37 for ordinary values, allows for arithmetic
//! that flushes subnormals to zero, as WGSL permits.

use serde::Serialize;

use crate::dtype::DType;

/// Largest relative error of one f32 operation.
pub const EPS: f64 = 1.0 / (1u64 << 24) as f64;
/// Smallest normal f32: what flushing a subnormal to zero may lose.
const TINY: f64 = f32::MIN_POSITIVE as f64;
/// Mismatches that a [`Check`] keeps in full; all are counted.
const KEPT: usize = 8;

/// A site's pair as the oracle sees it: the exact values of the stored elements, without padding.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    /// `A[rank][in_features]`
    pub a: &'a [f32],
    /// `B[out_features][rank]`
    pub b: &'a [f32],
    /// Rows of A, columns of B.
    pub rank: usize,
    /// Columns of A.
    pub in_features: usize,
    /// Rows of B.
    pub out_features: usize,
}

/// Elements as they must be, and how far each may be off.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    /// The exact values; NaN or infinite where the operands make them so.
    pub want: Vec<f64>,
    /// The largest allowed difference; 0 where the arithmetic can be exact, in any order.
    pub bound: Vec<f64>,
}

/// One row at one site: z = A x in f64, kept for the expand.
#[derive(Clone, Debug)]
pub struct Oracle<'a> {
    pair: Pair<'a>,
    /// `sum_k A[r][k] x[k]`
    z: Vec<f64>,
    /// `sum_k |A[r][k]| |x[k]|`
    terms: Vec<f64>,
    /// What flushed subnormals may take from z.
    flushed: Vec<f64>,
}

impl<'a> Oracle<'a> {
    /// The shrink of `x[in_features]`.
    pub fn new(pair: Pair<'a>, x: &[f32]) -> Self {
        let (mut z, mut terms, mut flushed) = (Vec::new(), Vec::new(), Vec::new());
        let x = &x[..pair.in_features];
        let x_sum: f64 = x.iter().map(|x| f64::from(x.abs())).sum();
        for r in 0..pair.rank {
            let (mut sum, mut absolute, mut a_sum) = (0.0, 0.0, 0.0);
            for (a, x) in pair.a[r * pair.in_features..(r + 1) * pair.in_features].iter().zip(x) {
                let (a, x) = (f64::from(*a), f64::from(*x));
                let product = a * x;
                sum += product;
                absolute += product.abs();
                a_sum += a.abs();
            }
            z.push(sum);
            terms.push(absolute);
            flushed.push(TINY * (a_sum + x_sum + 2.0 * pair.in_features as f64));
        }
        Self { pair, z, terms, flushed }
    }

    /// z as a shrink must leave it in f32.
    ///
    /// `unit`: all products A*x are whole multiples of it, which makes sums of up to 2^24 units exact.
    pub fn shrink(&self, unit: Option<f64>) -> Expected {
        let mut out = Expected::default();
        for ((z, terms), flushed) in self.z.iter().zip(&self.terms).zip(&self.flushed) {
            let slack = self.pair.in_features as f64 * EPS * terms + flushed;
            out.push(*z, slack, *terms, DType::F32, unit);
        }
        out
    }

    /// `y[out_features] + scale * B z` as an expand must leave it in `act`.
    ///
    /// `scale`: the product of the site's and the row's. `unit`: y and all products scale*B*A*x are
    /// whole multiples of it, which makes sums of up to 2^24 units exact and leaves one rounding.
    pub fn expand(&self, y: &[f32], scale: f64, act: DType, unit: Option<f64>) -> Expected {
        self.expand_shaped(y, [scale, 1.0], None, act, unit)
    }

    /// `y + row_scale * ((gain - 1) * y + offset + site_scale * gain * B z)` as an expand must leave it in `act`.
    ///
    /// `scales`: the site's and the row's. `vectors`: `gain[out_features]` and `offset[out_features]`; none: as
    /// [`Oracle::expand`]. `unit`: y, the products of a row's scale with y's part and the offset, and all products
    /// row_scale*site_scale*gain*B*A*x are whole multiples of it.
    pub fn expand_shaped(
        &self,
        y: &[f32],
        scales: [f64; 2],
        vectors: Option<[&[f32]; 2]>,
        act: DType,
        unit: Option<f64>,
    ) -> Expected {
        let mut out = Expected::default();
        let [site_scale, row_scale] = scales;
        let roundings = (self.pair.in_features + self.pair.rank + if vectors.is_some() { 6 } else { 3 }) as f64;
        for (n, y) in y[..self.pair.out_features].iter().enumerate() {
            let (mut sum, mut absolute, mut flushed) = (0.0, 0.0, 0.0);
            for (r, b) in self.pair.b[n * self.pair.rank..(n + 1) * self.pair.rank].iter().enumerate() {
                let b = f64::from(*b);
                sum += b * self.z[r];
                absolute += b.abs() * self.terms[r];
                flushed += b.abs() * (self.flushed[r] + TINY) + TINY * (self.terms[r] + 2.0);
            }
            let y = f64::from(*y);
            let [gain, offset] = vectors.map_or([1.0, 0.0], |v| v.map(|values| f64::from(values[n])));
            let scale = site_scale * gain * row_scale;
            // A gain of 1 has no part in y: 0 of an infinity would be NaN.
            let of_y = if gain == 1.0 { 0.0 } else { (gain - 1.0) * y };
            let change = row_scale * (of_y + offset);
            let terms = y.abs() + row_scale.abs() * (of_y.abs() + offset.abs()) + scale.abs() * absolute;
            let mut slack = roundings * EPS * terms + scale.abs() * flushed + TINY * (absolute + 4.0);
            if vectors.is_some() {
                slack += TINY * row_scale.abs() * ((gain - 1.0).abs() + absolute + 4.0);
            }
            out.push(y + change + scale * sum, slack, terms, act, unit);
        }
        out
    }
}

/// A sum of products in f64, and how far f32 may stray from it.
pub(super) fn dot(a: &[f32], x: &[f32], act: DType) -> Expected {
    let products = a.iter().zip(x).map(|(a, x)| f64::from(*a) * f64::from(*x));
    let (mut sum, mut terms) = (0.0, 0.0);
    products.for_each(|product| {
        sum += product;
        terms += product.abs();
    });
    let tiny = f64::from(f32::MIN_POSITIVE) * (2.0 * a.len() as f64 + 2.0);
    Expected { want: vec![sum], bound: vec![(a.len() + 1) as f64 * EPS * terms + tiny + act.ulp(sum)] }
}

impl Expected {
    fn push(&mut self, value: f64, slack: f64, terms: f64, act: DType, unit: Option<f64>) {
        if unit.is_some_and(|unit| terms <= unit / EPS) {
            self.want.push(act.round(value as f32).into());
            self.bound.push(0.0);
        } else {
            self.want.push(value);
            self.bound.push(slack + act.ulp(value));
        }
    }
}

/// An element outside its bound.
#[derive(Clone, Debug, Serialize)]
pub struct Mismatch {
    /// What was checked: a site, or a part of memory that had to keep its bits.
    pub site: String,
    /// Row of the batch.
    pub row: usize,
    /// Element of the row.
    pub column: usize,
    /// What the device wrote.
    pub got: f32,
    /// What it should be.
    pub want: f64,
    /// How far off it might have been.
    pub bound: f64,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { site, row, column, got, want, bound } = self;
        write!(f, "{site} row {row} column {column}: got {got:?} ({:#010x}), want {want:?}", got.to_bits())?;
        if *bound > 0.0 { write!(f, " within {bound:.3e}") } else { write!(f, " exactly") }
    }
}

/// The result of comparing many elements.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Check {
    /// Elements compared.
    pub elements: u64,
    /// Largest error as a part of its bound; 1 is the most that passes.
    #[serde(rename = "worst_error_over_bound")]
    pub worst: f64,
    /// Elements outside their bound.
    pub mismatches: u64,
    /// The first few of them.
    pub first: Vec<Mismatch>,
}

impl Check {
    /// Whether every element was within its bound.
    pub fn passed(&self) -> bool {
        self.mismatches == 0
    }

    /// Compares one row of elements of type `act`.
    pub fn row(&mut self, site: &str, row: usize, act: DType, expected: &Expected, got: &[f32]) {
        for (column, ((want, bound), got)) in expected.want.iter().zip(&expected.bound).zip(got).enumerate() {
            self.elements += 1;
            let ratio = error_over_bound(act, *want, *bound, *got);
            if ratio <= 1.0 {
                self.worst = self.worst.max(ratio);
            } else {
                self.mismatch(Mismatch { site: site.into(), row, column, got: *got, want: *want, bound: *bound });
            }
        }
        if got.len() != expected.want.len() {
            let want = expected.want.len() as f64;
            self.mismatch(Mismatch {
                site: format!("{site}: number of elements"),
                row,
                column: 0,
                got: got.len() as f32,
                want,
                bound: 0.0,
            });
        }
    }

    /// Compares elements of type `act` that had to keep their bits, or to get those of another run.
    pub fn bits(&mut self, site: &str, row: usize, act: DType, want: &[u8], got: &[u8]) {
        let size = act.size() as usize;
        self.elements += (want.len() / size) as u64;
        if want == got {
            return;
        }
        for (column, (w, g)) in want.chunks(size).zip(got.chunks(size)).enumerate().filter(|(_, (w, g))| w != g) {
            let value = |bytes: &[u8]| act.decode(bytes).first().copied().unwrap_or(f32::NAN);
            let want = value(w).into();
            self.mismatch(Mismatch { site: site.into(), row, column, got: value(g), want, bound: 0.0 });
        }
        if want.len() != got.len() {
            let (site, want) = (format!("{site}: number of bytes"), want.len() as f64);
            self.mismatch(Mismatch { site, row, column: 0, got: got.len() as f32, want, bound: 0.0 });
        }
    }

    /// Counts a mismatch.
    pub fn mismatch(&mut self, mismatch: Mismatch) {
        self.mismatches += 1;
        if self.first.len() < KEPT {
            self.first.push(mismatch);
        }
    }

    /// Adds another check's results to this one's.
    pub fn merge(&mut self, other: Check) {
        self.elements += other.elements;
        self.worst = self.worst.max(other.worst);
        self.mismatches += other.mismatches;
        self.first.extend(other.first.into_iter().take(KEPT.saturating_sub(self.first.len())));
    }
}

/// `|got - want| / bound`, infinite for anything that no rounding explains.
fn error_over_bound(act: DType, want: f64, bound: f64, got: f32) -> f64 {
    let got = f64::from(got);
    if !want.is_finite() || !bound.is_finite() {
        // An overflowing or NaN operand: which of the non-finite values comes out may depend on the order.
        return if got.is_finite() { f64::INFINITY } else { 0.0 };
    }
    if got.is_infinite() {
        // Due from half an ulp past the largest value on: what counts is how far the exact value is from there.
        let overflow = largest(act) + act.ulp(largest(act)) / 2.0;
        let short = (overflow - want * got.signum()).max(0.0);
        return if short == 0.0 { 0.0 } else { short / bound };
    }
    let error = (got - want).abs();
    match () {
        () if error == 0.0 => 0.0,
        () if error.is_nan() || bound == 0.0 => f64::INFINITY,
        () => error / bound,
    }
}

/// Largest finite value of a type.
fn largest(act: DType) -> f64 {
    match act {
        DType::F32 => f32::MAX.into(),
        DType::F16 => half::f16::MAX.to_f64(),
        DType::Bf16 => half::bf16::MAX.to_f64(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIR: Pair<'static> = Pair {
        a: &[1.0, 2.0, -3.0, 0.5],
        b: &[1.0, -1.0, 2.0, 4.0, 0.25, 8.0],
        rank: 2,
        in_features: 2,
        out_features: 3,
    };

    #[test]
    fn a_row_worked_out_by_hand_has_its_value_and_its_bound() {
        let oracle = Oracle::new(PAIR, &[2.0, -4.0]);
        assert_eq!(oracle.z, [-6.0, -8.0]);
        assert_eq!(oracle.terms, [10.0, 8.0]);
        let y = oracle.expand(&[1.0, 0.0, -3.0], 0.5, DType::F32, None);
        assert_eq!(y.want, [2.0, -22.0, -35.75]);
        let terms = [1.0 + 0.5 * 18.0, 0.5 * 52.0, 3.0 + 0.5 * 66.5];
        for (n, bound) in y.bound.iter().enumerate() {
            let stated = 7.0 * EPS * terms[n] + DType::F32.ulp(y.want[n]);
            assert!((bound - stated).abs() < 1e-30, "{bound} {stated}");
        }
    }

    #[test]
    fn a_shaped_row_worked_out_by_hand_has_its_value_and_its_bound() {
        let oracle = Oracle::new(PAIR, &[2.0, -4.0]);
        let vectors = Some([&[1.0, 0.5, -2.0][..], &[3.0, 0.0, -1.0][..]]);
        let y = oracle.expand_shaped(&[f32::INFINITY, 4.0, -3.0], [0.5, 2.0], vectors, DType::F32, None);
        // B z is 2, -44, -65.5.
        assert_eq!(y.want, [f64::INFINITY, 4.0 + 2.0 * (-2.0 - 11.0), -3.0 + 2.0 * (9.0 - 1.0 + 65.5)]);
        let terms = 4.0 + 2.0 * (2.0 + 0.5 * 0.5 * 52.0);
        assert!((y.bound[1] - (10.0 * EPS * terms + DType::F32.ulp(y.want[1]))).abs() < 1e-30);
    }

    #[test]
    fn values_on_a_grid_leave_no_room_but_the_one_rounding() {
        let y = Oracle::new(PAIR, &[2.0, -4.0]).expand(&[1.0, 0.0, -3.0], 0.5, DType::Bf16, Some(1.0 / 16.0));
        assert_eq!(y.want, [2.0, -22.0, f64::from(DType::Bf16.round(-35.75))]);
        assert_eq!(y.bound, [0.0; 3]);
    }

    #[test]
    fn an_element_one_ulp_beyond_its_bound_is_found_and_located() {
        let mut check = Check::default();
        let expected = Expected { want: vec![1.0, 2.0], bound: vec![0.5, 0.5] };
        check.row("q", 3, DType::F32, &expected, &[1.5, 2.5 + 2.0 * f32::EPSILON]);
        assert_eq!((check.elements, check.mismatches, check.worst), (2, 1, 1.0));
        assert_eq!((check.first[0].row, check.first[0].column), (3, 1));
        check.bits("q", 4, DType::F16, &[0, 1, 0, 2], &[0, 1, 0, 3]);
        assert_eq!((check.elements, check.mismatches), (4, 2));
        assert_eq!((check.first[1].row, check.first[1].column), (4, 1));
    }

    #[test]
    fn nan_and_saturation_never_pass_for_numbers_and_overflow_passes_only_where_it_is_due() {
        let at = |want, got| error_over_bound(DType::F16, want, 32.0, got);
        assert_eq!(at(1.0, f32::NAN), f64::INFINITY);
        assert!(at(1.0, f32::INFINITY) > 1.0);
        assert_eq!(at(70_000.0, f32::INFINITY), 0.0);
        assert_eq!(at(65_504.0, f32::INFINITY), 0.5);
        assert!(at(65_400.0, f32::INFINITY) > 1.0 && at(70_000.0, f32::NEG_INFINITY) > 1.0);
        assert!(at(70_000.0, 65_504.0) > 1.0);
        assert_eq!(at(f64::NAN, 0.0), f64::INFINITY);
        assert_eq!(at(f64::NAN, f32::NAN), 0.0);
    }
}
