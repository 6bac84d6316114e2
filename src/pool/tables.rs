//! The tables that kernels find an adapter's matrices by: per site, one entry a slot.
//!
//! Every site of the model has its arrays, adapted or not: that is what lets a later adapter cover
//! sites that no earlier one did. All arrays lie in one allocation whose addresses never change, and
//! one write publishes them, so a step sees a slot's old entries at all sites or its new ones.

use std::sync::{Mutex, PoisonError};

use crate::backend::{Encoder, GpuBackend};
use crate::contract::{RANK_MASK, RANK_VECTORS};
use crate::error::{Error, Result};
use crate::memory::{DevicePtr, Region};

/// A slot's entry at one site.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// Address of A.
    pub a: DevicePtr,
    /// Address of B.
    pub b: DevicePtr,
    /// True rank.
    pub rank: u32,
    /// Scale of the delta at this site.
    pub scale: f32,
    /// Whether gains and offsets lie behind B.
    pub vectors: bool,
}

impl Cell {
    /// No delta here.
    pub const EMPTY: Self = Self { a: DevicePtr::NULL, b: DevicePtr::NULL, rank: 0, scale: 0.0, vectors: false };
}

/// Word offsets of one site's arrays in the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SiteTables {
    /// `slots` addresses of A.
    pub a: u32,
    /// `slots` addresses of B.
    pub b: u32,
    /// `slots` u32 ranks, each with [`RANK_VECTORS`] above it where there are vectors.
    pub ranks: u32,
    /// `slots` f32 scales.
    pub scales: u32,
}

/// The tables of a pool: a device region and the host's copy of it.
#[derive(Debug)]
pub struct Tables {
    region: Region,
    slots: u32,
    sites: u32,
    words: Mutex<Vec<u32>>,
}

impl Tables {
    /// Tables of `sites` sites and `slots` slots, all empty.
    ///
    /// # Errors
    /// [`Error::Limit`] past 2^32 words, or the backend's.
    pub fn new(backend: &dyn GpuBackend, sites: u32, slots: u32) -> Result<Self> {
        let words = (u64::from(sites) * 6 + 1) * u64::from(slots);
        let limit = u64::from(u32::MAX);
        if words > limit {
            return Err(Error::Limit { what: "sites times slots, in table words", found: words, limit, hint: "" });
        }
        let region = backend.alloc(words * 4, "tables")?;
        Ok(Self { region, slots, sites, words: Mutex::new(vec![0; words as usize]) })
    }

    /// The device copy.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Where `site`'s arrays are.
    pub fn site(&self, site: usize) -> SiteTables {
        let first = site as u32 * 6 * self.slots;
        SiteTables {
            a: first,
            b: first + 2 * self.slots,
            ranks: first + 4 * self.slots,
            scales: first + 5 * self.slots,
        }
    }

    /// Address of `site`'s array of A addresses, and of its array of B addresses.
    pub fn addresses(&self, site: usize) -> (DevicePtr, DevicePtr) {
        let at = self.site(site);
        let of = |word: u32| self.region.ptr().offset(u64::from(word) * 4);
        (of(at.a), of(at.b))
    }

    /// Address of the `slots` f32 scales of whole adapters.
    pub fn slot_scales(&self) -> DevicePtr {
        self.region.ptr().offset(u64::from(self.sites * 6 * self.slots) * 4)
    }

    /// Replaces all of `slot`'s entries, one cell a site, and its own scale, on the host. Nothing is
    /// visible to kernels before [`Tables::publish`].
    ///
    /// # Panics
    /// When there aren't as many cells as sites, or `slot` is out of range.
    pub fn set(&self, slot: u32, cells: &[Cell], scale: f32) {
        assert!(cells.len() == self.sites as usize && slot < self.slots, "one cell a site, and a slot that exists");
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        for (site, cell) in cells.iter().enumerate() {
            let at = self.site(site);
            for (array, address) in [(at.a, cell.a), (at.b, cell.b)] {
                let word = (array + 2 * slot) as usize;
                words[word] = address.0 as u32;
                words[word + 1] = (address.0 >> 32) as u32;
            }
            words[(at.ranks + slot) as usize] = cell.rank | if cell.vectors { RANK_VECTORS } else { 0 };
            words[(at.scales + slot) as usize] = cell.scale.to_bits();
        }
        words[(self.sites * 6 * self.slots + slot) as usize] = scale.to_bits();
    }

    /// `slot`'s entry at `site`, as last set on the host.
    pub fn get(&self, slot: u32, site: usize) -> Cell {
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        let at = self.site(site);
        let address = |array: u32| {
            let word = (array + 2 * slot) as usize;
            DevicePtr(u64::from(words[word]) | u64::from(words[word + 1]) << 32)
        };
        Cell {
            a: address(at.a),
            b: address(at.b),
            rank: words[(at.ranks + slot) as usize] & RANK_MASK,
            vectors: words[(at.ranks + slot) as usize] & RANK_VECTORS != 0,
            scale: f32::from_bits(words[(at.scales + slot) as usize]),
        }
    }

    /// `slot`'s own scale, as last set on the host.
    pub fn slot_scale(&self, slot: u32) -> f32 {
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        f32::from_bits(words[(self.sites * 6 * self.slots + slot) as usize])
    }

    /// Records one write of all tables.
    ///
    /// # Errors
    /// The encoder's.
    pub fn publish(&self, encoder: &mut dyn Encoder) -> Result<()> {
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        encoder.write(&self.region, bytemuck::cast_slice(&words))
    }
}
