//! What must hold before a kernel may run on some memory.

use super::{
    Access, Kernel, MAX_RANK, MAX_SITES, Params, ROUTED_OFFSETS, ROUTED_TOKENS, STRIDE_ALIGN, SiteParams, Spec,
    outputs, routed_parts, tokens,
};
use crate::error::{Error, Result};
use crate::memory::Region;

/// Checks `operands` against `kernel` and `params`: count, length, and that nothing written overlaps.
/// On success a kernel that keeps to the contract touches no byte outside them.
pub(crate) fn check(kernel: Kernel, spec: Spec, operands: &[Region], params: &Params) -> Result<()> {
    let needed = match kernel {
        Kernel::ExpertRows => {
            check_routing(params)?;
            if params.routed & ROUTED_TOKENS == 0 { 3 } else { 4 }
        }
        Kernel::ExpertTiles => {
            check_routed_tiles(params)?;
            1
        }
        _ => {
            check_sites(kernel, spec, params)?;
            4 + if kernel.is_expand() { outputs(params) } else { 1 }
        }
    };
    if operands.len() != needed {
        return Err(Error::shape(format!("operands of {}", kernel.name()), operands.len(), needed));
    }
    check_memory(kernel, spec, operands, params)
}

/// The parameters of a kernel that works on sites.
fn check_sites(kernel: Kernel, spec: Spec, params: &Params) -> Result<()> {
    let sites = params.sites as usize;
    if kernel.is_tokens() {
        tokens::check(kernel, spec, params)?;
    } else if sites == 0 || sites > MAX_SITES || params.max_rank > MAX_RANK {
        return Err(Error::shape(
            format!("launch of {}", kernel.name()),
            format!("{sites} sites of rank up to {}", params.max_rank),
            format!("1..={MAX_SITES} sites of rank up to {MAX_RANK}"),
        ));
    }
    for site in params.site[..sites].iter().filter(|_| !kernel.is_tokens()) {
        check_site(kernel, spec, site, params)?;
    }
    if u64::from(params.slot_first) + u64::from(params.slot_count) > u64::from(params.slots) {
        return Err(Error::shape(
            "slot window",
            format!("{}+{}", params.slot_first, params.slot_count),
            format!("within {} slots", params.slots),
        ));
    }
    for site in params.site[..sites].iter().filter(|_| !kernel.is_tokens()) {
        let (what, stride, row) = if kernel.is_expand() {
            ("y", site.y_stride, site.out_features)
        } else {
            ("z", params.z_stride, params.max_rank)
        };
        if params.rows > 1 && stride < row {
            return Err(Error::shape(
                format!("rows of {what} of {}", kernel.name()),
                format!("{row} elements, {stride} apart"),
                "rows that don't overlap",
            ));
        }
    }
    Ok(())
}

/// The parameters of expert_rows: slots and experts make no more slots than an i32 counts, and the parts of what it
/// writes don't overlap. Tiles are another kernel's.
fn check_routing(params: &Params) -> Result<()> {
    let what = "launch of expert_rows";
    let slots = u64::from(params.slots) * u64::from(params.slot_stride);
    if params.experts == 0 || params.experts > params.slot_stride || slots > i32::MAX as u64 {
        return Err(Error::shape(
            what,
            format!("{} slots of {} entries, {} experts", params.slots, params.slot_stride, params.experts),
            format!("1 expert or more, all in a slot's entries, and up to {} entries", i32::MAX),
        ));
    }
    if params.top_k == 0 || params.routed & !(ROUTED_TOKENS | ROUTED_OFFSETS) != 0 {
        let found = format!("top_k {}, routed {}", params.top_k, params.routed);
        return Err(Error::shape(what, found, "top_k of 1 or more, and known ways to be routed"));
    }
    if params.tiles != 0 {
        return Err(Error::shape(what, format!("{} tiles", params.tiles), "0: they are expert_tiles' to make"));
    }
    check_routed_parts(what, params)
}

/// The parameters of expert_tiles: room for as many tiles as rows, and the counts of expert_rows.
fn check_routed_tiles(params: &Params) -> Result<()> {
    let what = "launch of expert_tiles";
    if params.tiles != params.rows || params.counts_at == 0 {
        let found = format!("{} tiles, counts at word {}", params.tiles, params.counts_at);
        return Err(Error::shape(what, found, format!("{} tiles, as rows, and counts", params.rows)));
    }
    check_routed_parts(what, params)
}

/// The parts of a routed layer's batch don't overlap.
fn check_routed_parts(what: &str, params: &Params) -> Result<()> {
    let mut parts = routed_parts(params);
    parts.sort_unstable_by_key(|part| part.start);
    if parts.windows(2).any(|pair| pair[0].end > pair[1].start) {
        return Err(Error::shape(what, format!("parts at words {parts:?}"), "parts that don't overlap"));
    }
    Ok(())
}

/// Length, alignment and overlap of the operands.
fn check_memory(kernel: Kernel, spec: Spec, operands: &[Region], params: &Params) -> Result<()> {
    let list = kernel.operands();
    let extents = kernel.extents(spec, params);
    for ((operand, region), extent) in list.iter().zip(operands).zip(&extents) {
        let align = match operand.name {
            "x" | "y0" | "y1" | "y2" | "y3" => spec.act.size(),
            _ => 4,
        };
        if !region.ptr().0.is_multiple_of(align) {
            return Err(Error::shape(
                format!("operand {} of {}", operand.name, kernel.name()),
                format!("address {:?}", region.ptr()),
                format!("a multiple of {align} bytes"),
            ));
        }
        if region.len() < *extent {
            return Err(Error::shape(
                format!("operand {} of {}", operand.name, kernel.name()),
                format!("{} bytes", region.len()),
                format!("at least {extent} bytes"),
            ));
        }
    }
    for (i, written) in operands.iter().enumerate().filter(|(i, _)| list[*i].access == Access::Write) {
        for (j, other) in operands.iter().enumerate() {
            if i != j && written.overlaps(other) {
                return Err(Error::shape(
                    format!("operands {} and {} of {}", list[i].name, list[j].name, kernel.name()),
                    "overlapping memory",
                    "separate memory",
                ));
            }
        }
    }
    Ok(())
}

/// Checks that a matrix which fits a site's span is all that the kernel reads through its cells.
fn check_site(kernel: Kernel, spec: Spec, site: &SiteParams, params: &Params) -> Result<()> {
    let (rows, stride, row) = match kernel.is_expand() {
        true => (site.out_features, params.b_stride, params.max_rank),
        false => (params.max_rank, params.a_stride, params.in_features),
    };
    if stride < row || !stride.is_multiple_of(STRIDE_ALIGN) {
        return Err(Error::shape(
            format!("weight rows of {}", kernel.name()),
            format!("{row} elements, {stride} apart"),
            format!("a stride that holds a row and is a multiple of {STRIDE_ALIGN}"),
        ));
    }
    let elements = u64::from(rows.saturating_sub(1)) * u64::from(stride)
        + u64::from(stride.min(row.next_multiple_of(STRIDE_ALIGN)));
    let bytes = elements.saturating_mul(spec.weight.size());
    if u64::from(site.span) * 4 < bytes {
        return Err(Error::shape(
            format!("span of a site of {}", kernel.name()),
            format!("{} words", site.span),
            format!("at least {} words for {rows} rows, {stride} apart", bytes / 4),
        ));
    }
    if kernel.is_expand() && site.y_operand as usize >= MAX_SITES {
        return Err(Error::shape("y operand of a site", site.y_operand, format!("less than {MAX_SITES}")));
    }
    Ok(())
}
