//! A slot's worth of device memory beside the pool: new contents wait there, complete and verified,
//! until they are copied into a slot between two steps.

use std::sync::{Mutex, PoisonError};

use super::{Pool, SlotImage};
use crate::backend::{Encoder, GpuBackend, HostBuffer, Ticket};
use crate::error::{Error, Result};
use crate::memory::Region;

/// Bytes that a chunk's length is a multiple of.
const ALIGN: u64 = 256;

/// Bytes that are read back at a time.
const READBACK: usize = 16 << 20;

/// Device memory for one slot image, in chunks where the device caps allocations.
#[derive(Debug)]
pub struct Staging {
    chunks: Vec<Region>,
    chunk: usize,
    /// The last work that touches the chunks.
    used: Mutex<Ticket>,
    /// What bytes are read back to, one verification at a time.
    readback: Mutex<Option<HostBuffer>>,
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
        // The chunks are zeroed by work that has no ticket of its own.
        let used = Mutex::new(backend.submit(&mut |_| Ok(()))?);
        Ok(Self { chunks, chunk: chunk as usize, used, readback: Mutex::default() })
    }

    /// Sends `image` here, beside the queue; it is complete when the call returns. Waits first for the copies to
    /// slots that [`Staging::busy_until`] has named.
    ///
    /// # Errors
    /// The backend's. No slot has changed.
    pub fn fill(&self, backend: &dyn GpuBackend, image: &SlotImage) -> Result<()> {
        let used = *self.used.lock().unwrap_or_else(PoisonError::into_inner);
        backend.wait(used)?;
        let mut parts = self.chunks.iter().zip(image.bytes().chunks(self.chunk));
        parts.try_for_each(|(region, bytes)| backend.upload(region, bytes))
    }

    /// What is here is read until the work of `ticket` is done.
    pub fn busy_until(&self, ticket: Ticket) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = ticket;
    }

    /// Reads back what is here and compares it with `image`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the first byte that differs, or the backend's.
    pub fn verify(&self, backend: &dyn GpuBackend, image: &SlotImage) -> Result<()> {
        let mut readback = self.readback.lock().unwrap_or_else(PoisonError::into_inner);
        let found = match &mut *readback {
            Some(buffer) => buffer,
            none => none.insert(backend.alloc_host(READBACK.min(self.chunk))?),
        };
        for (i, (region, bytes)) in self.chunks.iter().zip(image.bytes().chunks(self.chunk)).enumerate() {
            for (j, expected) in bytes.chunks(found.len()).enumerate() {
                let first = j * found.len();
                let found = &mut found[..expected.len()];
                backend.download(&region.slice(first as u64, expected.len() as u64)?, found)?;
                if found != expected {
                    let at = found.iter().zip(expected).position(|(a, b)| a != b).unwrap_or_default();
                    let offset = (i * self.chunk + first + at) as u64;
                    return Err(Error::Corrupt { offset, found: found[at], expected: expected[at] });
                }
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
