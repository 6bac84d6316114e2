//! Rank-space scratch: what shrinks write and expands read.

use super::Op;
use crate::backend::GpuBackend;
use crate::contract::{MAX_SITES, z_bytes};
use crate::error::{Error, Result};
use crate::memory::Region;

/// Most bytes that are asked for without need; more rows are taken in turns.
const MOST: u64 = 64 << 20;

/// Memory for z at one address, of whole sums and of sums in parts.
#[derive(Debug)]
pub(super) struct Scratch {
    z: Region,
    /// Bytes that whole sums may take; the rest is for sums in parts.
    whole: u64,
    parts: u32,
}

impl Scratch {
    /// Bytes for `rows` rows, or for as many as pass in one turn: `least` or more.
    pub fn bytes(rows: u32, least: u32, max_rank: u32) -> u64 {
        let row = row_bytes(max_rank);
        (u64::from(rows.max(1)) * row).min(MOST.max(u64::from(least) * row))
    }

    /// Allocates `bytes` for whole sums, and what sums in parts need for as many rows, up to a limit.
    ///
    /// # Errors
    /// The backend's; [`Error::Limit`] when `bytes` are less than one row's.
    pub fn new(backend: &dyn GpuBackend, max_rank: u32, bytes: u64, label: &str) -> Result<Self> {
        let caps = backend.caps();
        let row = row_bytes(max_rank);
        let whole = bytes.min(caps.max_binding).min(caps.max_alloc) / 16 * 16;
        if whole < row {
            return Err(Error::Limit { what: "scratch for one row in bytes", found: row, limit: whole, hint: "" });
        }
        // As many rows in parts as whole, but no more scratch for them than whole ones may have.
        let in_parts = |rows| z_bytes(rows, MAX_SITES as u64, max_rank, caps.z_parts);
        let parts = in_parts(whole / row).min(MOST.max(in_parts(1))).min(caps.max_alloc) / 16 * 16;
        Ok(Self { z: backend.alloc(whole.max(parts), label)?, whole, parts: caps.z_parts })
    }

    /// The memory.
    pub fn region(&self) -> &Region {
        &self.z
    }

    /// Parts that the sums of `op` may be left in; 0: none.
    pub fn parts(&self, op: Op) -> u32 {
        if op == Op::Bgmv { self.parts } else { 0 }
    }

    /// Rows at `sites` sites that it holds, with sums in `parts`.
    pub fn rows(&self, sites: u64, max_rank: u32, parts: u32) -> u64 {
        let rows = self.whole / (sites * u64::from(max_rank) * 4);
        if parts == 0 { rows } else { rows.min(self.z.len() / z_bytes(1, sites, max_rank, parts)) }
    }
}

/// Bytes of z of one row at as many sites as a launch has.
fn row_bytes(max_rank: u32) -> u64 {
    MAX_SITES as u64 * u64::from(max_rank) * 4
}
