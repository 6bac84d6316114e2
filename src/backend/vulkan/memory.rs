//! Device memory: buffers at fixed addresses, and host-visible arenas for what is recorded with them.

#![allow(unsafe_code)]

use std::any::Any;
use std::fmt::{self, Debug};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use ash::vk;
use gpu_allocator::vulkan::{
    Allocation as Block, AllocationCreateDesc, AllocationScheme, Allocator, AllocatorCreateDesc,
};
use gpu_allocator::{AllocationError, AllocationSizes, MemoryLocation};

use super::device::Device;
use super::queue::Shared;
use super::{driver, lock};
use crate::error::{Error, Result};
use crate::memory::{Allocation, Region};

const MIB: u64 = 1 << 20;
/// First chunk of an arena; later ones are [`CHUNK`].
const FIRST_CHUNK: u64 = MIB / 4;
/// Usual chunk of an arena.
const CHUNK: u64 = MIB;
/// Larger chunks are given back when their work is done.
const KEPT_CHUNK: u64 = 4 * MIB;

/// A `VkBuffer` bound to memory of its own.
#[derive(Debug)]
pub(super) struct RawBuffer {
    pub(super) buffer: vk::Buffer,
    pub(super) address: u64,
    len: u64,
    block: Block,
    /// Bytes counted against the device's heap; 0 for host memory.
    counted: u64,
}

impl RawBuffer {
    /// First byte in the host's address space, for host-visible memory.
    fn mapped(&self) -> Option<NonNull<u8>> {
        self.block.mapped_ptr().map(NonNull::cast)
    }

    /// The first `len` bytes, for host-visible memory that no device work is writing.
    pub(super) fn bytes(&self, len: usize) -> Option<&[u8]> {
        self.block.mapped_slice().and_then(|all| all.get(..len))
    }
}

/// Makes and frees buffers.
pub(super) struct Memory {
    allocator: Mutex<State>,
    /// Size of the largest device-local heap.
    heap: u64,
}

struct State {
    allocator: Allocator,
    used: u64,
}

impl Memory {
    pub(super) fn new(device: &Device, heap: u64) -> Result<Self> {
        let allocator = Allocator::new(&AllocatorCreateDesc {
            instance: device.instance.raw.clone(),
            device: device.raw.clone(),
            physical_device: device.physical,
            debug_settings: Default::default(),
            buffer_device_address: true,
            // Small blocks first: a small pool should not take 256 MiB of a workstation's GPU.
            allocation_sizes: AllocationSizes::new(16 * MIB, 4 * MIB)
                .with_max_device_memblock_size(256 * MIB)
                .with_max_host_memblock_size(64 * MIB),
        })
        .map_err(|error| Error::Driver { call: "vkGetPhysicalDeviceMemoryProperties", message: error.to_string() })?;
        Ok(Self { allocator: Mutex::new(State { allocator, used: 0 }), heap })
    }

    /// A buffer of `len` bytes (a multiple of 16), of undefined contents.
    pub(super) fn buffer(&self, device: &Device, len: u64, location: MemoryLocation, label: &str) -> Result<RawBuffer> {
        let full = || Error::OutOfMemory { requested: len, label: label.to_owned() };
        let mut state = lock(&self.allocator);
        let counted = if location == MemoryLocation::GpuOnly { len } else { 0 };
        // Software drivers hand out more than there is, and the process dies when it is touched.
        if counted > 0 && self.heap > 0 && state.used.saturating_add(counted) > self.heap {
            return Err(full());
        }
        let info = vk::BufferCreateInfo::default()
            .size(len)
            .usage(
                vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS
                    | vk::BufferUsageFlags::STORAGE_BUFFER
                    | vk::BufferUsageFlags::TRANSFER_SRC
                    | vk::BufferUsageFlags::TRANSFER_DST,
            )
            .sharing_mode(vk::SharingMode::EXCLUSIVE);
        let out_of = |call: &'static str| {
            move |error| match error {
                vk::Result::ERROR_OUT_OF_DEVICE_MEMORY | vk::Result::ERROR_OUT_OF_HOST_MEMORY => {
                    Error::OutOfMemory { requested: len, label: label.to_owned() }
                }
                error => driver(call)(error),
            }
        };
        // SAFETY: `info` is complete and the device alive; bufferDeviceAddress is enabled.
        let buffer = unsafe { device.raw.create_buffer(&info, None) }.map_err(out_of("vkCreateBuffer"))?;
        device.name(buffer, label);
        // SAFETY: `buffer` was just made on this device.
        let mut requirements = unsafe { device.raw.get_buffer_memory_requirements(buffer) };
        // Cells are 16-byte aligned addresses.
        requirements.alignment = requirements.alignment.max(16);
        let block = state.allocator.allocate(&AllocationCreateDesc {
            name: label,
            requirements,
            location,
            linear: true,
            allocation_scheme: AllocationScheme::GpuAllocatorManaged,
        });
        let block = match block {
            Ok(block) => block,
            Err(error) => {
                // SAFETY: nothing refers to it.
                unsafe { device.raw.destroy_buffer(buffer, None) };
                return Err(match error {
                    AllocationError::OutOfMemory => full(),
                    other => Error::Driver { call: "vkAllocateMemory", message: other.to_string() },
                });
            }
        };
        // SAFETY: the block was made for this buffer's requirements, and neither is bound yet.
        let bound = unsafe { device.raw.bind_buffer_memory(buffer, block.memory(), block.offset()) };
        if let Err(error) = bound {
            // SAFETY: nothing refers to it.
            unsafe { device.raw.destroy_buffer(buffer, None) };
            state.allocator.free(block).ok();
            return Err(out_of("vkBindBufferMemory")(error));
        }
        state.used += counted;
        // SAFETY: the buffer has the usage SHADER_DEVICE_ADDRESS and is bound to memory.
        let address =
            unsafe { device.raw.get_buffer_device_address(&vk::BufferDeviceAddressInfo::default().buffer(buffer)) };
        Ok(RawBuffer { buffer, address, len, block, counted })
    }

    /// # Safety
    /// - No device work that may still run touches `raw`, which was made here on `device`.
    pub(super) unsafe fn free(&self, device: &Device, raw: RawBuffer) {
        // SAFETY: by the contract of this function.
        unsafe { device.raw.destroy_buffer(raw.buffer, None) };
        let mut state = lock(&self.allocator);
        state.used -= raw.counted;
        if let Err(error) = state.allocator.free(raw.block) {
            tracing::error!(%error, "device memory could not be freed");
        }
    }
}

/// What stands behind a [`Region`] of this backend.
pub(super) struct Buffer {
    pub(super) shared: Arc<Shared>,
    pub(super) buffer: vk::Buffer,
    /// `None` for a buffer of the host's.
    raw: Option<RawBuffer>,
}

impl Buffer {
    pub(super) fn owned(shared: Arc<Shared>, raw: RawBuffer) -> Self {
        Self { shared, buffer: raw.buffer, raw: Some(raw) }
    }

    pub(super) fn of_host(shared: Arc<Shared>, buffer: vk::Buffer) -> Self {
        Self { shared, buffer, raw: None }
    }

    /// The buffer behind `region`, if it is one of `shared`'s.
    pub(super) fn of<'a>(region: &'a Region, shared: &Arc<Shared>) -> Result<&'a Buffer> {
        region.owner().as_any().downcast_ref::<Buffer>().filter(|b| Arc::ptr_eq(&b.shared, shared)).ok_or_else(|| {
            Error::shape("region", format!("memory of {:?}", region.owner()), "memory of this Vulkan device")
        })
    }
}

impl Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vulkan {:?}{}", self.buffer, if self.raw.is_some() { "" } else { " of the host" })
    }
}

impl Allocation for Buffer {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(raw) = self.raw.take() {
            self.shared.retire(super::queue::Garbage::Buffer(raw));
        }
    }
}

/// Host-visible memory for one command buffer: parameters of its launches, bytes of its writes.
///
/// Chunks stay when the arena is rewound, so that a step that is recorded again and again allocates nothing.
#[derive(Debug, Default)]
pub(super) struct Arena {
    chunks: Vec<RawBuffer>,
    /// Chunk in use, and its first free byte.
    current: usize,
    at: u64,
}

/// A piece of an [`Arena`], already filled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) buffer: vk::Buffer,
    pub(super) offset: u64,
    pub(super) address: u64,
}

impl Arena {
    /// Copies `bytes` to a piece of its own, aligned to 16 bytes.
    pub(super) fn push(&mut self, shared: &Shared, bytes: &[u8]) -> Result<Piece> {
        let len = bytes.len() as u64;
        while self.chunks.get(self.current).is_some_and(|chunk| self.at + len > chunk.len) {
            self.current += 1;
            self.at = 0;
        }
        if self.current == self.chunks.len() {
            let usual = if self.chunks.is_empty() { FIRST_CHUNK } else { CHUNK };
            let size = len.max(usual).next_multiple_of(16);
            let label = "Vulkan staging memory";
            self.chunks.push(shared.memory.buffer(&shared.device, size, MemoryLocation::CpuToGpu, label)?);
        }
        let chunk = &self.chunks[self.current];
        let Some(mapped) = chunk.mapped() else {
            return Err(Error::Driver { call: "vkMapMemory", message: "staging memory is not mapped".into() });
        };
        let offset = self.at;
        // SAFETY: offset + len is within the chunk (the loop above, or the new chunk's size), whose memory is
        // mapped as long as it lives; no device work reads this part before it is submitted, nor is any
        // unfinished work left that was recorded with it, else the arena would not have been rewound.
        unsafe { mapped.add(offset as usize).copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
        self.at = (offset + len).next_multiple_of(16);
        Ok(Piece { buffer: chunk.buffer, offset, address: chunk.address + offset })
    }

    /// Makes all of it free again; what was made for one large write is given back.
    ///
    /// # Safety
    /// - No device work that may still run was recorded with it.
    pub(super) unsafe fn rewind(&mut self, shared: &Shared) {
        (self.current, self.at) = (0, 0);
        for chunk in self.chunks.extract_if(.., |chunk| chunk.len > KEPT_CHUNK) {
            // SAFETY: by the contract of this function.
            unsafe { shared.memory.free(&shared.device, chunk) };
        }
    }

    /// # Safety
    /// - No device work that may still run was recorded with it.
    pub(super) unsafe fn destroy(self, shared: &Shared) {
        for chunk in self.chunks {
            // SAFETY: by the contract of this function.
            unsafe { shared.memory.free(&shared.device, chunk) };
        }
    }
}

impl Shared {
    /// The buffer that reads pass through, grown to `len` bytes if need be.
    pub(super) fn readback_of<'a>(&self, buffer: &'a mut Option<RawBuffer>, len: u64) -> Result<&'a RawBuffer> {
        if buffer.as_ref().is_none_or(|buffer| buffer.len < len) {
            if let Some(small) = buffer.take() {
                self.retire(super::queue::Garbage::Buffer(small));
            }
            let size = len.next_power_of_two().max(MIB);
            *buffer =
                Some(self.memory.buffer(&self.device, size, MemoryLocation::GpuToCpu, "Vulkan readback memory")?);
        }
        buffer.as_ref().ok_or(Error::OutOfMemory { requested: len, label: "Vulkan readback memory".into() })
    }
}

#[cfg(test)]
mod tests {
    use super::super::VulkanBackend;
    use super::*;
    use crate::backend::{DeviceClass, GpuBackend};

    /// Through [`Memory`], as zeroing would touch every page.
    #[test]
    fn more_than_a_software_driver_has_is_an_error_and_room_comes_back() {
        let Ok(backend) = VulkanBackend::open(0) else { return };
        if backend.caps().class != DeviceClass::Software {
            return;
        }
        let (memory, device) = (&backend.shared.memory, &backend.shared.device);
        let make = |len| memory.buffer(device, len, MemoryLocation::GpuOnly, "half");
        let half = (memory.heap / 2 + 16).next_multiple_of(16);
        if half > backend.caps().max_alloc {
            return;
        }
        for _ in 0..2 {
            let first = make(half).unwrap();
            let error = make(half).unwrap_err();
            assert_eq!(error.code(), "E_OUT_OF_MEMORY");
            assert!(error.to_string().contains("half"), "{error}");
            // SAFETY: no work names it.
            unsafe { memory.free(device, first) };
        }
    }
}
