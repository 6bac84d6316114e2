//! The kernels of embeddings and heads: a token's own delta, and rows that replace the model's.
//!
//! ```text
//! embed_shrink    z[row][r]        = A^T[slot(row)][ids[row]][r]
//! overlay_embed   y[row]           = rows[slot(row)][j]                               where ids[row] is the slot's id j
//! overlay_logits  y[row][id j]     = sum_k rows[slot(row)][j][k] * x[row][k]          for every j of the slot
//! ```
//!
//! An embedding's A lies transposed, `A^T[in_features][a_stride]`, so that one token's part is contiguous; an id that
//! is no row of it gives z = 0, hence y + 0. An overlay lies as `ids[max_rank]`, ascending u32, padded to 16 bytes, and
//! then `rows[max_rank][a_stride]`; the slot's rank word says how many of them it has. Replaced rows are the adapter's
//! as they are: neither the slot's scale nor a row's own changes them, and everything that they don't name keeps its bits.

use super::{
    Kernel, MAX_RANK, MAX_SITES, MAX_TOKEN_ROWS, OVERLAY_ROWS, Params, RowRef, STRIDE_ALIGN, SiteParams, Spec,
};
use crate::error::{Error, Result};

/// Bytes that the ids of an overlay of up to `capacity` rows take, ahead of its rows.
pub const fn overlay_ids_bytes(capacity: u32) -> u64 {
    (capacity as u64 * 4).next_multiple_of(16)
}

/// [`Kernel::groups`] of these kernels.
pub(super) fn groups(kernel: Kernel, params: &Params) -> (u64, u32) {
    let parts = match kernel {
        Kernel::OverlayLogits => params.max_rank.div_ceil(OVERLAY_ROWS),
        _ => 1,
    };
    (u64::from(params.rows) * u64::from(parts), params.sites)
}

/// [`Kernel::extents`] of these kernels.
pub(super) fn extents(kernel: Kernel, spec: Spec, params: &Params) -> Vec<u64> {
    let rows = u64::from(params.rows);
    let matrix = |stride: u32, offset: u32, width: u32, size: u64| match rows {
        0 => 0,
        _ => ((rows - 1) * u64::from(stride) + u64::from(offset) + u64::from(width)).saturating_mul(size),
    };
    let slots = u64::from(params.slots);
    let site = &params.site[0];
    let tables =
        (u64::from(site.cells) + 2 * slots).max(u64::from(site.ranks) + slots).max(u64::from(site.scales) + slots);
    let read = match kernel {
        Kernel::OverlayLogits => matrix(params.x_stride, 0, params.in_features, spec.act.size()),
        _ => rows * 4,
    };
    let (stride, offset, width) = written(kernel, params);
    let size = if kernel == Kernel::EmbedShrink { 4 } else { spec.act.size() };
    let batch = (u64::from(params.row_first) + rows) * size_of::<RowRef>() as u64;
    vec![batch, tables * 4, 0, read, matrix(stride, offset, width, size)]
}

/// Stride, offset and width of the rows that a kernel may write, in elements.
fn written(kernel: Kernel, params: &Params) -> (u32, u32, u32) {
    let site = &params.site[0];
    match kernel {
        Kernel::EmbedShrink => (params.z_stride, site.z_offset, params.max_rank),
        Kernel::OverlayEmbed => (site.y_stride, site.y_offset, params.in_features),
        _ => (site.y_stride, site.y_offset, site.out_features),
    }
}

/// The parameters of these kernels: one site, whose part of a slot fits its span, and rows of output that don't overlap.
pub(super) fn check(kernel: Kernel, spec: Spec, params: &Params) -> Result<()> {
    let name = kernel.name();
    let most = if kernel == Kernel::EmbedShrink { MAX_RANK } else { MAX_TOKEN_ROWS };
    if params.sites != 1 || params.max_rank > most {
        return Err(Error::shape(
            format!("launch of {name}"),
            format!("{} of {MAX_SITES} sites of up to {} rows", params.sites, params.max_rank),
            format!("1 site of up to {most} rows"),
        ));
    }
    if params.site[0].y_operand != 0 {
        return Err(Error::shape(format!("y operand of {name}"), params.site[0].y_operand, 0));
    }
    let (stride, _, width) = written(kernel, params);
    if params.rows > 1 && stride < width {
        return Err(Error::shape(
            format!("rows written by {name}"),
            format!("{width} elements, {stride} apart"),
            "rows that don't overlap",
        ));
    }
    check_part(kernel, spec, &params.site[0], params)
}

fn check_part(kernel: Kernel, spec: Spec, site: &SiteParams, params: &Params) -> Result<()> {
    let (ids, rows, row) = match kernel {
        Kernel::EmbedShrink => (0, params.in_features, params.max_rank),
        _ => (overlay_ids_bytes(params.max_rank), params.max_rank, params.in_features),
    };
    let stride = params.a_stride;
    if stride < row || !stride.is_multiple_of(STRIDE_ALIGN) {
        return Err(Error::shape(
            format!("weight rows of {}", kernel.name()),
            format!("{row} elements, {stride} apart"),
            format!("a stride that holds a row and is a multiple of {STRIDE_ALIGN}"),
        ));
    }
    let bytes = (u64::from(rows) * u64::from(stride)).saturating_mul(spec.weight.size()).saturating_add(ids);
    if u64::from(site.span) * 4 < bytes {
        return Err(Error::shape(
            format!("span of the site of {}", kernel.name()),
            format!("{} words", site.span),
            format!("at least {} words for {rows} rows, {stride} apart", bytes / 4),
        ));
    }
    Ok(())
}
