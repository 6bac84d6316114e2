//! The kernels of token ids and replaced rows: gathers, and what [`Logits`] does.

use std::ops::Range;

use super::job::{self, Job, Rows};
use super::logits::Logits;
use super::memory::Bytes;
use super::module::Launched;
use super::{bgmv, simd};
use crate::contract::{Kernel, SiteParams, overlay_ids_bytes};

/// A slot's overlay.
pub(super) struct Overlay<'a> {
    /// Its ids, ascending.
    pub(super) ids: &'a [u32],
    /// Its rows, `a_stride` elements apart.
    pub(super) rows: &'a [u8],
}

impl<'a> Overlay<'a> {
    /// The overlay of `count` rows that `part` of a slot is.
    pub(super) fn of(launched: &Launched<'_>, part: &'a [u8], count: usize) -> Self {
        let (ids, rows) = part.split_at(overlay_ids_bytes(launched.params.max_rank) as usize);
        Self { ids: bytemuck::cast_slice(&ids[..count * 4]), rows }
    }

    /// Which of its rows are those of `tokens`.
    pub(super) fn within(&self, tokens: &Range<usize>) -> Range<usize> {
        let before = |end: usize| self.ids.partition_point(|id| (*id as usize) < end);
        let start = before(tokens.start);
        start..before(tokens.end).max(start)
    }
}

/// What the tables say of `slot` at the launch's one site: its part of the weights, and how many rows or ranks it has.
/// `None` where that is nothing, or nothing to be trusted.
fn part<'a>(launched: &Launched<'a>, site: &SiteParams, slot: i32) -> Option<(&'a [u8], usize)> {
    let slot = launched.slot(slot)?;
    let table = |at: u32, i: usize| launched.tables.get(at as usize + i).copied();
    let cell = u64::from(table(site.cells, 2 * slot)?) | u64::from(table(site.cells, 2 * slot + 1)?) << 32;
    let count = table(site.ranks, slot)?;
    if cell == 0 || !cell.is_multiple_of(16) || count == 0 || count > launched.params.max_rank {
        return None;
    }
    let offset = cell.checked_sub(launched.weights_address)?;
    let end = offset.checked_add(u64::from(site.span) * 4)?;
    let part = launched.weights.get(usize::try_from(offset).ok()?..usize::try_from(end).ok()?)?;
    Some((part, count as usize))
}

/// Does a launch of one of these kernels, which [`Launch::new`](crate::backend::Launch::new) has checked. `read` is ids
/// or x, `out` z or y.
pub(super) fn run(launched: &Launched<'_>, read: &[u8], out: &mut Bytes<'_>, extent: usize, grain: u64) {
    let out = &mut out.get_mut()[..extent];
    let site = &launched.params.site[0];
    if launched.kernel.kernel == Kernel::OverlayLogits {
        return logits(launched, site, read, out, grain);
    }
    for row in 0..launched.params.rows as usize {
        let slot = launched.row(row).slot;
        match launched.kernel.kernel {
            Kernel::EmbedShrink => embed_shrink(launched, site, (row, slot), bytemuck::cast_slice(read), out),
            _ => overlay_embed(launched, site, (row, slot), bytemuck::cast_slice(read), out),
        }
    }
}

fn embed_shrink(launched: &Launched<'_>, site: &SiteParams, (row, slot): (usize, i32), ids: &[u32], z: &mut [u8]) {
    let Some((a, rank)) = part(launched, site, slot) else { return };
    let (params, weight) = (launched.params, launched.kernel.spec.weight);
    let at = row * params.z_stride as usize + site.z_offset as usize;
    let z: &mut [f32] = &mut bytemuck::cast_slice_mut::<u8, f32>(z)[at..at + rank];
    if ids[row] >= params.in_features {
        z.fill(0.0);
        return;
    }
    let size = weight.size() as usize;
    let at = ids[row] as usize * params.a_stride as usize * size;
    let mut buffer = vec![0.0; rank];
    z.copy_from_slice(simd::widen(weight, &a[at..at + rank * size], &mut buffer));
}

fn overlay_embed(launched: &Launched<'_>, site: &SiteParams, (row, slot): (usize, i32), ids: &[u32], y: &mut [u8]) {
    let Some((part, count)) = part(launched, site, slot) else { return };
    let overlay = Overlay::of(launched, part, count);
    let Ok(j) = overlay.ids.binary_search(&ids[row]) else { return };
    let (params, spec) = (launched.params, launched.kernel.spec);
    let (width, size) = (params.in_features as usize, spec.weight.size() as usize);
    let from = j * params.a_stride as usize * size;
    let mut buffer = vec![0.0; width];
    let values = simd::widen(spec.weight, &overlay.rows[from..from + width * size], &mut buffer);
    let size = spec.act.size() as usize;
    let to = (row * site.y_stride as usize + site.y_offset as usize) * size;
    simd::narrow(spec.act, values, &mut y[to..to + width * size]);
}

fn logits(launched: &Launched<'_>, site: &SiteParams, x: &[u8], y: &mut [u8], grain: u64) {
    let jobs = bgmv::runs(launched).into_iter().filter_map(|run| {
        let (matrix, rank) = part(launched, site, run.slot as i32)?;
        Some(Job { run, matrix, rank, scale: 1.0, vectors: None })
    });
    let jobs: Vec<Job<'_>> = jobs.collect();
    let element = launched.kernel.spec.act.size() as usize;
    let first = (site.y_offset as usize * element).min(y.len());
    let out = Rows { bytes: &mut y[first..], stride: site.y_stride as usize * element, element };
    job::run(&Logits { launched, x }, &jobs, out, grain);
}
