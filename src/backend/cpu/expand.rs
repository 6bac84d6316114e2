//! y += scale * B z: for each block of outputs, B's rows as columns, so that outputs are the lanes.

use std::ops::Range;

use super::job::{Job, RUN_ROWS, Work};
use super::module::Launched;
use super::simd::{self, OUTPUTS};
use crate::contract::SiteParams;

/// Ranks that are turned into columns at a time.
const RANKS: usize = 64;

/// The expand of one launch at one site.
pub(super) struct Expand<'a> {
    pub(super) launched: &'a Launched<'a>,
    pub(super) site: &'a SiteParams,
    /// z of all rows and sites.
    pub(super) z: &'a [f32],
}

impl Work for Expand<'_> {
    fn columns(&self, _: &Job<'_>) -> usize {
        self.site.out_features as usize
    }

    fn cost(&self, job: &Job<'_>) -> u64 {
        // Widening and turning B costs about as much as four rows do.
        job.rank as u64 * (job.run.rows as u64 + 4)
    }

    fn run(&self, job: &Job<'_>, outputs: Range<usize>, rows: &mut [&mut [u8]]) {
        let Launched { level, kernel, params, .. } = *self.launched;
        let (stride, size) = (params.b_stride as usize, kernel.spec.weight.size() as usize);
        let (act, y_size) = (kernel.spec.act, kernel.spec.act.size() as usize);
        let mut columns = [[0.0; OUTPUTS]; RANKS];
        for start in outputs.clone().step_by(OUTPUTS) {
            let count = OUTPUTS.min(outputs.end - start);
            let mut sums = [[0.0; OUTPUTS]; RUN_ROWS];
            for r in (0..job.rank).step_by(RANKS) {
                let depth = RANKS.min(job.rank - r);
                let at = start * stride + r;
                let end = (start + count - 1) * stride + r + depth;
                let matrix = &job.matrix[at * size..end * size];
                simd::transpose(level, kernel.spec.weight, matrix, [count, stride, depth], &mut columns);
                for (i, sums) in sums.iter_mut().enumerate().take(rows.len()) {
                    let z = (job.run.row + i) * params.z_stride as usize + self.site.z_offset as usize + r;
                    simd::accumulate(level, &columns[..depth], &self.z[z..][..depth], sums);
                }
            }
            for (i, (row, sums)) in rows.iter_mut().zip(&mut sums).enumerate() {
                let scale = job.scale * self.launched.row(job.run.row + i).scale;
                let y = &mut row[(start - outputs.start) * y_size..][..count * y_size];
                let mut buffer = [0.0; OUTPUTS];
                let old = simd::widen(level, act, y, &mut buffer);
                for (sum, old) in sums.iter_mut().zip(old) {
                    *sum = old + scale * *sum;
                }
                simd::narrow(level, act, &sums[..count], y);
            }
        }
    }
}
