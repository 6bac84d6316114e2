//! A slot's worth of device memory beside the pool: new contents wait there, complete and verified,
//! until they are copied into a slot between two steps.

use super::{Pool, SlotImage};
use crate::backend::{Encoder, GpuBackend};
use crate::error::{Error, Result};
use crate::memory::Region;

/// Bytes that a chunk's length is a multiple of.
const ALIGN: u64 = 256;

/// Device memory for one slot image, in chunks where the device caps allocations.
#[derive(Debug)]
pub struct Staging {
    chunks: Vec<Region>,
    chunk: usize,
}

impl Staging {
    /// Memory for one slot of `pool`.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(backend: &dyn GpuBackend, pool: &Pool) -> Result<Self> {
        let bytes = pool.layout().slot_bytes();
        let chunk = bytes.min(backend.caps().max_alloc / ALIGN * ALIGN).max(ALIGN);
        let lens = (0..bytes).step_by(chunk as usize).map(|start| chunk.min(bytes - start));
        let chunks = lens.map(|len| backend.alloc(len, "staging")).collect::<Result<_>>()?;
        Ok(Self { chunks, chunk: chunk as usize })
    }

    /// Sends `image` here; it is complete when the call returns.
    ///
    /// # Errors
    /// The backend's. No slot has changed.
    pub fn fill(&self, backend: &dyn GpuBackend, image: &SlotImage) -> Result<()> {
        let ticket = backend.submit(&mut |encoder| {
            let parts = self.chunks.iter().zip(image.bytes().chunks(self.chunk));
            parts.into_iter().try_for_each(|(region, bytes)| encoder.write(region, bytes))
        })?;
        backend.wait(ticket)
    }

    /// Reads back what is here and compares it with `image`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the first byte that differs, or the backend's.
    pub fn verify(&self, backend: &dyn GpuBackend, image: &SlotImage) -> Result<()> {
        for (i, (region, bytes)) in self.chunks.iter().zip(image.bytes().chunks(self.chunk)).enumerate() {
            let found = backend.read(&region.slice(0, bytes.len() as u64)?)?;
            if let Some(at) = found.iter().zip(bytes).position(|(a, b)| a != b) {
                return Err(Error::Corrupt {
                    offset: (i * self.chunk + at) as u64,
                    found: found[at],
                    expected: bytes[at],
                });
            }
        }
        Ok(())
    }

    /// Records the copy of what is here into `slot`.
    ///
    /// # Errors
    /// [`Error::UnknownSlot`], or the encoder's.
    pub fn copy_to(&self, pool: &Pool, slot: u32, encoder: &mut dyn Encoder) -> Result<()> {
        for (range, region) in pool.spans(slot)? {
            let mut at = range.start;
            while at < range.end {
                let (chunk, offset) = (at / self.chunk, at % self.chunk);
                let len = (self.chunk - offset).min(range.end - at) as u64;
                let dst = region.slice((at - range.start) as u64, len)?;
                encoder.copy(&dst, &self.chunks[chunk].slice(offset as u64, len)?)?;
                at += len as usize;
            }
        }
        Ok(())
    }
}
