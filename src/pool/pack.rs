//! From an adapter's pairs to the bytes of a slot.

use super::{Cell, Part, Pool};
use crate::adapter::{Adapter, HostPair};
use crate::backend::Encoder;
use crate::error::{Error, Result};
use crate::memory::Region;

/// A slot's new contents in host memory: every byte of the slot, and its table entries.
///
/// Made before anything on the device changes; all that can be wrong with an adapter shows here.
#[derive(Debug)]
pub struct SlotImage {
    slot: u32,
    runs: Vec<(Region, Vec<u8>)>,
    cells: Vec<Cell>,
    scale: f32,
}

impl SlotImage {
    /// Packs `adapter` for `slot`. Sites that it does not cover, rank tails and row padding are zero,
    /// so writing the image leaves no trace of the slot's old adapter.
    ///
    /// # Errors
    /// [`Error::Shape`] for a site that the pool does not have or has in another shape, [`Error::Limit`]
    /// for a rank above the pool's, [`Error::Overflow`] for a value that the pool's type can't hold.
    pub fn new(pool: &Pool, slot: u32, adapter: &Adapter) -> Result<Self> {
        pool.check_slot(slot.into())?;
        let layout = pool.layout();
        let mut pairs: Vec<Option<&HostPair>> = vec![None; pool.sites().len()];
        for pair in &adapter.pairs {
            pairs[pool.fit(pair)?] = Some(pair);
        }
        let mut image = Self { slot, runs: Vec::new(), cells: vec![Cell::EMPTY; pairs.len()], scale: adapter.scale };
        for (site, pair) in pairs.iter().enumerate() {
            for part in [Part::A, Part::B] {
                let region = pool.part(slot, site, part)?;
                let bytes = image.reserve(region, layout.part_bytes(site, part) as usize)?;
                if let Some(pair) = pair {
                    let (matrix, stride) = match part {
                        Part::A => (&pair.a, layout.a_stride(site)),
                        Part::B => (&pair.b, layout.b_stride()),
                    };
                    let dtype = layout.dtype();
                    let values = matrix.to(dtype).map_err(|(index, value)| {
                        let tensor = format!("lora_{part:?} of {}", pair.site.path);
                        Error::Overflow { tensor, index, value, dtype }
                    })?;
                    let element = dtype.size() as usize;
                    let (row, step) = (matrix.cols * element, stride as usize * element);
                    if row > 0 {
                        for (from, to) in values.chunks(row).zip(bytes.chunks_mut(step)) {
                            to[..row].copy_from_slice(from);
                        }
                    }
                }
            }
            if let Some(pair) = pair {
                image.cells[site] = pool.cell(slot, site, pair.rank() as u32, pair.scale)?;
            }
        }
        Ok(image)
    }

    /// An image with nothing in it.
    ///
    /// # Errors
    /// [`Error::UnknownSlot`].
    pub fn empty(pool: &Pool, slot: u32) -> Result<Self> {
        pool.check_slot(slot.into())?;
        let mut image = Self { slot, runs: Vec::new(), cells: vec![Cell::EMPTY; pool.sites().len()], scale: 0.0 };
        for site in 0..pool.sites().len() {
            for part in [Part::A, Part::B] {
                let region = pool.part(slot, site, part)?;
                image.reserve(region, pool.layout().part_bytes(site, part) as usize)?;
            }
        }
        Ok(image)
    }

    /// Zero bytes for `region`, as part of the last run where it goes on from there.
    fn reserve(&mut self, region: Region, len: usize) -> Result<&mut [u8]> {
        let joined = self.runs.last().and_then(|(last, _)| {
            let adjacent = last.offset() + last.len() == region.offset();
            adjacent.then(|| last.union(&region)).flatten()
        });
        match (joined, self.runs.last_mut()) {
            (Some(union), Some((last, bytes))) => {
                *last = union;
                bytes.resize(bytes.len() + len, 0);
            }
            _ => self.runs.push((region, vec![0; len])),
        }
        let (_, bytes) = self.runs.last_mut().ok_or_else(|| Error::Input("empty run".into()))?;
        let start = bytes.len() - len;
        Ok(&mut bytes[start..])
    }

    /// Bytes that [`SlotImage::fill`] moves.
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(|(_, bytes)| bytes.len() as u64).sum()
    }

    /// Records the writes of the slot's bytes. Its table entries stay as they are.
    ///
    /// # Errors
    /// The encoder's.
    pub fn fill(&self, encoder: &mut dyn Encoder) -> Result<()> {
        self.runs.iter().try_for_each(|(region, bytes)| encoder.write(region, bytes))
    }

    /// Table entries of the slot, one a site.
    pub fn cells(&self) -> &[Cell] {
        &self.cells
    }

    /// The adapter's own scale, where no pattern says otherwise.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The slot that the image was made for.
    pub fn slot(&self) -> u32 {
        self.slot
    }
}
