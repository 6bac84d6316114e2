//! The pool: equal slots at fixed addresses, and the tables that name their contents.

mod experts;
mod layout;
mod pack;
mod rows;
mod shape;
mod slots;
mod spec;
mod staging;
mod tables;

use std::collections::BTreeMap;

pub(crate) use experts::ExpertWindow;
pub use experts::{ExpertImage, ExpertPool, ExpertSite, ExpertSpec};
pub use layout::{Layout, Limits, Place, Window};
use pack::Packed;
pub use pack::SlotImage;
pub(crate) use pack::write_tokens;
pub use rows::{Capacity, Plan};
pub use shape::{Part, SiteKind, SiteShape};
pub use slots::{Claim, Phase, Slot, Slots};
pub use spec::{PoolSpec, SiteSpec, TOKEN_ROWS};
pub use staging::Staging;
pub use tables::{Cell, SiteTables, Tables};

use crate::adapter::{HostPair, HostTokens, LoraModule, RowVectors};
use crate::backend::{GpuBackend, Record, Ticket};
use crate::error::{Error, Result};
use crate::memory::{DevicePtr, Region};

/// Device memory for `max_loras` adapters over all sites of a model. Its addresses never change.
#[derive(Debug)]
pub struct Pool {
    spec: PoolSpec,
    layout: Layout,
    blocks: Vec<Region>,
    tables: Tables,
    /// By layer, module, and whether the site holds token rows.
    index: BTreeMap<(usize, LoraModule, bool), usize>,
    experts: Option<ExpertPool>,
}

impl Pool {
    /// Allocates a pool, all slots empty.
    ///
    /// # Errors
    /// [`Error::Limit`] when the spec doesn't fit the device, [`Error::Shape`] when it names no site or one twice,
    /// [`Error::OutOfMemory`] when the device has no room.
    pub fn new(backend: &dyn GpuBackend, spec: PoolSpec) -> Result<Self> {
        Self::with_experts(backend, spec, None)
    }

    /// The same with memory for routed experts beside it, where `experts` says for which; there may then be no other site.
    ///
    /// # Errors
    /// As [`Pool::new`] and [`ExpertPool::new`].
    pub fn with_experts(backend: &dyn GpuBackend, spec: PoolSpec, experts: Option<ExpertSpec>) -> Result<Self> {
        if spec.sites.is_empty() && experts.is_none() {
            return Err(Error::shape("sites of a pool", "none", "at least one"));
        }
        let layout =
            Layout::new(&spec.shapes(), spec.max_rank, spec.max_loras, spec.dtype, Limits::from(backend.caps()))?;
        let mut index = BTreeMap::new();
        for (i, site) in spec.sites.iter().enumerate() {
            if index.insert((site.id.layer, site.id.module.clone(), site.is_token_rows()), i).is_some() {
                return Err(Error::shape("sites of a pool", format!("{} twice", site.id.path), "each site once"));
            }
        }
        // Without sites a block is empty, but has an address.
        let blocks = layout.blocks().iter().map(|len| backend.alloc((*len).max(16), "pool")).collect::<Result<_>>()?;
        let tables = Tables::new(backend, spec.sites.len() as u32, spec.max_loras)?;
        let experts =
            experts.map(|experts| ExpertPool::new(backend, experts, spec.max_loras, spec.dtype)).transpose()?;
        Ok(Self { spec, layout, blocks, tables, index, experts })
    }

    /// What the pool was made for.
    pub fn spec(&self) -> &PoolSpec {
        &self.spec
    }

    /// The sites, in the order of their indices.
    pub fn sites(&self) -> &[SiteSpec] {
        &self.spec.sites
    }

    /// Index of a site for LoRA: a linear or an embedding.
    pub fn site(&self, layer: usize, module: &LoraModule) -> Option<usize> {
        self.index.get(&(layer, module.clone(), false)).copied()
    }

    /// Index of a site for token rows.
    pub fn token_site(&self, layer: usize, module: &LoraModule) -> Option<usize> {
        self.index.get(&(layer, module.clone(), true)).copied()
    }

    /// Index of the site for LoRA with this module path.
    pub fn site_at(&self, path: &str) -> Option<usize> {
        self.spec.sites.iter().position(|s| &*s.id.path == path && !s.is_token_rows())
    }

    /// Index of the site for token rows with this module path.
    pub fn token_site_at(&self, path: &str) -> Option<usize> {
        self.spec.sites.iter().position(|s| &*s.id.path == path && s.is_token_rows())
    }

    /// Where everything lies.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The tables.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// The memory of routed experts, if there is any.
    pub fn experts(&self) -> Option<&ExpertPool> {
        self.experts.as_ref()
    }

    /// [`Pool::publish`] for an image whose bytes `before` writes or copies: the slot's entries at all sites and of all
    /// experts change at once.
    ///
    /// # Errors
    /// As [`Pool::publish`].
    pub fn publish_image(
        &self,
        gpu: &dyn GpuBackend,
        slot: u32,
        image: &SlotImage,
        before: Record<'_>,
    ) -> Result<Ticket> {
        let cells = image.cells(self, slot)?;
        let Some(experts) = &self.experts else {
            return self.publish(gpu, slot, &cells, image.scale(), before);
        };
        let old = experts.set(slot, image.experts())?;
        let sent = self.publish(gpu, slot, &cells, image.scale(), &mut |encoder| {
            before(encoder)?;
            experts.publish(slot, encoder)
        });
        if sent.is_err() {
            experts.restore(slot, old);
        }
        sent
    }

    /// Empties a slot's entries, at all sites and of all experts.
    ///
    /// # Errors
    /// As [`Pool::publish`].
    pub(crate) fn clear(&self, gpu: &dyn GpuBackend, slot: u32) -> Result<Ticket> {
        let cells = vec![Cell::EMPTY; self.sites().len()];
        let Some(experts) = &self.experts else { return self.publish(gpu, slot, &cells, 0.0, &mut |_| Ok(())) };
        self.check_slot(slot.into())?;
        let old = experts.set(slot, None)?;
        let sent = self.publish(gpu, slot, &cells, 0.0, &mut |encoder| experts.publish(slot, encoder));
        if sent.is_err() {
            experts.restore(slot, old);
        }
        sent
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.layout.blocks().iter().sum()
    }

    /// The allocations, in the layout's order; one where the device allows it.
    pub fn blocks(&self) -> &[Region] {
        &self.blocks
    }

    /// Memory of one matrix of one slot.
    ///
    /// # Errors
    /// [`Error::UnknownSlot`].
    pub fn part(&self, slot: u32, site: usize, part: Part) -> Result<Region> {
        self.check_slot(slot.into())?;
        self.region(self.layout.place(slot, site, part))
    }

    /// Runs `before`, then publishes `slot`'s new table entries, one a site, and its scale: one
    /// submission, so that work before it sees all of the old and work after it all of the new.
    ///
    /// # Errors
    /// The backend's, or `before`'s; the tables are then as they were.
    pub fn publish(
        &self,
        gpu: &dyn GpuBackend,
        slot: u32,
        cells: &[Cell],
        scale: f32,
        before: Record<'_>,
    ) -> Result<Ticket> {
        self.check_slot(slot.into())?;
        let old: Vec<Cell> = (0..cells.len()).map(|site| self.tables.get(slot, site)).collect();
        let old_scale = self.tables.slot_scale(slot);
        self.tables.set(slot, cells, scale);
        let sent = gpu.submit(&mut |encoder| {
            before(encoder)?;
            self.tables.publish(encoder)
        });
        if sent.is_err() {
            self.tables.set(slot, &old, old_scale);
        }
        sent
    }

    /// Where the parts of a [`SlotImage`] go in `slot`, neighbours joined: one span where a slot is contiguous.
    pub(crate) fn spans(&self, slot: u32) -> Result<Vec<pack::Span>> {
        let mut spans: Vec<pack::Span> = Vec::new();
        let mut start = 0;
        for site in 0..self.sites().len() {
            for part in [Part::A, Part::B] {
                let region = self.part(slot, site, part)?;
                let end = start + region.len() as usize;
                if region.is_empty() {
                    continue;
                }
                match spans.last_mut() {
                    Some((range, last))
                        if last.offset() + last.len() == region.offset() && last.same_allocation(&region) =>
                    {
                        range.end = end;
                        *last = last.union(&region).unwrap_or(region);
                    }
                    _ => spans.push((start..end, region)),
                }
                start = end;
            }
        }
        Ok(spans)
    }

    /// Memory at a place of the layout.
    pub(crate) fn region(&self, place: Place) -> Result<Region> {
        self.blocks[place.block].slice(place.offset, place.len)
    }

    /// The table entry for a pair in `slot`.
    pub(crate) fn cell(&self, slot: u32, site: usize, pair: Packed) -> Result<Cell> {
        let at = |part| self.part(slot, site, part).map(|r| r.ptr());
        let Packed { rank, scale, vectors } = pair;
        let b = if self.spec.sites[site].is_token_rows() { DevicePtr::NULL } else { at(Part::B)? };
        Ok(Cell { a: at(Part::A)?, b, rank, scale, vectors })
    }

    pub(crate) fn check_slot(&self, slot: i64) -> Result<()> {
        if (0..i64::from(self.spec.max_loras)).contains(&slot) {
            return Ok(());
        }
        Err(Error::UnknownSlot { slot, slots: self.spec.max_loras as usize })
    }

    /// Index of the site that `pair` belongs to, if the pool can hold it there.
    pub(crate) fn fit(&self, pair: &HostPair) -> Result<usize> {
        let path = &pair.site.path;
        let site = self.site(pair.site.layer, &pair.site.module).ok_or_else(|| {
            Error::shape(format!("site {path}"), "no such site in the pool", "a site of the pool's base model")
        })?;
        let spec = &self.spec.sites[site];
        if pair.embedding != (spec.kind == SiteKind::Embedding) {
            let kind = |embedding: bool| if embedding { "an embedding" } else { "a linear" };
            return Err(Error::shape(format!("site {path}"), kind(pair.embedding), kind(!pair.embedding)));
        }
        let found = (pair.in_features(), pair.out_features());
        let expected = (spec.in_features as usize, spec.out_features as usize);
        if found != expected {
            return Err(Error::shape(
                format!("site {path}"),
                format!("{} -> {}", found.0, found.1),
                format!("{} -> {}", expected.0, expected.1),
            ));
        }
        if pair.rank() > self.spec.max_rank as usize {
            return Err(Error::Limit {
                what: "rank of the adapter",
                found: pair.rank() as u64,
                limit: self.spec.max_rank.into(),
                hint: " (raise max_rank)",
            });
        }
        if let Some(RowVectors { gain, offset }) = &pair.vectors {
            if self.layout.vectors(site).is_none() {
                return Err(Error::shape(
                    format!("site {path}"),
                    "gains and offsets (lora_bias or DoRA)",
                    "none, since the pool was made without room for them (set PoolSpec::vectors)",
                ));
            }
            let lens = [gain.len(), offset.len()];
            if lens != [pair.out_features(); 2] {
                let expected = format!("{} of each, one an output", pair.out_features());
                return Err(Error::shape(format!("gains and offsets of site {path}"), format!("{lens:?}"), expected));
            }
        }
        Ok(site)
    }

    /// Index of the site that `tokens` belong to, if the pool can hold them there.
    pub(crate) fn fit_tokens(&self, tokens: &HostTokens) -> Result<usize> {
        let path = &tokens.site.path;
        let site = self.token_site(tokens.site.layer, &tokens.site.module).ok_or_else(|| {
            let expected = "a pool with room for token rows there";
            Error::shape(format!("token rows of {path}"), "no such site in the pool", expected)
        })?;
        let spec = &self.spec.sites[site];
        let SiteKind::TokenRows { capacity, .. } = spec.kind else { unreachable!("a site for token rows") };
        let found = (tokens.rows.cols, tokens.vocabulary);
        let expected = (spec.in_features as usize, spec.out_features as usize);
        if found != expected {
            let said = |(width, vocabulary): (usize, usize)| format!("{vocabulary} rows of {width}");
            return Err(Error::shape(format!("table {path}"), said(found), said(expected)));
        }
        if tokens.ids.len() > capacity as usize {
            return Err(Error::Limit {
                what: "number of token rows that the adapter replaces",
                found: tokens.ids.len() as u64,
                limit: capacity.into(),
                hint: " (raise token_rows)",
            });
        }
        Ok(site)
    }
}
