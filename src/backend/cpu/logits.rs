//! `y[id j] = rows[j] x`: dot products of a slot's replaced rows with x, at their tokens' places among the logits.

use std::ops::Range;

use fearless_simd::{Simd, dispatch};

use super::job::{Job, Work};
use super::module::Launched;
use super::simd::{self, LANES};
use super::tokens::Overlay;

/// Terms of a sum that are widened at a time: a multiple of [`LANES`], so that blocks don't change the order.
const DEPTH: usize = 256;

/// Replaced rows that share the loads of x.
const GROUP: usize = 4;

/// The least number of replaced rows in a piece: x is widened for each piece anew.
const PIECE: usize = 16;

/// The logits of one launch: columns are tokens, and a slot's own few of them are all its work.
pub(super) struct Logits<'a> {
    pub(super) launched: &'a Launched<'a>,
    /// x, as bytes.
    pub(super) x: &'a [u8],
}

impl Work for Logits<'_> {
    fn columns(&self, _: &Job<'_>) -> usize {
        self.launched.params.site[0].out_features as usize
    }

    fn cost(&self, job: &Job<'_>, tokens: &Range<usize>) -> u64 {
        // Widening a replaced row costs about as much as a row of x does.
        let width = u64::from(self.launched.params.in_features) * (job.run.rows as u64 + 1);
        width.saturating_mul(self.overlay(job).within(tokens).len() as u64)
    }

    /// Half of the replaced rows on either side, wherever their tokens are.
    fn cut(&self, job: &Job<'_>, tokens: &Range<usize>) -> Option<usize> {
        let overlay = self.overlay(job);
        let here = overlay.within(tokens);
        let left = (here.len() / 2).next_multiple_of(GROUP);
        let middle = overlay.ids[here.clone()].get(left).filter(|_| here.len() >= 2 * PIECE)?;
        Some(*middle as usize).filter(|middle| tokens.start < *middle && *middle < tokens.end)
    }

    fn run(&self, job: &Job<'_>, tokens: Range<usize>, rows: &mut [&mut [u8]]) {
        let here = self.overlay(job).within(&tokens);
        if here.is_empty() {
            return;
        }
        dispatch!(self.launched.level, simd => self.replace(simd, job, &tokens, here, rows));
    }
}

impl<'a> Logits<'a> {
    fn overlay(&self, job: &Job<'a>) -> Overlay<'a> {
        Overlay::of(self.launched, job.matrix, job.rank)
    }

    /// Writes the products of the slot's rows `here` with each row's x. Each element of either is widened once.
    #[inline(always)]
    fn replace<S: Simd>(
        &self,
        simd: S,
        job: &Job<'_>,
        tokens: &Range<usize>,
        here: Range<usize>,
        rows: &mut [&mut [u8]],
    ) {
        let Launched { kernel, params, .. } = *self.launched;
        let overlay = self.overlay(job);
        let (size, weight) = (kernel.spec.act.size() as usize, kernel.spec.weight.size() as usize);
        let width = params.in_features as usize;
        let mut x = vec![0.0; rows.len() * width];
        let x = x.chunks_mut(width.max(1)).enumerate().map(|(i, buffer)| {
            let at = (job.run.row + i) * params.x_stride as usize * size;
            simd::widen(kernel.spec.act, &self.x[at..][..width * size], buffer)
        });
        let x: Vec<&[f32]> = x.collect();
        let mut buffer = [[0.0; DEPTH]; GROUP];
        for first in here.clone().step_by(GROUP) {
            let count = GROUP.min(here.end - first);
            let mut sums = vec![[[0.0; LANES]; GROUP]; rows.len()];
            for k in (0..width).step_by(DEPTH) {
                let depth = DEPTH.min(width - k);
                let mut values: [&[f32]; GROUP] = [&[]; GROUP];
                for (i, (values, buffer)) in values.iter_mut().zip(&mut buffer).take(count).enumerate() {
                    let at = ((first + i) * params.a_stride as usize + k) * weight;
                    *values = simd::widen(kernel.spec.weight, &overlay.rows[at..][..depth * weight], buffer);
                }
                for (x, sums) in x.iter().zip(&mut sums) {
                    let x = &x[k..k + depth];
                    if count == GROUP {
                        simd::dot(simd, x, values, sums);
                    } else {
                        for (values, sum) in values[..count].iter().zip(sums.chunks_mut(1)) {
                            simd::dot(simd, x, [values], sum);
                        }
                    }
                }
            }
            for (id, j) in overlay.ids[first..first + count].iter().zip(0..) {
                // An id that is out of order is no part of these columns.
                let Some(at) = (*id as usize).checked_sub(tokens.start).filter(|at| *at < tokens.len()) else {
                    continue;
                };
                for (row, sums) in rows.iter_mut().zip(&sums) {
                    simd::narrow(kernel.spec.act, &[simd::total(sums[j])], &mut row[at * size..][..size]);
                }
            }
        }
    }
}
