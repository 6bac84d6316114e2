//! Pairs of routed experts, in memory of their own beside the slots of linears.
//!
//! An adapter covers few of a model's experts, or all of them, so a slot has no place for each: it is an area in which an
//! adapter's pairs lie one behind the other, as many as it has. The tables have an entry for every expert of every
//! routed linear, slot after slot, so that `slot * stride + expert` is a slot to the kernels like any other, and a
//! publication is four small writes. Without experts there is no such pool, and nothing else changes.

mod area;
mod image;
mod spec;
mod tables;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

pub use image::ExpertImage;
pub use spec::{ExpertSite, ExpertSpec};

use self::area::Area;
use self::tables::ExpertTables;
use super::{Limits, Part};
use crate::adapter::ExpertPair;
use crate::backend::{Encoder, GpuBackend};
use crate::contract::STRIDE_ALIGN;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Region;

/// Device memory for the experts of `max_loras` adapters. Its addresses never change.
#[derive(Debug)]
pub struct ExpertPool {
    spec: ExpertSpec,
    dtype: DType,
    slots: u32,
    area: Area,
    blocks: Vec<Region>,
    tables: ExpertTables,
    /// Where each site's entries begin among a slot's.
    first: Vec<u32>,
    index: BTreeMap<Arc<str>, usize>,
}

/// What one launch can reach: the pairs of some slots, or a part of one slot's, that lie in `region`.
#[derive(Clone, Debug)]
pub(crate) struct ExpertWindow {
    /// Adapter slots.
    pub slots: Range<u32>,
    /// The memory.
    pub region: Region,
}

impl ExpertPool {
    /// Allocates a pool, all slots empty.
    ///
    /// # Errors
    /// [`Error::Limit`] when the spec doesn't fit the device, [`Error::Shape`] when it names no site or one twice,
    /// [`Error::OutOfMemory`] when the device has no room.
    pub fn new(backend: &dyn GpuBackend, spec: ExpertSpec, slots: u32, dtype: DType) -> Result<Self> {
        let mut first = Vec::with_capacity(spec.sites.len());
        let mut index = BTreeMap::new();
        let mut stride = 0u64;
        for (i, site) in spec.sites.iter().enumerate() {
            if index.insert(site.id.path.clone(), i).is_some() {
                return Err(Error::shape("sites of an expert pool", format!("{} twice", site.id.path), "each once"));
            }
            first.push(u32::try_from(stride).unwrap_or(u32::MAX));
            stride += u64::from(site.experts);
        }
        if stride == 0 {
            return Err(Error::shape("sites of an expert pool", "no expert", "at least one"));
        }
        let entries = stride * u64::from(slots);
        let limit = i32::MAX as u64 / 6;
        if entries > limit {
            return Err(Error::Limit { what: "experts times slots", found: entries, limit, hint: "" });
        }
        spec.check_rank()?;
        let largest = spec.sites.iter().map(|site| spec.largest(site, dtype)).max().unwrap_or(0);
        let area = Area::new(spec.slot_bytes, largest, slots, Limits::from(backend.caps()))?;
        let blocks = area.blocks().into_iter().map(|len| backend.alloc(len, "expert pool")).collect::<Result<_>>()?;
        let tables = ExpertTables::new(backend, stride as u32, slots)?;
        Ok(Self { spec, dtype, slots, area, blocks, tables, first, index })
    }

    /// What the pool was made for.
    pub fn spec(&self) -> &ExpertSpec {
        &self.spec
    }

    /// The sites, in the order of their indices.
    pub fn sites(&self) -> &[ExpertSite] {
        &self.spec.sites
    }

    /// Index of the site with this path.
    pub fn site_at(&self, path: &str) -> Option<usize> {
        self.index.get(path).copied()
    }

    /// The allocations; one where the device allows it.
    pub fn blocks(&self) -> &[Region] {
        &self.blocks
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.blocks.iter().map(Region::len).sum()
    }

    /// The device's tables.
    pub fn tables(&self) -> &Region {
        self.tables.region()
    }

    /// Number of adapter slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Bytes of a slot's area.
    pub(crate) fn slot_len(&self) -> u64 {
        self.area.len()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Table entries from one adapter slot to the next: what expert_rows multiplies a slot by.
    pub fn slot_stride(&self) -> u32 {
        self.tables.stride()
    }

    /// Word offsets of a site's cells of A and of B, ranks and scales in the tables, at expert 0 of slot 0.
    pub(crate) fn words(&self, site: usize) -> [u32; 4] {
        self.tables.words(self.first[site])
    }

    /// Entries that a launch at a site may name: up to the last expert of the last slot.
    pub(crate) fn entries(&self, site: usize) -> u32 {
        (self.slots - 1) * self.slot_stride() + self.spec.sites[site].experts
    }

    /// Elements between rows of A at a site.
    pub(crate) fn a_stride(&self, site: usize) -> u32 {
        self.spec.sites[site].in_features.next_multiple_of(STRIDE_ALIGN)
    }

    /// Elements between rows of B, at every site.
    pub(crate) fn b_stride(&self) -> u32 {
        self.spec.b_stride()
    }

    /// Bytes of one matrix of one expert.
    pub(crate) fn part_bytes(&self, site: usize, part: Part) -> u64 {
        self.spec.part_bytes(&self.spec.sites[site], part, self.dtype)
    }

    /// The fewest ranges that together hold every pair of every slot.
    pub(crate) fn windows(&self) -> Vec<ExpertWindow> {
        let window =
            |(i, region): (usize, &Region)| ExpertWindow { slots: self.area.slots_of(i), region: region.clone() };
        self.blocks.iter().enumerate().map(window).collect()
    }

    /// Where bytes `range` of a slot's area lie; they are in one block.
    pub(crate) fn region(&self, slot: u32, range: Range<u64>) -> Result<Region> {
        let (block, offset) = self.area.place(slot, range.start);
        self.blocks[block].slice(offset, range.end - range.start)
    }

    /// Sets a slot's entries on the host, to those of `image` or to none, and gives what they were.
    pub(crate) fn set(&self, slot: u32, image: Option<&ExpertImage>) -> Result<tables::Entries> {
        let mut entries = tables::Entries::empty(self.slot_stride());
        for pair in image.into_iter().flat_map(ExpertImage::pairs) {
            let at = |offset: u64, part| {
                let end = offset + self.part_bytes(pair.site, part);
                self.region(slot, offset..end).map(|region| region.ptr())
            };
            let entry = self.first[pair.site] + pair.expert;
            entries.put(entry, at(pair.a, Part::A)?, at(pair.b, Part::B)?, pair.rank, pair.scale);
        }
        Ok(self.tables.set(slot, entries))
    }

    /// Sets a slot's entries back to what [`ExpertPool::set`] gave.
    pub(crate) fn restore(&self, slot: u32, entries: tables::Entries) {
        self.tables.set(slot, entries);
    }

    /// Records the writes of a slot's entries.
    pub(crate) fn publish(&self, slot: u32, encoder: &mut dyn Encoder) -> Result<()> {
        self.tables.publish(slot, encoder)
    }

    /// Index of the site that a pair belongs to, if the pool can hold it there.
    pub(crate) fn fit(&self, pair: &ExpertPair) -> Result<usize> {
        let path = &pair.site.path;
        let site = self.site_at(path).ok_or_else(|| {
            Error::shape(
                format!("experts of {path}"),
                "no such routed linear in the pool",
                "one of the pool's base model",
            )
        })?;
        let spec = &self.spec.sites[site];
        let found = (pair.in_features(), pair.out_features());
        let expected = (spec.in_features as usize, spec.out_features as usize);
        if found != expected {
            return Err(Error::shape(
                format!("expert {} of {path}", pair.expert),
                format!("{} -> {}", found.0, found.1),
                format!("{} -> {}", expected.0, expected.1),
            ));
        }
        if pair.expert >= spec.experts {
            let expected = format!("less than {}, the experts that the pool was made for", spec.experts);
            return Err(Error::shape(format!("expert of {path}"), pair.expert, expected));
        }
        if pair.rank() > self.spec.max_rank as usize {
            return Err(Error::Limit {
                what: "rank of the adapter's experts",
                found: pair.rank() as u64,
                limit: self.spec.max_rank.into(),
                hint: " (raise the expert pool's max_rank)",
            });
        }
        Ok(site)
    }
}
