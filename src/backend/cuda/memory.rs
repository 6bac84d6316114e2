//! Device memory behind a region, and the page-locked host memory that writes pass through.

#![allow(unsafe_code)]

use std::any::Any;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use super::driver::{Handle, check};
use super::queue::{Remains, Shared};
use crate::error::{Error, Result};
use crate::memory::{Allocation, DevicePtr, Region};

/// An allocation: our own, or a host's.
#[derive(Debug)]
pub(super) struct Memory {
    shared: Arc<Shared>,
    address: u64,
    /// A host's memory is kept by this and not freed.
    host: Option<HostOwner>,
}

/// Keeps a host's memory alive.
struct HostOwner(#[expect(dead_code, reason = "held for its destructor")] Arc<dyn Any + Send + Sync>);

impl std::fmt::Debug for HostOwner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HostOwner")
    }
}

impl Allocation for Memory {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Memory {
    /// `len` zero bytes.
    pub(super) fn alloc(shared: &Arc<Shared>, len: u64, label: &str) -> Result<Region> {
        // The driver refuses a length of 0.
        let bytes = len.max(1) as usize;
        let mut address = Self::try_alloc(shared, bytes)?;
        if address.is_none() {
            shared.drain()?;
            address = Self::try_alloc(shared, bytes)?;
        }
        let address = address.ok_or_else(|| Error::OutOfMemory { requested: len, label: label.to_owned() })?;
        let memory = Self { shared: shared.clone(), address, host: None };
        shared.with_stream(|stream| {
            // SAFETY: the memory has just been allocated, with that many bytes. `memory` frees it after this.
            check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address, 0, bytes, stream) })
        })?;
        Ok(Region::new(DevicePtr(address), len, Arc::new(memory)))
    }

    /// The address of `bytes` bytes, or `None` where the device has no room.
    fn try_alloc(shared: &Shared, bytes: usize) -> Result<Option<u64>> {
        shared.with_stream(|_| {
            let mut address = 0;
            // SAFETY: writes one address; the context is current.
            match unsafe { sys::cuMemAlloc_v2(&mut address, bytes) } {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY => Ok(None),
                code => check("cuMemAlloc", code).map(|()| Some(address)),
            }
        })
    }

    /// A host's `len` bytes at `address`.
    pub(super) fn import(shared: &Arc<Shared>, address: u64, len: u64, owner: Arc<dyn Any + Send + Sync>) -> Region {
        let memory = Self { shared: shared.clone(), address, host: Some(HostOwner(owner)) };
        Region::new(DevicePtr(address), len, Arc::new(memory))
    }

    /// The bytes of `src` after all work submitted so far. Work may be submitted while they travel.
    pub(super) fn read(shared: &Shared, src: &Region) -> Result<Vec<u8>> {
        Self::check(src, shared)?;
        let len = src.len() as usize;
        let mut bytes: Vec<u8> = Vec::with_capacity(len);
        let chunk = shared.chunk(len.min(READBACK))?;
        while bytes.len() < len {
            let piece = (len - bytes.len()).min(READBACK);
            let (to, from) = (chunk.start.0.cast(), src.ptr().0 + bytes.len() as u64);
            // Where one of these fails the copy may still run: the chunk is then never used again.
            let ticket = shared.send(&mut Vec::new(), |stream| {
                // SAFETY: `src` is live memory of `len` bytes, of which `piece` are left from `from` on; the chunk
                // has room for them and is this function's alone.
                check("cuMemcpyDtoHAsync", unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, piece, stream) })
            })?;
            shared.wait(ticket)?;
            bytes.extend_from_slice(&chunk.bytes()[..piece]);
        }
        shared.put_back(chunk);
        Ok(bytes)
    }

    /// Checks that `region` is of this backend.
    pub(super) fn check(region: &Region, shared: &Shared) -> Result<()> {
        match region.owner().as_any().downcast_ref::<Self>() {
            Some(memory) if memory.shared.id == shared.id => Ok(()),
            _ => Err(Error::shape("region", "memory of another backend", "memory of this one")),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.host.is_none() {
            self.shared.inter(Remains::Memory(self.address));
        }
    }
}

/// Bytes that one read brings back at a time.
const READBACK: usize = 16 << 20;
/// Smallest piece of staging memory.
const CHUNK: usize = 1 << 20;
/// Bytes of staging memory that are kept while no work uses them.
const KEPT: usize = 64 << 20;

/// Page-locked host memory, filled from the start. Whoever has it frees it or gives it to a [`Staging`].
#[derive(Debug)]
pub(super) struct Chunk {
    start: Handle<u8>,
    len: usize,
    used: usize,
}

impl Chunk {
    /// At least `len` bytes. A context must be current.
    pub(super) fn new(len: usize) -> Result<Self> {
        let len = len.max(1).next_multiple_of(CHUNK);
        let mut start = ptr::null_mut();
        // SAFETY: writes one pointer. Flags of 0: plain page-locked memory.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut start, len, 0) })?;
        // SAFETY: `len` bytes at `start` have just been allocated.
        unsafe { ptr::write_bytes(start.cast::<u8>(), 0, len) };
        Ok(Self { start: Handle(start.cast()), len, used: 0 })
    }

    /// All of it.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: `len` bytes at `start` were allocated by `new`, zeroed by it, and live as long as `self`; who has the
        // chunk keeps work that writes it and this apart.
        unsafe { std::slice::from_raw_parts(self.start.0, self.len) }
    }

    /// The same, to write.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.0, self.len) }
    }

    /// Copies `bytes` in and gives their address, or `None` where there is no room.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Option<*const u8> {
        let start = self.used.next_multiple_of(16);
        if self.len.checked_sub(start)? < bytes.len() {
            return None;
        }
        self.used = start + bytes.len();
        // SAFETY: `start..start + bytes.len()` lies in the allocation (checked above), no work reads it yet, and
        // `bytes` can't overlap memory that only this struct has the address of.
        unsafe {
            let to = self.start.0.add(start);
            ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
            Some(to)
        }
    }

    /// Frees it. A context must be current, and no work may use it.
    fn free(self) {
        // SAFETY: allocated by `new`, freed once since `self` is gone. An error can only mean a broken context.
        let _ = unsafe { sys::cuMemFreeHost(self.start.0.cast()) };
    }
}

/// Chunks that no work uses.
#[derive(Debug, Default)]
pub(super) struct Staging {
    chunks: Vec<Chunk>,
    bytes: usize,
}

impl Staging {
    /// The smallest chunk of at least `len` bytes.
    pub(super) fn take(&mut self, len: usize) -> Option<Chunk> {
        let fits = self.chunks.iter().enumerate().filter(|(_, chunk)| chunk.len >= len);
        let best = fits.min_by_key(|(_, chunk)| chunk.len)?.0;
        let chunk = self.chunks.swap_remove(best);
        self.bytes -= chunk.len;
        Some(chunk)
    }

    /// Keeps a chunk for reuse.
    pub(super) fn put(&mut self, mut chunk: Chunk) {
        chunk.used = 0;
        self.bytes += chunk.len;
        self.chunks.push(chunk);
    }

    /// Frees the largest chunks until what is left may be kept. A context must be current.
    pub(super) fn trim(&mut self) {
        while self.bytes > KEPT {
            let Some(largest) = (0..self.chunks.len()).max_by_key(|i| self.chunks[*i].len) else { return };
            let chunk = self.chunks.swap_remove(largest);
            self.bytes -= chunk.len;
            chunk.free();
        }
    }

    /// Frees all. A context must be current.
    pub(super) fn clear(&mut self) {
        self.bytes = 0;
        self.chunks.drain(..).for_each(Chunk::free);
    }
}
