//! From an adapter's pairs to the bytes of a slot.

use std::ops::Range;

use super::{Cell, Part, Pool};
use crate::adapter::{Adapter, HostPair};
use crate::backend::{Encoder, HostBuffer};
use crate::error::{Error, Result};
use crate::memory::Region;

/// A slot's new contents in host memory: every byte of a slot, whichever one, and its table entries.
///
/// Made before anything on the device changes; all that can be wrong with an adapter shows here.
#[derive(Debug)]
pub struct SlotImage {
    /// Site after site, A before B: a slot as a slot-major pool has it.
    bytes: HostBuffer,
    /// Of each site that the adapter covers.
    pairs: Vec<Option<Packed>>,
    scale: f32,
}

/// What the tables say of a pair beside its addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed {
    /// True rank.
    pub rank: u32,
    /// Scale of the delta.
    pub scale: f32,
    /// Whether gains and offsets lie behind B.
    pub vectors: bool,
}

/// A part of a slot's image, and the memory of one slot that it goes to.
pub(crate) type Span = (Range<usize>, Region);

impl SlotImage {
    /// Packs `adapter`. Sites that it does not cover, rank tails, row padding and vectors that a pair does not have are
    /// zero, so writing the image leaves no trace of a slot's old adapter.
    ///
    /// # Errors
    /// [`Error::Shape`] for a site that the pool does not have or has in another
    /// shape, or for vectors in a pool without room for them, [`Error::Limit`] for a rank above the pool's, [`Error::Overflow`]
    /// for a value that the pool's type can't hold.
    pub fn new(pool: &Pool, adapter: &Adapter) -> Result<Self> {
        Self::new_in(pool, adapter, HostBuffer::plain(Self::len_in(pool)))
    }

    /// The same in memory of the caller's, [`SlotImage::len_in`] bytes of it.
    ///
    /// # Errors
    /// As [`SlotImage::new`]; [`Error::Shape`] for memory of another length.
    pub fn new_in(pool: &Pool, adapter: &Adapter, mut bytes: HostBuffer) -> Result<Self> {
        let len = Self::len_in(pool);
        if bytes.len() != len {
            return Err(Error::shape("memory of a slot image", bytes.len(), len));
        }
        bytes.fill(0);
        let mut image = Self { bytes, pairs: vec![None; pool.sites().len()], scale: adapter.scale };
        let mut covered: Vec<Option<&HostPair>> = vec![None; pool.sites().len()];
        for pair in &adapter.pairs {
            covered[pool.fit(pair)?] = Some(pair);
        }
        let layout = pool.layout();
        let dtype = layout.dtype();
        let element = dtype.size() as usize;
        let mut start = 0;
        for (site, pair) in covered.into_iter().enumerate() {
            for part in [Part::A, Part::B] {
                let end = start + layout.part_bytes(site, part) as usize;
                if let Some(pair) = pair {
                    let (matrix, stride) = match part {
                        Part::A => (&pair.a, layout.a_stride(site)),
                        Part::B => (&pair.b, layout.b_stride()),
                    };
                    let values = matrix.to(dtype).map_err(|(index, value)| {
                        let tensor = format!("lora_{part:?} of {}", pair.site.path);
                        Error::Overflow { tensor, index, value, dtype }
                    })?;
                    // Of B no more rows than it has: vectors may follow.
                    let rows = image.bytes[start..end].chunks_mut(stride as usize * element);
                    for (to, from) in rows.zip(values.chunks(matrix.cols * element)) {
                        to[..from.len()].copy_from_slice(from);
                    }
                    if let (Part::B, Some(vectors), Some(at)) = (part, &pair.vectors, layout.vectors(site)) {
                        for (values, at) in [&vectors.gain, &vectors.offset].into_iter().zip(at) {
                            let to = &mut image.bytes[start + at as usize..end];
                            to[..4 * values.len()].copy_from_slice(bytemuck::cast_slice(values));
                        }
                    }
                    let (rank, vectors) = (pair.rank() as u32, pair.vectors.is_some());
                    image.pairs[site] = Some(Packed { rank, scale: pair.scale, vectors });
                }
                start = end;
            }
        }
        Ok(image)
    }

    /// An image with nothing in it.
    pub fn empty(pool: &Pool) -> Self {
        let bytes = HostBuffer::plain(Self::len_in(pool));
        Self { bytes, pairs: vec![None; pool.sites().len()], scale: 0.0 }
    }

    /// Bytes of an image for a slot of `pool`.
    pub fn len_in(pool: &Pool) -> usize {
        let layout = pool.layout();
        let sites = 0..pool.sites().len();
        sites.map(|site| layout.part_bytes(site, Part::A) + layout.part_bytes(site, Part::B)).sum::<u64>() as usize
    }

    /// The memory, for another image.
    pub fn into_memory(self) -> HostBuffer {
        self.bytes
    }

    /// The slot's bytes: site after site, A before B.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The adapter's own scale, where no pattern says otherwise.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Table entries, one a site, once the image is in `slot`.
    ///
    /// # Errors
    /// [`Error::UnknownSlot`].
    pub fn cells(&self, pool: &Pool, slot: u32) -> Result<Vec<Cell>> {
        let cell = |(site, pair): (usize, &Option<Packed>)| match *pair {
            Some(pair) => pool.cell(slot, site, pair),
            None => Ok(Cell::EMPTY),
        };
        self.pairs.iter().enumerate().map(cell).collect()
    }

    /// Records the writes of the image to `slot`. Table entries stay as they are.
    ///
    /// # Errors
    /// [`Error::UnknownSlot`], or the encoder's.
    pub fn write(&self, pool: &Pool, slot: u32, encoder: &mut dyn Encoder) -> Result<()> {
        pool.spans(slot)?.into_iter().try_for_each(|(range, region)| encoder.write(&region, &self.bytes[range]))
    }
}
