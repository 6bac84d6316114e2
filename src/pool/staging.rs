//! A slot's worth of device memory beside the pool: new contents wait there, complete and verified,
//! until they are copied into a slot between two steps.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use super::{ExpertImage, Pool, SlotImage};
use crate::backend::{Encoder, GpuBackend, HostBuffer, Ticket};
use crate::error::{Error, Result};
use crate::memory::Region;

/// Bytes that a chunk's length is a multiple of.
const ALIGN: u64 = 256;

/// Bytes that are read back at a time.
const READBACK: usize = 16 << 20;

/// Bytes that one thread compares at a time.
const COMPARED: usize = 1 << 18;

/// Device memory for one slot image, in chunks where the device caps allocations.
#[derive(Debug)]
pub struct Staging {
    slot: Chunks,
    experts: Chunks,
    /// The last work that touches the chunks.
    used: Mutex<Ticket>,
    /// What bytes are read back to, one verification at a time.
    readback: Mutex<Option<[HostBuffer; 2]>>,
}

/// Memory for so many bytes.
#[derive(Debug)]
struct Chunks {
    regions: Vec<Region>,
    len: usize,
}

impl Staging {
    /// Memory for one slot of `pool`.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(backend: &dyn GpuBackend, pool: &Pool) -> Result<Self> {
        let slot = Chunks::new(backend, pool.layout().slot_bytes())?;
        let experts = Chunks::new(backend, pool.experts().map_or(0, |experts| experts.slot_len()))?;
        // The chunks are zeroed by work that has no ticket of its own.
        let used = Mutex::new(backend.submit(&mut |_| Ok(()))?);
        Ok(Self { slot, experts, used, readback: Mutex::default() })
    }

    /// Sends `image` here, beside the queue; it is complete when the call returns. Waits first for the copies to
    /// slots that [`Staging::busy_until`] has named.
    ///
    /// # Errors
    /// The backend's. No slot has changed.
    pub fn fill(&self, backend: &dyn GpuBackend, image: &SlotImage) -> Result<()> {
        let used = *self.used.lock().unwrap_or_else(PoisonError::into_inner);
        backend.wait(used)?;
        self.slot.fill(backend, image.bytes())?;
        self.experts.fill(backend, image.experts().map_or(&[], ExpertImage::bytes))
    }

    /// What is here is read until the work of `ticket` is done.
    pub fn busy_until(&self, ticket: Ticket) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = ticket;
    }

    /// Reads back what is here and compares it with `image`: one piece is compared while the next one travels. Offsets of
    /// experts count on from those of the slot.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the first byte that differs, or the backend's.
    pub fn verify(&self, backend: &dyn GpuBackend, image: &SlotImage) -> Result<()> {
        let mut readback = self.readback.lock().unwrap_or_else(PoisonError::into_inner);
        let [now, before] = match &mut *readback {
            Some(buffers) => buffers,
            none => {
                let len = READBACK.min(self.slot.len.max(self.experts.len));
                none.insert([backend.alloc_host(len)?, backend.alloc_host(len)?])
            }
        };
        let (mut now, mut before) = (&mut now[..], &mut before[..]);
        let mut last: Option<(usize, &[u8])> = None;
        let mut pieces = self.slot.pieces(0, image.bytes(), now.len())?;
        let experts = image.experts().map_or(&[][..], ExpertImage::bytes);
        pieces.extend(self.experts.pieces(image.bytes().len(), experts, now.len())?);
        for (start, region, expected) in pieces {
            let (sent, same) = rayon::join(
                || backend.download(&region, &mut now[..expected.len()]),
                || last.map_or(Ok(()), |(start, expected)| compare(start, before, expected)),
            );
            same.and(sent)?;
            std::mem::swap(&mut now, &mut before);
            last = Some((start, expected));
        }
        last.map_or(Ok(()), |(start, expected)| compare(start, before, expected))
    }

    /// Records the copy of what is here, `image`, into `slot`.
    ///
    /// # Errors
    /// [`Error::UnknownSlot`], or the encoder's.
    pub fn copy_to(&self, pool: &Pool, slot: u32, image: &SlotImage, encoder: &mut dyn Encoder) -> Result<()> {
        pool.spans(slot)?.into_iter().try_for_each(|(range, region)| self.slot.copy(range, &region, encoder))?;
        let (Some(experts), Some(pool)) = (image.experts(), pool.experts()) else { return Ok(()) };
        let mut spans = experts.spans(pool, slot)?.into_iter();
        spans.try_for_each(|(range, region)| self.experts.copy(range, &region, encoder))
    }
}

impl Chunks {
    fn new(backend: &dyn GpuBackend, bytes: u64) -> Result<Self> {
        let len = bytes.min(backend.caps().max_alloc / ALIGN * ALIGN).max(ALIGN);
        let lens = (0..bytes).step_by(len as usize).map(|start| len.min(bytes - start));
        let regions = lens.map(|len| backend.alloc(len, "staging")).collect::<Result<_>>()?;
        Ok(Self { regions, len: len as usize })
    }

    fn fill(&self, backend: &dyn GpuBackend, bytes: &[u8]) -> Result<()> {
        let mut parts = self.regions.iter().zip(bytes.chunks(self.len));
        parts.try_for_each(|(region, bytes)| backend.upload(region, bytes))
    }

    /// `bytes` in pieces of at most `len`: first byte, counted from `first`, where it is here, what it should be.
    fn pieces<'a>(&self, first: usize, bytes: &'a [u8], len: usize) -> Result<Vec<(usize, Region, &'a [u8])>> {
        let mut pieces = Vec::new();
        for (i, (chunk, bytes)) in self.regions.iter().zip(bytes.chunks(self.len)).enumerate() {
            for (j, piece) in bytes.chunks(len).enumerate() {
                let region = chunk.slice((j * len) as u64, piece.len() as u64)?;
                pieces.push((first + i * self.len + j * len, region, piece));
            }
        }
        Ok(pieces)
    }

    /// Records the copy of bytes `range` to `region`.
    fn copy(&self, range: Range<usize>, region: &Region, encoder: &mut dyn Encoder) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let (chunk, offset) = (at / self.len, at % self.len);
            let len = (self.len - offset).min(range.end - at) as u64;
            let dst = region.slice((at - range.start) as u64, len)?;
            encoder.copy(&dst, &self.regions[chunk].slice(offset as u64, len)?)?;
            at += len as usize;
        }
        Ok(())
    }
}

/// Compares what was read back, from byte `start` of an image on, with what was sent.
fn compare(start: usize, found: &[u8], expected: &[u8]) -> Result<()> {
    let differs = |(i, (found, expected)): (usize, (&[u8], &[u8]))| {
        let at = found.iter().zip(expected).position(|(a, b)| a != b)?;
        Some(Error::Corrupt { offset: (start + i * COMPARED + at) as u64, found: found[at], expected: expected[at] })
    };
    let parts = found[..expected.len()].par_chunks(COMPARED).zip(expected.par_chunks(COMPARED)).enumerate();
    parts.filter(|(_, (found, expected))| found != expected).find_map_first(differs).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::{Adapter, HostMatrix, HostPair, SiteId};
    use crate::backend::open;
    use crate::dtype::DType;
    use crate::pool::PoolSpec;

    #[test]
    fn one_wrong_byte_anywhere_is_found_and_named() {
        let gpu = open("cpu", 0).unwrap();
        let zeros =
            |rows: usize, cols: usize| HostMatrix { dtype: DType::F32, rows, cols, bytes: vec![0; rows * cols * 4] };
        let pair = |name: &str| {
            let site = SiteId::from_path(&format!("model.layers.0.self_attn.{name}"));
            HostPair { site, a: zeros(256, 4096), b: zeros(4096, 256), scale: 1.0, vectors: None, embedding: false }
        };
        let adapter = Adapter::from_pairs(["q_proj", "k_proj", "v_proj"].map(pair).into());
        let spec = PoolSpec::for_adapters([&adapter], 1, DType::F32).unwrap();
        let pool = Pool::new(&*gpu, spec).unwrap();
        let staging = Staging::new(&*gpu, &pool).unwrap();
        let image = SlotImage::empty(&pool);
        let len = image.bytes().len();
        assert!(len > READBACK, "more than one piece");
        staging.fill(&*gpu, &image).unwrap();
        staging.verify(&*gpu, &image).unwrap();
        for at in [0, READBACK - 4, READBACK, len - 4] {
            let word = staging.slot.regions[0].slice(at as u64, 4).unwrap();
            gpu.submit(&mut |encoder| encoder.write(&word, &[0, 0, 7, 0])).unwrap();
            let Err(Error::Corrupt { offset, found, expected }) = staging.verify(&*gpu, &image) else {
                panic!("byte {at} is wrong");
            };
            assert_eq!((offset, found, expected), (at as u64 + 2, 7, 0));
            gpu.submit(&mut |encoder| encoder.write(&word, &[0; 4])).unwrap();
        }
        staging.verify(&*gpu, &image).unwrap();
    }
}
