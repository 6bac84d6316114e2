//! From an adapter's pairs to the bytes of a slot.

use std::ops::Range;

use super::{Cell, ExpertImage, Part, Pool, SiteKind};
use crate::adapter::{Adapter, HostMatrix, HostPair, HostTokens};
use crate::backend::{Encoder, HostBuffer};
use crate::contract::overlay_ids_bytes;
use crate::dtype::DType;
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
    experts: Option<ExpertImage>,
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
    /// shape, or for vectors in a pool without room for them, and for an adapter of which it is not yet known which token
    /// rows it replaces ([`Adapter::raw_tokens`]); [`Error::Limit`] for a rank or a number of token rows above the pool's,
    /// [`Error::Overflow`] for a value that the pool's type can't hold.
    pub fn new(pool: &Pool, adapter: &Adapter) -> Result<Self> {
        Self::new_in(pool, adapter, HostBuffer::plain(Self::len_in(pool)))
    }

    /// The same in memory of the caller's, [`SlotImage::len_in`] bytes of it.
    ///
    /// # Errors
    /// As [`SlotImage::new`]; [`Error::Shape`] for memory of another length.
    pub fn new_in(pool: &Pool, adapter: &Adapter, bytes: HostBuffer) -> Result<Self> {
        if let Some(raw) = adapter.raw_tokens.first() {
            let expected = "the served tables, or the base that the adapter is loaded with";
            return Err(Error::shape(format!("token rows of {}", raw.site.path), "no table to compare with", expected));
        }
        Self::of_known(pool, adapter, bytes)
    }

    /// The same, without what is not yet known of the token rows.
    pub(crate) fn of_known(pool: &Pool, adapter: &Adapter, mut bytes: HostBuffer) -> Result<Self> {
        let len = Self::len_in(pool);
        if bytes.len() != len {
            return Err(Error::shape("memory of a slot image", bytes.len(), len));
        }
        bytes.fill(0);
        let experts = match (pool.experts(), adapter.experts.first()) {
            (Some(experts), Some(_)) => Some(ExpertImage::new(experts, adapter)?),
            (None, Some(pair)) => {
                return Err(Error::shape(
                    format!("experts of {}", pair.site.path),
                    "a pool without experts",
                    "one that was made for them (Pool::with_experts)",
                ));
            }
            (_, None) => None,
        };
        let mut image = Self { bytes, pairs: vec![None; pool.sites().len()], scale: adapter.scale, experts };
        let mut covered: Vec<Option<&HostPair>> = vec![None; pool.sites().len()];
        for pair in &adapter.pairs {
            covered[pool.fit(pair)?] = Some(pair);
        }
        let mut replaced: Vec<Option<&HostTokens>> = vec![None; pool.sites().len()];
        for tokens in &adapter.tokens {
            replaced[pool.fit_tokens(tokens)?] = Some(tokens);
        }
        let layout = pool.layout();
        let dtype = layout.dtype();
        let mut start = 0;
        for (site, (pair, tokens)) in covered.into_iter().zip(replaced).enumerate() {
            for part in [Part::A, Part::B] {
                let end = start + layout.part_bytes(site, part) as usize;
                let to = &mut image.bytes[start..end];
                start = end;
                if let Some(tokens) = tokens {
                    write_tokens(pool, site, tokens, to)?;
                    image.pairs[site] = Some(Packed { rank: tokens.ids.len() as u32, scale: 1.0, vectors: false });
                    break; // B is empty
                }
                let Some(pair) = pair else { continue };
                let (rank, vectors) = (pair.rank() as u32, pair.vectors.is_some());
                image.pairs[site] = Some(Packed { rank, scale: pair.scale, vectors });
                let (matrix, stride) = match part {
                    Part::A => (&pair.a, layout.a_stride(site)),
                    Part::B => (&pair.b, layout.b_stride()),
                };
                let values = matrix.to(dtype).map_err(|(index, value)| {
                    let tensor = format!("lora_{part:?} of {}", pair.site.path);
                    Error::Overflow { tensor, index, value, dtype }
                })?;
                match (layout.kind(site), part) {
                    (SiteKind::Embedding, Part::A) => transpose(&values, matrix, dtype, stride, to),
                    // Of B no more rows than it has: vectors may follow.
                    _ => spread(&values, matrix.cols, dtype, stride, to),
                }
                if let (Part::B, Some(vectors), Some(at)) = (part, &pair.vectors, layout.vectors(site)) {
                    for (values, at) in [&vectors.gain, &vectors.offset].into_iter().zip(at) {
                        to[at as usize..][..4 * values.len()].copy_from_slice(bytemuck::cast_slice(values));
                    }
                }
            }
        }
        Ok(image)
    }

    /// An image with nothing in it.
    pub fn empty(pool: &Pool) -> Self {
        let bytes = HostBuffer::plain(Self::len_in(pool));
        Self { bytes, pairs: vec![None; pool.sites().len()], scale: 0.0, experts: None }
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

    /// The adapter's experts, if it has any.
    pub fn experts(&self) -> Option<&ExpertImage> {
        self.experts.as_ref()
    }

    /// Bytes of host memory that it takes.
    pub fn host_bytes(&self) -> u64 {
        (self.bytes.len() + self.experts.as_ref().map_or(0, |experts| experts.bytes().len())) as u64
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
        pool.spans(slot)?.into_iter().try_for_each(|(range, region)| encoder.write(&region, &self.bytes[range]))?;
        match (pool.experts(), &self.experts) {
            (Some(pool), Some(experts)) => experts.write(pool, slot, encoder),
            _ => Ok(()),
        }
    }
}

/// Rows of `cols` elements, put `stride` elements apart.
fn spread(values: &[u8], cols: usize, dtype: DType, stride: u32, to: &mut [u8]) {
    let element = dtype.size() as usize;
    for (to, from) in to.chunks_mut(stride as usize * element).zip(values.chunks(cols * element)) {
        to[..from.len()].copy_from_slice(from);
    }
}

/// Columns of a matrix as rows, `stride` elements apart.
fn transpose(values: &[u8], matrix: &HostMatrix, dtype: DType, stride: u32, to: &mut [u8]) {
    let element = dtype.size() as usize;
    for (r, row) in values.chunks(matrix.cols * element).enumerate() {
        for (to, from) in to.chunks_mut(stride as usize * element).zip(row.chunks(element)) {
            to[r * element..(r + 1) * element].copy_from_slice(from);
        }
    }
}

/// Ids and rows, as a site for token rows holds them. `to`: as many bytes as a slot has there, all zero.
pub(crate) fn write_tokens(pool: &Pool, site: usize, tokens: &HostTokens, to: &mut [u8]) -> Result<()> {
    let SiteKind::TokenRows { capacity, dtype } = pool.layout().kind(site) else {
        unreachable!("token rows fit a site for them alone")
    };
    let values = tokens.rows.to(dtype).map_err(|(index, value)| {
        let tensor = format!("token rows of {}", tokens.site.path);
        Error::Overflow { tensor, index, value, dtype }
    })?;
    let (ids, rows) = to.split_at_mut(overlay_ids_bytes(capacity) as usize);
    for (to, id) in ids.as_chunks_mut::<4>().0.iter_mut().zip(&tokens.ids) {
        *to = id.to_le_bytes();
    }
    spread(&values, tokens.rows.cols, dtype, pool.layout().a_stride(site), rows);
    Ok(())
}
