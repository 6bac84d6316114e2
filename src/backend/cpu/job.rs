//! Jobs: rows of one slot at one site, and their spread over threads.

use std::ops::Range;

use super::module::Launched;
use crate::contract::{RANK_MASK, RANK_VECTORS, SGMV_TILE_ROWS, SiteParams, vector_len};

/// Most rows in a run.
pub(super) const RUN_ROWS: usize = SGMV_TILE_ROWS as usize;

/// Consecutive rows of one slot inside the launch's window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Their slot.
    pub(super) slot: usize,
    /// The first, counted from the launch's first row.
    pub(super) row: usize,
    /// How many, 1..=[`RUN_ROWS`].
    pub(super) rows: usize,
}

/// A run at a site where its slot has a delta.
pub(super) struct Job<'a> {
    pub(super) run: Run,
    /// The slot's A or B at this site, no more than the rows in use; or its replaced rows and their ids.
    pub(super) matrix: &'a [u8],
    /// Rank; or how many replaced rows there are.
    pub(super) rank: usize,
    /// The slot's scale at this site.
    pub(super) scale: f32,
    /// Of an expand: the slot's gains and offsets behind B, one an output.
    pub(super) vectors: Option<[&'a [f32]; 2]>,
}

impl<'a> Job<'a> {
    /// What the tables say of `run` at `site`; `None` where that is no delta, or nothing to be trusted.
    pub(super) fn resolve(launched: &Launched<'a>, site: &SiteParams, run: Run) -> Option<Self> {
        let table = |at: u32, i: usize| launched.tables.get(at as usize + i).copied();
        let cell = u64::from(table(site.cells, 2 * run.slot)?) | u64::from(table(site.cells, 2 * run.slot + 1)?) << 32;
        let word = table(site.ranks, run.slot)?;
        let rank = word & RANK_MASK;
        if cell == 0 || rank == 0 || rank > launched.params.max_rank {
            return None;
        }
        let offset = cell.checked_sub(launched.weights_address)?;
        let weights = launched.weights;
        if offset.checked_add(u64::from(site.span) * 4)? > weights.len() as u64 {
            return None;
        }
        // The contract's check is against the span; this one is against what will be read.
        let (rank, params) = (rank as usize, launched.params);
        let (rows, stride, width) = if launched.kernel.kernel.is_expand() {
            (site.out_features as usize, params.b_stride as usize, rank)
        } else {
            (rank, params.a_stride as usize, params.in_features as usize)
        };
        let size = launched.kernel.spec.weight.size();
        let len = ((rows.checked_sub(1)? * stride + width) as u64).checked_mul(size)?;
        let matrix = weights.get(offset as usize..usize::try_from(offset.checked_add(len)?).ok()?)?;
        let scale = f32::from_bits(table(site.scales, run.slot)?);
        let vectors = match word & RANK_VECTORS != 0 && launched.kernel.kernel.is_expand() {
            true => Some(Self::vectors(launched, site, &weights[offset as usize..])?),
            false => None,
        };
        cell.is_multiple_of(size).then_some(Self { run, matrix, rank, scale, vectors })
    }

    /// Gains and offsets behind a B that begins where `weights` does; `None` where the site's span doesn't hold them.
    fn vectors(launched: &Launched<'a>, site: &SiteParams, weights: &'a [u8]) -> Option<[&'a [f32]; 2]> {
        let row = u64::from(launched.params.b_stride) * launched.kernel.spec.weight.size();
        let matrix = u64::from(site.out_features).checked_mul(row)?;
        let len = vector_len(site.out_features) * 4;
        if matrix.checked_add(2 * len)? > u64::from(site.span) * 4 {
            return None;
        }
        let at = |start: u64| {
            let bytes = weights.get(start as usize..(start + 4 * u64::from(site.out_features)) as usize)?;
            bytemuck::try_cast_slice(bytes).ok()
        };
        Some([at(matrix)?, at(matrix + len)?])
    }
}

/// What is to be done for a job, column by column of its output rows.
pub(super) trait Work: Sync {
    /// Columns of the job's output rows.
    fn columns(&self, job: &Job<'_>) -> usize;

    /// Multiply-adds that `columns` take.
    fn cost(&self, job: &Job<'_>, columns: &Range<usize>) -> u64;

    /// Where to cut `columns` in two; `None`: not at all.
    fn cut(&self, _: &Job<'_>, columns: &Range<usize>) -> Option<usize> {
        let left = (columns.len() / 2).next_multiple_of(COLUMNS);
        (columns.len() >= 2 * COLUMNS).then_some(columns.start + left)
    }

    /// Does `columns` of each of the job's rows; `rows[i]` holds those columns of row `i`, in bytes.
    fn run(&self, job: &Job<'_>, columns: Range<usize>, rows: &mut [&mut [u8]]);
}

/// Columns are cut at multiples of this.
const COLUMNS: usize = 32;

/// Output rows of a site: row 0 starts at the first byte.
pub(super) struct Rows<'a> {
    pub(super) bytes: &'a mut [u8],
    /// Bytes between rows; no less than a row's width where there are several.
    pub(super) stride: usize,
    /// Bytes of an element.
    pub(super) element: usize,
}

/// Does `work` for all `jobs`, in ascending order of their rows, in pieces of about `grain` multiply-adds.
pub(super) fn run(work: &impl Work, jobs: &[Job<'_>], out: Rows<'_>, grain: u64) {
    let apart = jobs.windows(2).all(|pair| pair[0].run.row + pair[0].run.rows <= pair[1].run.row);
    if !apart {
        // Only a batch that contradicts itself has a row twice: some order is as good as any other.
        for job in jobs {
            let out = Rows { bytes: &mut *out.bytes, ..out };
            jobs_of(work, std::slice::from_ref(job), out, 0, usize::MAX, u64::MAX);
        }
        return;
    }
    let cost = |job: &Job<'_>| work.cost(job, &(0..work.columns(job)));
    let total = jobs.iter().map(cost).fold(0, u64::saturating_add).max(1);
    let per_leaf = if grain == u64::MAX { u64::MAX } else { (grain.saturating_mul(jobs.len() as u64) / total).max(1) };
    jobs_of(work, jobs, out, 0, usize::try_from(per_leaf).unwrap_or(usize::MAX), grain);
}

/// Halves the jobs until a thread has at most `per_leaf` of them. `out` starts at row `first`.
fn jobs_of(work: &impl Work, jobs: &[Job<'_>], out: Rows<'_>, first: usize, per_leaf: usize, grain: u64) {
    let Rows { bytes, stride, element } = out;
    if jobs.len() > per_leaf {
        let (left, right) = jobs.split_at(jobs.len() / 2);
        let middle = right[0].run.row;
        let (top, bottom) = bytes.split_at_mut((middle - first) * stride);
        rayon::join(
            || jobs_of(work, left, Rows { bytes: top, stride, element }, first, per_leaf, grain),
            || jobs_of(work, right, Rows { bytes: bottom, stride, element }, middle, per_leaf, grain),
        );
        return;
    }
    for job in jobs {
        let columns = work.columns(job);
        let mut rows: [&mut [u8]; RUN_ROWS] = Default::default();
        let bytes = &mut bytes[(job.run.row - first) * stride..];
        // The only row of a launch may have any stride.
        let chunk = if job.run.rows == 1 { bytes.len() } else { stride };
        for (row, bytes) in rows.iter_mut().zip(bytes.chunks_mut(chunk.max(1))).take(job.run.rows) {
            *row = &mut bytes[..columns * element];
        }
        columns_of(work, job, 0..columns, rows, element, grain);
    }
}

/// Halves a job's columns until they cost a thread at most `grain`.
fn columns_of(
    work: &impl Work,
    job: &Job<'_>,
    columns: Range<usize>,
    mut rows: [&mut [u8]; RUN_ROWS],
    element: usize,
    grain: u64,
) {
    let cut = if work.cost(job, &columns) <= grain { None } else { work.cut(job, &columns) };
    let Some(middle) = cut else { return work.run(job, columns, &mut rows[..job.run.rows]) };
    let mut rest: [&mut [u8]; RUN_ROWS] = Default::default();
    for (row, rest) in rows.iter_mut().zip(&mut rest).take(job.run.rows) {
        (*row, *rest) = std::mem::take(row).split_at_mut((middle - columns.start) * element);
    }
    rayon::join(
        || columns_of(work, job, columns.start..middle, rows, element, grain),
        || columns_of(work, job, middle..columns.end, rest, element, grain),
    );
}
