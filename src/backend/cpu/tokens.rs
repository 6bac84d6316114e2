//! The kernels of token ids and replaced rows: gathers, and dot products along the input.

use fearless_simd::{Level, dispatch};

use super::memory::Bytes;
use super::module::Launched;
use super::simd::{self, LANES};
use crate::contract::{Kernel, SiteParams, overlay_ids_bytes};
use crate::dtype::DType;

/// Terms of a sum that are widened at a time: a multiple of [`LANES`], so that blocks don't change the order.
const DEPTH: usize = 256;

/// A slot's overlay.
struct Overlay<'a> {
    /// Its ids, ascending.
    ids: &'a [u32],
    /// Its rows, `a_stride` elements apart.
    rows: &'a [u8],
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

fn overlay<'a>(launched: &Launched<'a>, site: &SiteParams, slot: i32) -> Option<Overlay<'a>> {
    let (part, count) = part(launched, site, slot)?;
    let (ids, rows) = part.split_at(overlay_ids_bytes(launched.params.max_rank) as usize);
    Some(Overlay { ids: bytemuck::cast_slice(&ids[..count * 4]), rows })
}

/// Does a launch of one of these kernels, which [`Launch::new`](crate::backend::Launch::new) has checked. `read` is ids
/// or x, `out` z or y.
pub(super) fn run(launched: &Launched<'_>, read: &[u8], out: &mut Bytes<'_>, extent: usize) {
    let out = &mut out.get_mut()[..extent];
    let site = &launched.params.site[0];
    for row in 0..launched.params.rows as usize {
        let slot = launched.row(row).slot;
        match launched.kernel.kernel {
            Kernel::EmbedShrink => embed_shrink(launched, site, (row, slot), bytemuck::cast_slice(read), out),
            Kernel::OverlayEmbed => overlay_embed(launched, site, (row, slot), bytemuck::cast_slice(read), out),
            _ => overlay_logits(launched, site, (row, slot), read, out),
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
    let Some(overlay) = overlay(launched, site, slot) else { return };
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

fn overlay_logits(launched: &Launched<'_>, site: &SiteParams, (row, slot): (usize, i32), x: &[u8], y: &mut [u8]) {
    let Some(overlay) = overlay(launched, site, slot) else { return };
    let (params, spec) = (launched.params, launched.kernel.spec);
    let (x_size, size) = (spec.act.size() as usize, spec.weight.size() as usize);
    let width = params.in_features as usize;
    let x = &x[row * params.x_stride as usize * x_size..][..width * x_size];
    let mut x_buffer = vec![0.0; width];
    let x = simd::widen(spec.act, x, &mut x_buffer);
    for (j, id) in overlay.ids.iter().enumerate().filter(|(_, id)| **id < site.out_features) {
        let from = &overlay.rows[j * params.a_stride as usize * size..][..width * size];
        let sum = dot(launched.level, x, spec.weight, from);
        let to = (row * site.y_stride as usize + site.y_offset as usize + *id as usize) * x_size;
        simd::narrow(spec.act, &[sum], &mut y[to..to + x_size]);
    }
}

/// `sum_k row[k] * x[k]`
fn dot(level: Level, x: &[f32], dtype: DType, row: &[u8]) -> f32 {
    let (mut sums, mut buffer) = ([[0.0; LANES]], [0.0; DEPTH]);
    for (x, row) in x.chunks(DEPTH).zip(row.chunks(DEPTH * dtype.size() as usize)) {
        let row = simd::widen(dtype, row, &mut buffer);
        dispatch!(level, simd => simd::dot(simd, x, [row], &mut sums));
    }
    simd::total(sums[0])
}
