//! Buffers as regions, and the staging memory through which host bytes reach them.
//!
//! Every allocation is a `wgpu::Buffer` of its own: WebGPU forbids one buffer to be read and written in
//! one dispatch, whatever the ranges. Its address is its number in the upper half, so that a kernel can
//! tell whether a table's cell points into the buffer that is bound.

use std::any::Any;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use super::encoder::Bindings;
use super::{Inner, scoped};
use crate::error::{Error, Result};
use crate::memory::{Allocation, DevicePtr, Region};

/// Buffers are whole multiples of this: a kernel reads weights 16 bytes at a time.
pub(super) const GRAIN: u64 = 16;
/// Largest buffer: offsets are 32 bits.
pub(super) const MAX_BUFFER: u64 = (1 << 32) - GRAIN;

/// What a [`Region`] of this backend holds.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) buffer: wgpu::Buffer,
    /// The upper half of its addresses.
    pub(super) number: u32,
    /// The device's bind groups: those that name this buffer go when it goes.
    pub(super) home: Arc<Bindings>,
}

impl Allocation for Memory {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.home.forget(self.number);
    }
}

/// Numbers buffers from 1 on; 0 would make null addresses valid.
#[derive(Debug, Default)]
pub(super) struct Numbers(AtomicU32);

impl Numbers {
    fn next(&self) -> Result<u32> {
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| last.checked_add(1));
        taken.map(|last| last + 1).map_err(|_| Error::Limit {
            what: "number of buffers ever allocated",
            found: 1 << 32,
            limit: u32::MAX.into(),
            hint: "",
        })
    }
}

impl Inner {
    /// A zeroed buffer of `len` bytes.
    pub(super) fn alloc(&self, len: u64, label: &str) -> Result<Region> {
        if len > self.caps.max_alloc {
            return Err(Error::Limit {
                what: "size of an allocation",
                found: len,
                limit: self.caps.max_alloc,
                hint: "",
            });
        }
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let buffer = self.buffer(len.max(1).next_multiple_of(GRAIN), usage, false, label)?;
        self.region(buffer, len)
    }

    /// A buffer of the host's as a region; see [`super::WebGpuBackend::import`].
    pub(super) fn import(&self, buffer: &wgpu::Buffer) -> Result<Region> {
        let (len, usage) = (buffer.size(), buffer.usage());
        if !usage.contains(wgpu::BufferUsages::STORAGE) {
            return Err(Error::shape("imported buffer", format!("usage {usage:?}"), "usage with STORAGE"));
        }
        if len == 0 || !len.is_multiple_of(GRAIN) || len > MAX_BUFFER {
            let wanted = format!("a multiple of {GRAIN} up to {MAX_BUFFER}");
            return Err(Error::shape("imported buffer", format!("{len} bytes"), wanted));
        }
        self.region(buffer.clone(), len)
    }

    fn region(&self, buffer: wgpu::Buffer, len: u64) -> Result<Region> {
        let memory = Memory { buffer, number: self.numbers.next()?, home: self.bindings.clone() };
        Ok(Region::new(DevicePtr(u64::from(memory.number) << 32), len, Arc::new(memory)))
    }

    /// A `wgpu::Buffer`, or why there is none.
    pub(super) fn buffer(
        &self,
        size: u64,
        usage: wgpu::BufferUsages,
        mapped: bool,
        label: &str,
    ) -> Result<wgpu::Buffer> {
        let descriptor = wgpu::BufferDescriptor { label: Some(label), size, usage, mapped_at_creation: mapped };
        let made = scoped(&self.device, "create_buffer", || self.device.create_buffer(&descriptor));
        self.check_lost()?;
        made.map_err(|error| match error {
            Error::OutOfMemory { .. } => Error::OutOfMemory { requested: size, label: label.to_owned() },
            other => other,
        })
    }

    /// This backend's part of a region.
    pub(super) fn memory<'a>(&self, region: &'a Region) -> Result<&'a Memory> {
        match region.owner().as_any().downcast_ref::<Memory>() {
            Some(memory) if Arc::ptr_eq(&memory.home, &self.bindings) => Ok(memory),
            _ => Err(Error::shape("region", "memory of another device", format!("memory of {}", self.caps.device))),
        }
    }

    /// The bytes of `src` after all work submitted so far.
    pub(super) fn read(&self, src: &Region) -> Result<Vec<u8>> {
        let memory = self.memory(src)?;
        if src.is_empty() {
            return Ok(Vec::new());
        }
        // Copies move whole words.
        let start = src.offset() & !3;
        let size = (src.offset() + src.len()).next_multiple_of(4) - start;
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let landing = self.buffer(size, usage, false, "lorapool read")?;
        let commands = scoped(&self.device, "copy_buffer_to_buffer", || {
            let mut encoder = self.device.create_command_encoder(&Default::default());
            encoder.copy_buffer_to_buffer(&memory.buffer, start, &landing, 0, size);
            encoder.finish()
        })?;
        let ticket = self.send(commands)?;
        let (sender, receiver) = mpsc::channel();
        scoped(&self.device, "map_async", || {
            // The receiver lives until the end of this function, or nobody waits.
            landing.map_async(wgpu::MapMode::Read, .., move |result| drop(sender.send(result)));
        })?;
        self.wait(ticket)?;
        // The work may have been seen to finish before the mapping was asked for: then this runs its callback.
        self.poll(wgpu::PollType::Poll)?;
        let driver = |message: String| Error::Driver { call: "map_async", message };
        match receiver.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(driver(error.to_string())),
            Err(_) => return Err(driver("the device was lost".to_owned())),
        }
        let view = landing.get_mapped_range(..).map_err(|error| driver(error.to_string()))?;
        let first = (src.offset() - start) as usize;
        Ok(view[first..first + src.len() as usize].to_vec())
    }

    /// A mapped chunk for up to `len` bytes. Waits for work in flight where the ring has grown to its limit.
    fn take_chunk(&self, len: u64) -> Result<Chunk> {
        let size = chunk_size(len);
        loop {
            if let Some(chunk) = self.staging.take_free(size) {
                return Ok(chunk);
            }
            if self.staging.total() + size <= STAGING_MAX {
                break;
            }
            // When nothing is in flight, the record itself holds it all, and needs more.
            let waited = self.wait_oldest()?;
            // Runs what maps finished chunks again, if nobody did yet.
            self.poll(wgpu::PollType::Poll)?;
            if !waited {
                match self.staging.take_free(size) {
                    Some(chunk) => return Ok(chunk),
                    None => break,
                }
            }
        }
        let usage = wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC;
        let buffer = self.buffer(size, usage, true, "lorapool staging")?;
        self.staging.lock().total += size;
        Ok(Chunk { buffer, size })
    }
}

/// Bytes of an ordinary staging chunk.
const SMALL: u64 = 1 << 20;
/// Bytes of a chunk for large writes, which take as many as they need.
const LARGE: u64 = 16 << 20;
/// Staging memory that may be in flight before a write waits for the device.
const STAGING_MAX: u64 = 256 << 20;
/// Free staging memory that is kept for the next write.
const STAGING_KEEP: u64 = 64 << 20;

fn chunk_size(len: u64) -> u64 {
    if len <= SMALL { SMALL } else { LARGE }
}

/// A ring of mapped staging buffers: taken by a record, unmapped and sent with it, mapped again when the
/// device is done.
#[derive(Debug, Default)]
pub(super) struct Staging(Arc<Mutex<Ring>>);

#[derive(Debug, Default)]
struct Ring {
    free: Vec<Chunk>,
    /// Bytes of all chunks, wherever they are.
    total: u64,
}

#[derive(Debug)]
struct Chunk {
    buffer: wgpu::Buffer,
    size: u64,
}

impl Ring {
    /// Takes back a mapped chunk, or lets it go where enough are kept.
    fn give(&mut self, chunk: Chunk) {
        let free: u64 = self.free.iter().map(|c| c.size).sum();
        if free + chunk.size <= STAGING_KEEP {
            self.free.push(chunk);
        } else {
            self.total -= chunk.size;
        }
    }
}

impl Staging {
    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_free(&self, size: u64) -> Option<Chunk> {
        let mut ring = self.lock();
        let at = ring.free.iter().position(|chunk| chunk.size == size)?;
        Some(ring.free.swap_remove(at))
    }

    /// Bytes of all staging memory there is.
    pub(super) fn total(&self) -> u64 {
        self.lock().total
    }

    /// Maps `chunk` again once the work that reads it is done.
    fn recycle(&self, device: &wgpu::Device, chunk: Chunk) {
        let ring = self.0.clone();
        let buffer = chunk.buffer.clone();
        let mapping = scoped(device, "map_async", || {
            buffer.map_async(wgpu::MapMode::Write, .., move |result| {
                let mut ring = ring.lock().unwrap_or_else(PoisonError::into_inner);
                match result {
                    Ok(()) => ring.give(chunk),
                    Err(_) => ring.total -= chunk.size,
                }
            });
        });
        // The callback has heard of it too.
        if let Err(error) = mapping {
            tracing::debug!(%error, "staging memory was not mapped again");
        }
    }
}

/// Host bytes on their way into one record: pieces of mapped buffers.
#[derive(Debug)]
pub(super) struct Stage<'a> {
    inner: &'a Inner,
    /// Whether chunks come from the ring and go back; otherwise they belong to what is recorded.
    ring: bool,
    chunks: Vec<Chunk>,
    /// Bytes used of the last chunk.
    used: u64,
}

/// Bytes of a buffer.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) buffer: wgpu::Buffer,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl<'a> Stage<'a> {
    pub(super) fn new(inner: &'a Inner, ring: bool) -> Self {
        Self { inner, ring, chunks: Vec::new(), used: 0 }
    }

    /// Puts `bytes`, a multiple of 4, into staging memory and hands the pieces to `each`, in order.
    pub(super) fn put(&mut self, mut bytes: &[u8], mut each: impl FnMut(Piece)) -> Result<()> {
        while !bytes.is_empty() {
            let room = self.chunks.last().map_or(0, |chunk| chunk.size - self.used);
            if room == 0 {
                self.chunks.push(self.chunk(bytes.len() as u64)?);
                self.used = 0;
                continue;
            }
            let buffer = &self.chunks[self.chunks.len() - 1].buffer;
            let len = room.min(bytes.len() as u64);
            let (now, later) = bytes.split_at(len as usize);
            let range = self.used..self.used + len;
            let view = buffer.get_mapped_range_mut(range);
            view.map_err(|error| Error::Driver { call: "get_mapped_range_mut", message: error.to_string() })?
                .copy_from_slice(now);
            each(Piece { buffer: buffer.clone(), offset: self.used, len });
            // Views of mapped memory begin at multiples of 8.
            self.used = (self.used + len).next_multiple_of(wgpu::MAP_ALIGNMENT);
            bytes = later;
        }
        Ok(())
    }

    fn chunk(&self, len: u64) -> Result<Chunk> {
        if self.ring {
            return self.inner.take_chunk(len);
        }
        // Kept for as long as the graph is: no larger than it has to be.
        let size = len.clamp(1 << 12, LARGE).next_multiple_of(wgpu::MAP_ALIGNMENT);
        let buffer = self.inner.buffer(size, wgpu::BufferUsages::COPY_SRC, true, "lorapool kept bytes")?;
        Ok(Chunk { buffer, size })
    }

    /// Ends mapping, as the device needs it before the work is sent.
    pub(super) fn seal(mut self) -> Sealed<'a> {
        let chunks = std::mem::take(&mut self.chunks);
        chunks.iter().for_each(|chunk| chunk.buffer.unmap());
        Sealed { inner: self.inner, chunks: if self.ring { chunks } else { Vec::new() } }
    }
}

impl Drop for Stage<'_> {
    /// A record that failed: its chunks were never sent, and are still mapped.
    fn drop(&mut self) {
        if self.ring {
            let mut ring = self.inner.staging.lock();
            self.chunks.drain(..).for_each(|chunk| ring.give(chunk));
        }
    }
}

/// Unmapped chunks of one record. Dropped after the record was sent (or failed to be).
#[derive(Debug)]
pub(super) struct Sealed<'a> {
    inner: &'a Inner,
    chunks: Vec<Chunk>,
}

impl Drop for Sealed<'_> {
    fn drop(&mut self) {
        self.chunks.drain(..).for_each(|chunk| self.inner.staging.recycle(&self.inner.device, chunk));
    }
}
