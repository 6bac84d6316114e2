//! y += scale * B z: dot products along the rank, many outputs at a time.

use std::ops::Range;

use fearless_simd::{Simd, dispatch};

use super::job::{Job, Work};
use super::module::Launched;
use super::simd::{self, CHUNK, OUTPUTS};
use crate::contract::SiteParams;

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

    fn cost(&self, job: &Job<'_>, outputs: &Range<usize>) -> u64 {
        // Widening B costs about as much as a row does.
        job.rank as u64 * (job.run.rows as u64 + 1) * outputs.len() as u64
    }

    fn run(&self, job: &Job<'_>, outputs: Range<usize>, rows: &mut [&mut [u8]]) {
        dispatch!(self.launched.level, simd => self.add(simd, job, outputs, rows));
    }
}

impl Expand<'_> {
    /// Adds to `outputs` of each row. Each element of B is widened once for all rows.
    #[inline(always)]
    fn add<S: Simd>(&self, simd: S, job: &Job<'_>, outputs: Range<usize>, rows: &mut [&mut [u8]]) {
        let Launched { kernel, params, .. } = *self.launched;
        let (act, stride) = (kernel.spec.act, params.b_stride as usize);
        let (y_size, b_size) = (act.size() as usize, kernel.spec.weight.size() as usize);
        let chunks = job.rank.div_ceil(CHUNK);
        let mut z = vec![[0.0; CHUNK]; rows.len() * chunks];
        for (i, z) in z.chunks_mut(chunks).enumerate() {
            let at = (job.run.row + i) * params.z_stride as usize + self.site.z_offset as usize;
            z.as_flattened_mut()[..job.rank].copy_from_slice(&self.z[at..][..job.rank]);
        }
        let mut b = vec![[[0.0; CHUNK]; OUTPUTS]; chunks];
        for start in outputs.clone().step_by(OUTPUTS) {
            let count = OUTPUTS.min(outputs.end - start);
            let end = (start + count - 1) * stride + job.rank;
            let shape = [count, stride, job.rank];
            simd::pack(kernel.spec.weight, &job.matrix[start * stride * b_size..end * b_size], shape, &mut b);
            for (i, (row, z)) in rows.iter_mut().zip(z.chunks(chunks)).enumerate() {
                let row_scale = self.launched.row(job.run.row + i).scale;
                let y = &mut row[(start - outputs.start) * y_size..][..count * y_size];
                let mut sums = simd::project(simd, &b, z);
                let mut buffer = [0.0; OUTPUTS];
                let old = simd::widen(act, y, &mut buffer);
                match job.vectors {
                    Some(vectors) => {
                        let vectors = vectors.map(|values| &values[start..start + count]);
                        simd::shape(&mut sums, old, vectors, [job.scale, row_scale]);
                    }
                    None => {
                        let scale = job.scale * row_scale;
                        for (sum, y) in sums.iter_mut().zip(old) {
                            *sum = y + scale * *sum;
                        }
                    }
                }
                simd::narrow(act, &sums[..count], y);
            }
        }
    }
}
