//! On a host engine's own device: its queue, its command buffers, its memory.

#![allow(unsafe_code)]

use std::fmt;
use std::sync::{Arc, Mutex};

use ash::vk;

use super::device::{Candidate, Device, Instance};
use super::encoder::{Hazards, Owners, VulkanEncoder};
use super::memory::{Arena, Buffer};
use super::queue::Shared;
use super::{NAME, VulkanBackend};
use crate::backend::Record;
use crate::error::{Error, Result};
use crate::memory::{DevicePtr, Region};

/// A host's Vulkan device, for [`VulkanBackend::adopt`]. The host keeps owning all of it.
#[derive(Clone)]
pub struct HostDevice {
    /// The instance.
    pub instance: ash::Instance,
    /// `apiVersion` that the instance was made with.
    pub api_version: u32,
    /// The device's physical device.
    pub physical_device: vk::PhysicalDevice,
    /// The device.
    pub device: ash::Device,
    /// A queue with compute.
    pub queue: vk::Queue,
    /// The queue's family.
    pub queue_family: u32,
    /// Held by the backend around each submission to `queue`, and to be held by the host around its own.
    pub queue_lock: Arc<Mutex<()>>,
}

impl fmt::Debug for HostDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostDevice {:?}, queue {:?} of family {}", self.device.handle(), self.queue, self.queue_family)
    }
}

/// What a host's command buffer needs of us while it runs: parameters of the launches, bytes of the
/// writes, and every allocation that they touch. Drop it when the command buffer has finished, or is
/// not going to be submitted (again).
#[must_use = "dropping this frees memory that the command buffer uses"]
pub struct HostRecording {
    shared: Arc<Shared>,
    arena: Option<Arena>,
    owners: Owners,
}

impl fmt::Debug for HostRecording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostRecording on {} allocations", self.owners.len())
    }
}

impl Drop for HostRecording {
    fn drop(&mut self) {
        if let Some(arena) = self.arena.take() {
            // SAFETY: the caller of `encode_on` has promised to drop this only after the command buffer ran.
            unsafe { self.shared.end_for_host(arena) };
        }
    }
}

impl VulkanBackend {
    /// A backend on the host's device and queue. Nothing of the host's is destroyed with it.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the device lacks a feature that the kernels need.
    ///
    /// # Safety
    /// - The handles in `host` belong together and outlive the backend and all its regions, pipelines,
    ///   graphs and recordings.
    /// - The instance was made with `api_version` of at least 1.2, the device with the features
    ///   `bufferDeviceAddress` and `timelineSemaphore`, `queue` from family `queue_family`, which has compute.
    /// - The host uses `queue` only while it holds `queue_lock`, and calls the backend only while it doesn't.
    pub unsafe fn adopt(host: HostDevice) -> Result<Self> {
        let instance = Instance::of_host(host.instance, host.api_version);
        // SAFETY: by the contract of this function.
        let examined = unsafe { Candidate::examine(&instance, host.physical_device) };
        let candidate = examined.map_err(|reason| Error::Unavailable { backend: NAME, reason })?;
        let device = Device {
            raw: host.device,
            names: None,
            physical: host.physical_device,
            queue: host.queue,
            queue_family: host.queue_family,
            owned: false,
            instance,
        };
        Ok(Self { shared: Arc::new(Shared::new(device, candidate.caps, host.queue_lock)?) })
    }

    /// Records into the host's command buffer. The work sees what commands before it wrote, and commands
    /// after it see what it wrote: barriers on both sides are included. The compute pipeline binding and the
    /// first 8 bytes of push constants are left changed.
    ///
    /// When this fails, the command buffer may hold a part of the work and must not be submitted.
    ///
    /// # Safety
    /// - `commands` is in the recording state, outside a render pass, of a queue family with compute, and of
    ///   this device; no one else records to it during the call.
    /// - Unless it is submitted to the backend's own queue, earlier work of the backend on the same memory
    ///   ([`alloc`](crate::backend::GpuBackend::alloc)'s zeroes among it) is waited for first.
    /// - The returned guard is dropped only when no submission of `commands` is pending or to come.
    pub unsafe fn encode_on(&self, commands: vk::CommandBuffer, record: Record<'_>) -> Result<HostRecording> {
        let mut recording = HostRecording {
            shared: self.shared.clone(),
            arena: Some(self.shared.begin_for_host()?),
            owners: Owners::default(),
        };
        let mut hazards = Hazards::default();
        if let Some(arena) = &mut recording.arena {
            let keep = Some(&mut recording.owners);
            let mut encoder = VulkanEncoder::new(&self.shared, commands, arena, &mut hazards, keep);
            record(&mut encoder)?;
            encoder.release();
        }
        Ok(recording)
    }

    /// The first `len` bytes of the host's buffer as a region. The buffer stays the host's: dropping the
    /// region frees nothing.
    ///
    /// # Errors
    /// [`Error::Shape`] when `len` or the buffer's address is no multiple of 4: kernels read whole words.
    ///
    /// # Safety
    /// - `buffer` belongs to this device, is bound to memory, holds at least `len` bytes, and was made with
    ///   the usages `SHADER_DEVICE_ADDRESS`, `TRANSFER_SRC` and `TRANSFER_DST`.
    /// - `address` is what `vkGetBufferDeviceAddress` gives for it.
    /// - It outlives the region, its clones and slices, and all work that was recorded with them.
    /// - No other thread or queue touches it while such work runs.
    pub unsafe fn import(&self, buffer: vk::Buffer, address: vk::DeviceAddress, len: u64) -> Result<Region> {
        if !len.is_multiple_of(4) || !address.is_multiple_of(4) {
            return Err(Error::shape(
                "imported buffer",
                format!("{len} bytes at {address:#x}"),
                "length and address that are multiples of 4",
            ));
        }
        Ok(Region::new(DevicePtr(address), len, Arc::new(Buffer::of_host(self.shared.clone(), buffer))))
    }
}
