//! Norms of the rows of a base's weight with a delta in it, `|W + scale * B A|`, in f64.
//!
//! W is read a few rows at a time, by several threads; neither it nor the product is ever in memory whole.

use std::ops::Range;

use rayon::prelude::*;

use super::base::{BaseModel, Linear};
use super::base_weights::Weight;
use super::fused::{self, Place};
use super::reject::{Code, Loaded, Reject};
use super::weights::HostPair;

/// Rows that a thread takes at a time: so often is a part of A used while it is in cache.
const ROWS: usize = 8;
/// Columns that are worked on at a time.
const COLUMNS: usize = 256;
/// Rows of A that are added at a time.
const RANKS: usize = 4;

/// What DoRA needs to know of a linear's rows.
pub(super) struct Rows {
    /// `|W[n] + scale * B[n] A|`
    pub norms: Vec<f64>,
    /// The linear's own bias.
    pub bias: Option<Vec<f64>>,
}

/// The rows of the base that `pair` is for. `at`: what needs them, for messages.
pub(super) fn rows(at: &str, base: &BaseModel, pair: &HostPair, scale: f64) -> Loaded<Rows> {
    let path = &pair.site.path;
    let mut runs: Vec<(&Linear, Range<usize>)> = Vec::new();
    match base.linear(path) {
        Some(linear) => runs.push((linear, 0..linear.out_features)),
        None => match fused::place(base, path)? {
            Some(Place::Rows(linear, rows)) => runs.push((linear, rows)),
            Some(Place::Over(linears)) => runs.extend(linears.into_iter().map(|l| (l, 0..l.out_features))),
            None => {}
        },
    }
    let outputs: usize = runs.iter().map(|(_, rows)| rows.len()).sum();
    if outputs != pair.out_features() {
        let message = format!("{at}: {} has {outputs} rows at {path}, expected {}", base.source(), pair.out_features());
        return Err(Reject::new(Code::BaseShape, message));
    }
    let a: Vec<f64> = pair.a.values().into_iter().map(f64::from).collect();
    let b: Vec<f64> = pair.b.values().into_iter().map(|b| scale * f64::from(b)).collect();
    let mut norms = vec![0.0; outputs];
    let mut biases = Vec::new();
    let mut first = 0;
    for (linear, rows) in runs {
        let Some(weight) = Weight::open(base, linear)? else {
            let message = format!(
                "{at}: DoRA is relative to the base's weights, and {} has none of {} as F32, F16, BF16 or F64: give the \
                 directory of the base and its safetensors (--base), or the weights that a quantised base computes with \
                 (BaseModel::with_weights)",
                base.source(),
                linear.site.path
            );
            return Err(Reject::new(Code::Dora, message));
        };
        let count = rows.len();
        let b = &b[first * pair.rank()..(first + count) * pair.rank()];
        norms[first..first + count].par_chunks_mut(ROWS).enumerate().try_for_each(|(block, norms)| {
            let b = &b[block * ROWS * pair.rank()..][..norms.len() * pair.rank()];
            norms_of(&weight, rows.start + block * ROWS, [&a, b], pair.rank(), norms)
        })?;
        let bias = weight.bias(base, linear)?;
        biases.push(bias.map(|bias| bias[rows.clone()].to_vec()).ok_or(count));
        first += count;
    }
    let any = biases.iter().any(Result::is_ok);
    let bias = biases.into_iter().flat_map(|bias| bias.unwrap_or_else(|count| vec![0.0; count]));
    Ok(Rows { norms, bias: any.then(|| bias.collect()) })
}

/// Norms of rows `first..` of W with the delta in them; `B[n]` is scaled.
fn norms_of(weight: &Weight<'_>, first: usize, [a, b]: [&[f64]; 2], rank: usize, norms: &mut [f64]) -> Loaded<()> {
    let width = a.len() / rank.max(1);
    let mut rows = vec![0.0; norms.len() * width];
    weight.rows(first, &mut rows)?;
    for columns in (0..width).step_by(COLUMNS).map(|start| start..width.min(start + COLUMNS)) {
        for (row, b) in rows.chunks_mut(width).zip(b.chunks(rank)) {
            let row = &mut row[columns.clone()];
            let part = |r: usize| &a[r * width..][columns.clone()];
            let whole = rank / RANKS * RANKS;
            for r in (0..whole).step_by(RANKS) {
                let [b0, b1, b2, b3] = [b[r], b[r + 1], b[r + 2], b[r + 3]];
                let four = part(r).iter().zip(part(r + 1)).zip(part(r + 2)).zip(part(r + 3));
                for (w, (((a0, a1), a2), a3)) in row.iter_mut().zip(four) {
                    *w += b0 * a0 + b1 * a1 + (b2 * a2 + b3 * a3);
                }
            }
            for (r, b) in b.iter().enumerate().skip(whole) {
                row.iter_mut().zip(part(r)).for_each(|(w, a)| *w += b * a);
            }
        }
    }
    for (norm, row) in norms.iter_mut().zip(rows.chunks(width)) {
        let mut sums = [0.0; 8];
        let (chunks, rest) = row.as_chunks::<8>();
        for chunk in chunks {
            sums.iter_mut().zip(chunk).for_each(|(sum, w)| *sum += w * w);
        }
        *norm = (sums.iter().sum::<f64>() + rest.iter().map(|w| w * w).sum::<f64>()).sqrt();
    }
    Ok(())
}
