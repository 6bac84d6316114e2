//! Device memory as values: an address, and a bounds-checked, shared view of an allocation.

use std::any::Any;
use std::fmt::{self, Debug};
use std::sync::Arc;

use crate::error::{Error, Result};

/// A device address: real on CUDA and Vulkan (a buffer device address), opaque on WebGPU and the CPU.
///
/// On every backend 0 is null, the addresses of one allocation are contiguous and no other living
/// allocation's, and a kernel can turn an address into an offset by subtraction. Opaque addresses are
/// `allocation number << 32 | byte offset` on WebGPU, the number starting at 1; on the CPU, whose
/// allocations may exceed 4 GiB, each allocation takes the next page-aligned range, with a gap between.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The null address: in a table cell, "this slot has no delta here".
    pub const NULL: Self = Self(0);

    /// Whether this is [`DevicePtr::NULL`].
    pub fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address `bytes` further on. Not bounds-checked: use [`Region::slice`] for memory to be touched.
    pub fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// What a backend keeps behind a [`Region`]; dropping the last `Arc` frees the memory
/// (after the work that was submitted before the drop).
pub trait Allocation: Any + Debug + Send + Sync {
    /// For the owning backend to find its own type again.
    fn as_any(&self) -> &dyn Any;
}

/// A bounds-checked view of device memory that keeps its allocation alive.
///
/// Cloning and slicing share the allocation. A `Region` says nothing about who writes the bytes:
/// ordering is the business of the [`Encoder`](crate::backend::Encoder) it is used with.
#[derive(Clone, Debug)]
pub struct Region {
    ptr: DevicePtr,
    len: u64,
    /// Byte offset of `ptr` in the allocation.
    offset: u64,
    owner: Arc<dyn Allocation>,
}

impl Region {
    /// The whole of an allocation. For backends: `owner` must own `len` bytes at `ptr`.
    pub fn new(ptr: DevicePtr, len: u64, owner: Arc<dyn Allocation>) -> Self {
        Self { ptr, len, offset: 0, owner }
    }

    /// Address of the first byte.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the region holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Byte offset of the first byte in its allocation.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The allocation that the region lies in.
    pub fn owner(&self) -> &Arc<dyn Allocation> {
        &self.owner
    }

    /// Whether both regions lie in one allocation.
    pub fn same_allocation(&self, other: &Region) -> bool {
        Arc::ptr_eq(&self.owner, &other.owner)
    }

    /// Whether any byte belongs to both regions.
    pub fn overlaps(&self, other: &Region) -> bool {
        self.same_allocation(other) && self.offset < other.offset + other.len && other.offset < self.offset + self.len
    }

    /// The `len` bytes from `offset` on.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] when they are not all inside this region.
    pub fn slice(&self, offset: u64, len: u64) -> Result<Region> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(Region {
                ptr: self.ptr.offset(offset),
                len,
                offset: self.offset + offset,
                owner: self.owner.clone(),
            }),
            _ => Err(Error::OutOfBounds { offset, len, available: self.len }),
        }
    }

    /// The smallest region that holds both, where they lie in one allocation.
    pub fn union(&self, other: &Region) -> Option<Region> {
        self.same_allocation(other).then(|| {
            let first = if self.offset <= other.offset { self } else { other };
            let end = (self.offset + self.len).max(other.offset + other.len);
            Region { ptr: first.ptr, len: end - first.offset, offset: first.offset, owner: self.owner.clone() }
        })
    }
}
