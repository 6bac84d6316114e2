//! Host memory as device memory: opaque addresses, and all operands of a launch borrowed at once.

use std::any::Any;
use std::fmt::{self, Debug};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::host;
use crate::error::{Error, Result};
use crate::memory::{Allocation, DevicePtr, Region};

/// Allocations start at multiples of this, as addresses and in memory, so any element type fits a cast.
const PAGE: u64 = 4096;

/// The next unused address. Addresses are never used twice: one that outlives its allocation matches no other.
static NEXT_ADDRESS: AtomicU64 = AtomicU64::new(1 << 32);

/// Bytes of all living allocations of the process, touched or not.
static ALLOCATED: AtomicU64 = AtomicU64::new(0);

/// An allocation: zeroed pages that the system hands out on first touch.
pub(super) struct CpuAllocation {
    address: u64,
    len: u64,
    bytes: RwLock<Pages>,
}

impl Debug for CpuAllocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuAllocation({} bytes at {:#x})", self.len, self.address)
    }
}

impl Allocation for CpuAllocation {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CpuAllocation {
    fn drop(&mut self) {
        ALLOCATED.fetch_sub(self.len, Ordering::Relaxed);
    }
}

/// Allocates `len` zeroed bytes.
///
/// Systems promise more memory than they have and kill the process that takes them at their word, so
/// this refuses what the machine can't hold: more than is available now, or more than its memory in all.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(super) fn alloc(len: u64, label: &str) -> Result<Region> {
    let out_of_memory = || Error::OutOfMemory { requested: len, label: label.to_owned() };
    let held = ALLOCATED.fetch_add(len, Ordering::Relaxed);
    let pages = host::memory()
        .is_none_or(|m| len <= m.available && held.saturating_add(len) <= m.total)
        .then(|| usize::try_from(len).ok().and_then(Pages::zeroed))
        .flatten();
    let Some(pages) = pages else {
        ALLOCATED.fetch_sub(len, Ordering::Relaxed);
        return Err(out_of_memory());
    };
    let range = len.next_multiple_of(PAGE) + PAGE;
    let address = NEXT_ADDRESS.fetch_add(range, Ordering::Relaxed);
    let allocation = CpuAllocation { address, len, bytes: RwLock::new(pages) };
    Ok(Region::new(DevicePtr(address), len, Arc::new(allocation)))
}

/// The allocation behind a region.
///
/// # Errors
/// [`Error::Shape`] when it is another backend's.
pub(super) fn owner<'a>(region: &'a Region, what: &str) -> Result<&'a CpuAllocation> {
    let found = region.owner().as_any().downcast_ref();
    found.ok_or_else(|| Error::shape(what, format!("{:?}", region.owner()), "memory of the cpu backend"))
}

/// An operand's bytes.
pub(super) enum Bytes<'a> {
    /// It may share them with other operands.
    Read(&'a [u8]),
    /// They are its own.
    Write(&'a mut [u8]),
}

impl<'a> Bytes<'a> {
    /// The bytes, to read.
    pub(super) fn get(&self) -> &[u8] {
        match self {
            Bytes::Read(bytes) => bytes,
            Bytes::Write(bytes) => bytes,
        }
    }

    /// The bytes of an operand that was asked for with [`Want::Write`].
    pub(super) fn get_mut(&mut self) -> &mut [u8] {
        match self {
            Bytes::Read(_) => unreachable!("a kernel writes only the operands that the contract says it writes"),
            Bytes::Write(bytes) => bytes,
        }
    }
}

/// An operand that [`borrow`] is to lock.
pub(super) struct Want<'a> {
    /// Where it lies. Must be memory of this backend ([`owner`]).
    pub(super) region: &'a Region,
    /// Whether it is written; it must then share no byte with any other operand.
    pub(super) write: bool,
}

/// Locks the allocations behind `wants` and calls `f` with each operand's bytes, in the same order.
///
/// Operands may lie in one allocation in any arrangement that has no written one overlap another. Locks
/// are taken in the order of addresses, each once, so that two calls never wait for each other.
pub(super) fn borrow<R>(wants: &[Want<'_>], f: impl FnOnce(&mut [Bytes<'_>]) -> R) -> Result<R> {
    let owners = wants.iter().map(|w| owner(w.region, "operand")).collect::<Result<Vec<_>>>()?;
    let mut order: Vec<usize> = (0..wants.len()).collect();
    order.sort_by_key(|&i| (owners[i].address, wants[i].region.offset()));
    let groups: Vec<&[usize]> = order.chunk_by(|&a, &b| owners[a].address == owners[b].address).collect();
    let mut guards: Vec<Guard<'_>> = groups
        .iter()
        .map(|group| owners[group[0]].lock(group.iter().any(|&i| wants[i].write && !wants[i].region.is_empty())))
        .collect();
    let mut bytes: Vec<Bytes<'_>> = wants.iter().map(|_| Bytes::Read(&[])).collect();
    for (guard, group) in guards.iter_mut().zip(&groups) {
        match guard {
            Guard::Read(all) => {
                for &i in *group {
                    bytes[i] = Bytes::Read(&all[range(wants[i].region)]);
                }
            }
            Guard::Write(all) => split(all, wants, group, &mut bytes),
        }
    }
    for (bytes, want) in bytes.iter_mut().zip(wants) {
        if want.write && want.region.is_empty() {
            *bytes = Bytes::Write(&mut []);
        }
    }
    Ok(f(&mut bytes))
}

/// Cuts an allocation into its written operands and what lies between; each read operand lies in one gap.
fn split<'a>(all: &'a mut [u8], wants: &[Want<'_>], group: &[usize], bytes: &mut [Bytes<'a>]) {
    let mut gaps: Vec<(usize, &'a [u8])> = Vec::with_capacity(group.len() + 1);
    let (mut rest, mut at) = (all, 0);
    for &i in group.iter().filter(|&&i| wants[i].write && !wants[i].region.is_empty()) {
        let range = range(wants[i].region);
        let (gap, tail) = rest.split_at_mut(range.start - at);
        let (own, tail) = tail.split_at_mut(range.len());
        gaps.push((at, gap));
        bytes[i] = Bytes::Write(own);
        (rest, at) = (tail, range.end);
    }
    gaps.push((at, rest));
    for &i in group.iter().filter(|&&i| !wants[i].write && !wants[i].region.is_empty()) {
        let range = range(wants[i].region);
        let (start, gap) = gaps[gaps.partition_point(|(start, _)| *start <= range.start) - 1];
        bytes[i] = Bytes::Read(&gap[range.start - start..range.end - start]);
    }
}

/// Where a region lies in its allocation, whose length fits `usize` since it is mapped.
fn range(region: &Region) -> std::ops::Range<usize> {
    region.offset() as usize..(region.offset() + region.len()) as usize
}

/// A locked allocation.
enum Guard<'a> {
    Read(RwLockReadGuard<'a, Pages>),
    Write(RwLockWriteGuard<'a, Pages>),
}

impl CpuAllocation {
    /// A panic elsewhere leaves bytes, not invariants, half written: poison means nothing here.
    fn lock(&self, write: bool) -> Guard<'_> {
        if write {
            Guard::Write(self.bytes.write().unwrap_or_else(PoisonError::into_inner))
        } else {
            Guard::Read(self.bytes.read().unwrap_or_else(PoisonError::into_inner))
        }
    }
}

/// Zeroed memory, at least 16-byte aligned.
#[cfg(any(unix, windows))]
struct Pages(memmap2::MmapMut, usize);

#[cfg(any(unix, windows))]
impl Pages {
    fn zeroed(len: usize) -> Option<Self> {
        // An empty map is an error to some systems.
        let map = memmap2::MmapMut::map_anon(len.max(1)).ok()?;
        #[cfg(target_os = "linux")]
        if len >= HUGE {
            // Reading a pool of gigabytes misses the TLB on nearly every 4 KiB page. A hint: may fail.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Some(Self(map, len))
    }
}

/// Allocations from this size on ask for huge pages.
#[cfg(target_os = "linux")]
const HUGE: usize = 4 << 20;

#[cfg(any(unix, windows))]
impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0[..self.1]
    }
}

#[cfg(any(unix, windows))]
impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0[..self.1]
    }
}

/// Zeroed memory, at least 16-byte aligned.
#[cfg(not(any(unix, windows)))]
struct Pages(Vec<u128>, usize);

#[cfg(not(any(unix, windows)))]
impl Pages {
    fn zeroed(len: usize) -> Option<Self> {
        let mut words = Vec::new();
        words.try_reserve_exact(len.div_ceil(16)).ok()?;
        words.resize(len.div_ceil(16), 0);
        Some(Self(words, len))
    }
}

#[cfg(not(any(unix, windows)))]
impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.0)[..self.1]
    }
}

#[cfg(not(any(unix, windows)))]
impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.0)[..self.1]
    }
}
