//! z = A x: dot products along the input.

use std::ops::Range;

use fearless_simd::{Simd, dispatch};

use super::job::{Job, RUN_ROWS, Work};
use super::module::Launched;
use super::simd::{self, LANES};

/// Terms of a sum that are widened at a time: a multiple of [`LANES`], so that blocks don't change the order.
const DEPTH: usize = 256;

/// Ranks that are summed at a time.
const RANKS: usize = 16;

/// Ranks that share the loads of x.
const GROUP: usize = 4;

/// The shrink of one launch.
pub(super) struct Shrink<'a> {
    pub(super) launched: &'a Launched<'a>,
    /// x, as bytes.
    pub(super) x: &'a [u8],
}

impl Work for Shrink<'_> {
    fn columns(&self, job: &Job<'_>) -> usize {
        job.rank
    }

    fn cost(&self, job: &Job<'_>, ranks: &Range<usize>) -> u64 {
        (u64::from(self.launched.params.in_features) * job.run.rows as u64).saturating_mul(ranks.len() as u64)
    }

    fn run(&self, job: &Job<'_>, ranks: Range<usize>, rows: &mut [&mut [u8]]) {
        let mut x = vec![0.0; rows.len() * DEPTH];
        let mut sums = vec![[[0.0; LANES]; RANKS]; rows.len()];
        for start in ranks.clone().step_by(RANKS) {
            let block = start..(start + RANKS).min(ranks.end);
            dispatch!(self.launched.level, simd => self.sum(simd, job, block.clone(), &mut x, &mut sums));
            for (row, sums) in rows.iter_mut().zip(&mut sums) {
                let z: &mut [f32] = bytemuck::cast_slice_mut(row);
                for (z, sums) in z[start - ranks.start..].iter_mut().zip(&mut sums[..block.len()]) {
                    *z = simd::total(std::mem::replace(sums, [0.0; LANES]));
                }
            }
        }
    }
}

impl Shrink<'_> {
    /// Adds the products of the job's rows with ranks `block` of A to `sums[row][rank]`. Each element of A is
    /// widened once for all rows, each of x once for all ranks of the block.
    #[inline(always)]
    fn sum<S: Simd>(
        &self,
        simd: S,
        job: &Job<'_>,
        block: Range<usize>,
        x_buffer: &mut [f32],
        sums: &mut [[[f32; LANES]; RANKS]],
    ) {
        let Launched { kernel, params, .. } = *self.launched;
        let width = params.in_features as usize;
        let (x_size, a_size) = (kernel.spec.act.size() as usize, kernel.spec.weight.size() as usize);
        let mut a_buffer = [[0.0; DEPTH]; GROUP];
        for k in (0..width).step_by(DEPTH) {
            let depth = DEPTH.min(width - k);
            let mut x: [&[f32]; RUN_ROWS] = [&[]; RUN_ROWS];
            for (i, (x, buffer)) in x.iter_mut().zip(x_buffer.chunks_mut(DEPTH)).enumerate() {
                *x = match self.launched.x_row(job.run.row + i) {
                    Some(row) => {
                        let at = (row * params.x_stride as usize + k) * x_size;
                        simd::widen(kernel.spec.act, &self.x[at..][..depth * x_size], buffer)
                    }
                    None => {
                        buffer[..depth].fill(0.0);
                        &buffer[..depth]
                    }
                };
            }
            for r in block.clone().step_by(GROUP) {
                let count = GROUP.min(block.end - r);
                let mut a: [&[f32]; GROUP] = [&[]; GROUP];
                for (i, (a, buffer)) in a.iter_mut().zip(&mut a_buffer).take(count).enumerate() {
                    let at = ((r + i) * params.a_stride as usize + k) * a_size;
                    *a = simd::widen(kernel.spec.weight, &job.matrix[at..][..depth * a_size], buffer);
                }
                for (x, sums) in x.iter().zip(&mut *sums) {
                    let sums = &mut sums[r - block.start..];
                    if count == GROUP {
                        simd::dot(simd, x, a, sums);
                    } else {
                        for (a, sum) in a[..count].iter().zip(sums.chunks_mut(1)) {
                            simd::dot(simd, x, [a], sum);
                        }
                    }
                }
            }
        }
    }
}
