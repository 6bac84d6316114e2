//! Where every matrix of every slot lies: pure arithmetic, no device.
//!
//! With addresses ([`WeightLayout::SlotMajor`]) slot `k` starts at byte `k * slot_bytes`, so that a
//! slot is one contiguous transfer; a device that caps an allocation gets several blocks, each slot
//! whole inside one. With bindings ([`WeightLayout::SiteMajor`]) each site's A matrices of all slots
//! form a plane, so do its B matrices, and the planes of a layer's sites are neighbours: a launch
//! binds a few of them. A plane too large for a binding is cut into pieces of whole slots.

use std::ops::Range;

use super::shape::{Part, SiteKind, SiteShape, stride};
use crate::backend::{Caps, WeightLayout};
use crate::contract::{MAX_RANK, MAX_TOKEN_ROWS, vector_len};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Planes and slots start at multiples of this many bytes.
const ALIGN: u64 = 256;

/// What the layout is made for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Order of the bytes.
    pub order: WeightLayout,
    /// Largest block in bytes.
    pub max_alloc: u64,
    /// Largest range of a block that one launch can use.
    pub max_binding: u64,
}

impl From<&Caps> for Limits {
    fn from(caps: &Caps) -> Self {
        // A binding begins at a multiple of `binding_align`: what lies before the range counts too.
        let max_binding =
            if caps.max_binding == u64::MAX { u64::MAX } else { caps.max_binding.saturating_sub(caps.binding_align) };
        Self { order: caps.layout, max_alloc: caps.max_alloc, max_binding }
    }
}

/// A byte range of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which block.
    pub block: usize,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// What one launch can reach: some of the sites asked for, some of the slots, in one range of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Indices into the list of sites that was asked for.
    pub sites: Range<usize>,
    /// Slots whose matrices lie in `place`.
    pub slots: Range<u32>,
    /// The range.
    pub place: Place,
}

/// Some slots of one plane, in one block.
#[derive(Clone, Copy, Debug)]
struct Piece {
    block: usize,
    offset: u64,
}

#[derive(Clone, Debug)]
struct Site {
    shape: SiteShape,
    a_bytes: u64,
    b_bytes: u64,
    /// Slot-major: offsets of A and B in a slot.
    in_slot: [u64; 2],
    /// Site-major: pieces of the A plane and of the B plane.
    pieces: [Vec<Piece>; 2],
}

/// The layout of a pool.
#[derive(Clone, Debug)]
pub struct Layout {
    limits: Limits,
    max_rank: u32,
    slots: u32,
    dtype: DType,
    sites: Vec<Site>,
    slot_bytes: u64,
    /// Slots in a block (slot-major).
    block_slots: u32,
    blocks: Vec<u64>,
}

impl Layout {
    /// Lays out `slots` slots, each with room for rank `max_rank` at every site, stored as `dtype`.
    ///
    /// # Errors
    /// [`Error::Limit`] when `max_rank` is not in 1..=[`MAX_RANK`], there is no slot, or one slot
    /// (slot-major) or one matrix (site-major) is larger than a block may be.
    pub fn new(sites: &[SiteShape], max_rank: u32, slots: u32, dtype: DType, limits: Limits) -> Result<Self> {
        if max_rank == 0 || max_rank > MAX_RANK {
            let hint = " (max_rank is 1..=512)";
            return Err(Error::Limit { what: "max_rank", found: max_rank.into(), limit: MAX_RANK.into(), hint });
        }
        if slots == 0 || slots > i32::MAX as u32 {
            return Err(Error::Limit { what: "max_loras", found: slots.into(), limit: i32::MAX as u64, hint: "" });
        }
        for shape in sites {
            if let SiteKind::TokenRows { capacity, .. } = shape.kind
                && !(1..=MAX_TOKEN_ROWS).contains(&capacity)
            {
                let hint = " (token_rows is 1..=65535)";
                let (found, limit) = (capacity.into(), MAX_TOKEN_ROWS.into());
                return Err(Error::Limit { what: "token_rows", found, limit, hint });
            }
        }
        let element = dtype.size();
        let mut slot_bytes = 0;
        let sites = sites
            .iter()
            .map(|&shape| {
                let [a_bytes, b_bytes] = shape.bytes(max_rank, element);
                let in_slot = [slot_bytes, slot_bytes + a_bytes];
                slot_bytes += a_bytes + b_bytes;
                Site { shape, a_bytes, b_bytes, in_slot, pieces: [Vec::new(), Vec::new()] }
            })
            .collect();
        let mut layout = Self {
            limits,
            max_rank,
            slots,
            dtype,
            sites,
            slot_bytes: slot_bytes.next_multiple_of(ALIGN),
            block_slots: slots,
            blocks: Vec::new(),
        };
        match limits.order {
            WeightLayout::SlotMajor => layout.place_slots()?,
            WeightLayout::SiteMajor => layout.place_planes()?,
        }
        Ok(layout)
    }

    fn place_slots(&mut self) -> Result<()> {
        let limit = self.limits.max_alloc.min(self.limits.max_binding);
        let fit = limit / self.slot_bytes.max(1);
        if fit == 0 {
            let hint = " (lower max_rank)";
            return Err(Error::Limit { what: "size of a slot in bytes", found: self.slot_bytes, limit, hint });
        }
        self.block_slots = fit.min(self.slots.into()) as u32;
        let mut left = self.slots;
        while left > 0 {
            let here = left.min(self.block_slots);
            self.blocks.push(u64::from(here) * self.slot_bytes);
            left -= here;
        }
        Ok(())
    }

    fn place_planes(&mut self) -> Result<()> {
        let limit = self.limits.max_alloc.min(self.limits.max_binding);
        let mut first = 0;
        while first < self.sites.len() {
            let layer = self.sites[first].shape.layer;
            let last = first + self.sites[first..].iter().take_while(|s| s.shape.layer == layer).count();
            for part in [Part::A, Part::B] {
                // Planes that one launch may want together start a new block together.
                let together: u64 = (first..last).map(|s| self.plane_bytes(s, part)).sum();
                if self.room() < together && together <= limit {
                    self.blocks.push(0);
                }
                for site in first..last {
                    self.place_plane(site, part, limit)?;
                }
            }
            first = last;
        }
        Ok(())
    }

    /// Bytes left in the last block.
    fn room(&self) -> u64 {
        self.blocks.last().map_or(0, |used| self.limits.max_alloc - used)
    }

    fn plane_bytes(&self, site: usize, part: Part) -> u64 {
        (self.part_bytes(site, part) * u64::from(self.slots)).next_multiple_of(ALIGN)
    }

    fn place_plane(&mut self, site: usize, part: Part, limit: u64) -> Result<()> {
        let bytes = self.part_bytes(site, part);
        let per_piece = self.piece_slots(site, part);
        if per_piece == 0 {
            let hint = " (lower max_rank)";
            return Err(Error::Limit { what: "size of a matrix in bytes", found: bytes, limit, hint });
        }
        let mut left = self.slots;
        while left > 0 {
            let here = left.min(per_piece);
            let len = (u64::from(here) * bytes).next_multiple_of(ALIGN);
            if self.room() < len {
                self.blocks.push(0);
            }
            let block = self.blocks.len() - 1;
            self.sites[site].pieces[part as usize].push(Piece { block, offset: self.blocks[block] });
            self.blocks[block] += len;
            left -= here;
        }
        Ok(())
    }

    /// Slots in a piece of a plane.
    fn piece_slots(&self, site: usize, part: Part) -> u32 {
        // A piece is rounded up to ALIGN: keep room for that.
        let limit = self.limits.max_alloc.min(self.limits.max_binding) / ALIGN * ALIGN;
        (limit / self.part_bytes(site, part).max(1)).min(self.slots.into()) as u32
    }

    /// Sizes in bytes of the allocations to make, in order.
    pub fn blocks(&self) -> &[u64] {
        &self.blocks
    }

    /// Bytes that one slot takes over all sites.
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Largest rank.
    pub fn max_rank(&self) -> u32 {
        self.max_rank
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What `site` is.
    pub fn kind(&self, site: usize) -> SiteKind {
        self.sites[site].shape.kind
    }

    /// Elements between rows of A at `site`: `in_features` rounded up to 8, or an embedding's `max_rank`.
    pub fn a_stride(&self, site: usize) -> u32 {
        self.sites[site].shape.a_stride(self.max_rank)
    }

    /// Elements between rows of B, at every site: `max_rank` rounded up to 8.
    pub fn b_stride(&self) -> u32 {
        stride(self.max_rank)
    }

    /// Bytes from the start of B at `site` to the gains of a pair that has vectors, and to its offsets; `None` where
    /// there is no room for them.
    pub fn vectors(&self, site: usize) -> Option<[u64; 2]> {
        let Site { shape, b_bytes, .. } = &self.sites[site];
        let len = 4 * vector_len(shape.out_features);
        shape.vectors.then(|| [b_bytes - 2 * len, b_bytes - len])
    }

    /// Bytes that a slot has for one matrix of `site`, vectors included.
    pub fn part_bytes(&self, site: usize, part: Part) -> u64 {
        match part {
            Part::A => self.sites[site].a_bytes,
            Part::B => self.sites[site].b_bytes,
        }
    }

    /// Where a matrix lies. `slot` and `site` must be in range.
    pub fn place(&self, slot: u32, site: usize, part: Part) -> Place {
        let len = self.part_bytes(site, part);
        match self.limits.order {
            WeightLayout::SlotMajor => Place {
                block: (slot / self.block_slots) as usize,
                offset: u64::from(slot % self.block_slots) * self.slot_bytes + self.sites[site].in_slot[part as usize],
                len,
            },
            WeightLayout::SiteMajor => {
                let per_piece = self.piece_slots(site, part);
                let piece = self.sites[site].pieces[part as usize][(slot / per_piece) as usize];
                Place { block: piece.block, offset: piece.offset + u64::from(slot % per_piece) * len, len }
            }
        }
    }

    /// The fewest ranges that together hold one matrix of every slot of `sites`; usually one.
    pub fn windows(&self, sites: &[usize], part: Part) -> Vec<Window> {
        match self.limits.order {
            WeightLayout::SlotMajor => self
                .blocks
                .iter()
                .enumerate()
                .map(|(block, &len)| {
                    let first = block as u32 * self.block_slots;
                    let slots = first..(first + self.block_slots).min(self.slots);
                    Window { sites: 0..sites.len(), slots, place: Place { block, offset: 0, len } }
                })
                .collect(),
            WeightLayout::SiteMajor => self.shared_window(sites, part).map_or_else(
                || (0..sites.len()).flat_map(|i| self.site_windows(i, sites[i], part)).collect(),
                |w| vec![w],
            ),
        }
    }

    /// One range over the planes of all `sites`, where they lie close enough.
    fn shared_window(&self, sites: &[usize], part: Part) -> Option<Window> {
        let planes = sites.iter().map(|&s| match self.sites[s].pieces[part as usize][..] {
            [piece] => Some((piece, self.plane_bytes(s, part))),
            _ => None,
        });
        let planes: Vec<_> = planes.collect::<Option<_>>()?;
        let block = planes.first()?.0.block;
        let start = planes.iter().map(|(p, _)| p.offset).min()?;
        let end = planes.iter().map(|(p, len)| p.offset + len).max()?;
        let together = planes.iter().all(|(p, _)| p.block == block) && end - start <= self.limits.max_binding;
        let place = Place { block, offset: start, len: end - start };
        together.then_some(Window { sites: 0..sites.len(), slots: 0..self.slots, place })
    }

    /// The pieces of one plane, a window each.
    fn site_windows(&self, index: usize, site: usize, part: Part) -> Vec<Window> {
        let per_piece = self.piece_slots(site, part);
        let window = |(i, piece): (usize, &Piece)| {
            let first = i as u32 * per_piece;
            let slots = first..(first + per_piece).min(self.slots);
            let len = u64::from(slots.end - slots.start) * self.part_bytes(site, part);
            Window { sites: index..index + 1, slots, place: Place { block: piece.block, offset: piece.offset, len } }
        };
        self.sites[site].pieces[part as usize].iter().enumerate().map(window).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn limits(order: WeightLayout, max_alloc: u64, max_binding: u64) -> Limits {
        Limits { order, max_alloc, max_binding }
    }

    fn shapes() -> impl Strategy<Value = Vec<SiteShape>> {
        let site = (0..3usize, 1..400u32, 1..400u32);
        (prop::collection::vec(site, 1..9), any::<bool>()).prop_map(|(mut sites, vectors)| {
            sites.sort();
            let kinds = [
                SiteKind::Linear,
                SiteKind::Embedding,
                SiteKind::TokenRows { capacity: 5, dtype: DType::F32 },
                SiteKind::TokenRows { capacity: 70, dtype: DType::Bf16 },
            ];
            let shape = |(layer, i, o)| {
                let kind = kinds[(i / 3) as usize % 4];
                let vectors = vectors && kind == SiteKind::Linear;
                SiteShape { layer, kind, in_features: i, out_features: o, vectors }
            };
            sites.into_iter().map(shape).collect()
        })
    }

    proptest! {
        #[test]
        fn no_two_matrices_share_a_byte_and_all_lie_in_their_block(
            sites in shapes(), rank in 1..70u32, slots in 1..9u32, site_major: bool, alloc in 18..24u32, half in 0..17u32,
        ) {
            let max_alloc = (1u64 << alloc) - u64::from(half);
            let order = if site_major { WeightLayout::SiteMajor } else { WeightLayout::SlotMajor };
            let max_binding = if site_major { max_alloc / 2 } else { u64::MAX };
            let Ok(layout) = Layout::new(&sites, rank, slots, DType::Bf16, limits(order, max_alloc, max_binding)) else {
                return Ok(());
            };
            prop_assert!(layout.blocks().iter().all(|b| *b <= max_alloc));
            let mut all: Vec<Place> = (0..slots)
                .flat_map(|k| (0..sites.len()).flat_map(move |s| [Part::A, Part::B].map(|p| (k, s, p))))
                .map(|(k, s, p)| layout.place(k, s, p))
                .collect();
            for place in &all {
                prop_assert!(place.offset % 16 == 0 && place.offset + place.len <= layout.blocks()[place.block]);
            }
            // B of token rows is empty.
            all.retain(|p| p.len > 0);
            all.sort_by_key(|p| (p.block, p.offset));
            for pair in all.windows(2) {
                prop_assert!(pair[0].block != pair[1].block || pair[0].offset + pair[0].len <= pair[1].offset);
            }
        }

        #[test]
        fn windows_hold_every_slot_of_every_site_exactly_once(
            sites in shapes(), rank in 1..70u32, slots in 1..9u32, site_major: bool, alloc in 18..24u32,
        ) {
            let order = if site_major { WeightLayout::SiteMajor } else { WeightLayout::SlotMajor };
            let max_binding = if site_major { 1u64 << (alloc - 1) } else { u64::MAX };
            let Ok(layout) = Layout::new(&sites, rank, slots, DType::F32, limits(order, 1 << alloc, max_binding)) else {
                return Ok(());
            };
            let group: Vec<usize> = (0..sites.len().min(4)).collect();
            for part in [Part::A, Part::B] {
                let windows = layout.windows(&group, part);
                for (i, &site) in group.iter().enumerate() {
                    for slot in 0..slots {
                        let place = layout.place(slot, site, part);
                        let holding = windows.iter().filter(|w| w.sites.contains(&i) && w.slots.contains(&slot));
                        let holding: Vec<_> = holding.collect();
                        prop_assert_eq!(holding.len(), 1);
                        let range = holding[0].place;
                        prop_assert!(range.block == place.block && range.len <= max_binding);
                        prop_assert!(range.offset <= place.offset && place.offset + place.len <= range.offset + range.len);
                    }
                }
            }
        }
    }

    #[test]
    fn a_slot_is_one_contiguous_run_where_addresses_exist() {
        let sites =
            [SiteShape { layer: 0, kind: SiteKind::Linear, in_features: 48, out_features: 80, vectors: false }; 3];
        let layout =
            Layout::new(&sites, 12, 4, DType::Bf16, limits(WeightLayout::SlotMajor, u64::MAX, u64::MAX)).unwrap();
        let mut next = 2 * layout.slot_bytes();
        for site in 0..3 {
            for part in [Part::A, Part::B] {
                let place = layout.place(2, site, part);
                assert_eq!((place.block, place.offset), (0, next));
                next += place.len;
            }
        }
        assert_eq!((layout.a_stride(0), layout.b_stride()), (48, 16));
    }

    #[test]
    fn a_pool_beyond_the_largest_allocation_becomes_several_blocks_of_whole_slots() {
        let sites =
            [SiteShape { layer: 0, kind: SiteKind::Linear, in_features: 4096, out_features: 4096, vectors: false }];
        let layout =
            Layout::new(&sites, 16, 10, DType::Bf16, limits(WeightLayout::SlotMajor, 1 << 20, u64::MAX)).unwrap();
        assert_eq!(layout.slot_bytes(), 2 * 16 * 4096 * 2);
        assert_eq!(layout.blocks().len(), 3);
        assert_eq!(layout.place(9, 0, Part::A).block, 2);
    }

    #[test]
    fn a_plane_beyond_the_binding_limit_is_cut_between_slots() {
        let sites =
            [SiteShape { layer: 0, kind: SiteKind::Linear, in_features: 14336, out_features: 64, vectors: false }];
        let layout =
            Layout::new(&sites, 64, 100, DType::Bf16, limits(WeightLayout::SiteMajor, 256 << 20, 128 << 20)).unwrap();
        let windows = layout.windows(&[0], Part::A);
        assert_eq!(windows.iter().map(|w| w.slots.clone()).collect::<Vec<_>>(), vec![0..73, 73..100]);
    }
}
