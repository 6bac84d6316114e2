//! Vulkan 1.2 through ash: buffer device addresses for operands, a timeline semaphore for tickets, the
//! committed SPIR-V for kernels.
//!
//! A device must have the features `bufferDeviceAddress` and `timelineSemaphore`; nothing else is needed.
//! With `LORAPOOL_VULKAN_VALIDATION=1` the Khronos validation layer is on and its messages are counted
//! ([`validation_messages`]).
//!
//! In NVIDIA's driver 580 a thread that has used Vulkan and ends while another thread destroys a device can lock up
//! both: each holds, inside the driver, what the other waits for. A process that opens one device and keeps it, as a
//! server does, never meets this; one that opens several should drop them after its other threads have ended.

mod device;
mod encoder;
mod graph;
mod host;
mod memory;
mod module;
mod queue;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

/// The Vulkan bindings whose handles [`VulkanBackend::adopt`] takes.
pub use ash;
use ash::vk;
use gpu_allocator::MemoryLocation;

pub use device::{validation_installed, validation_messages};
pub use host::{HostDevice, HostRecording};

use self::device::Instance;
use self::encoder::Owners;
use self::graph::VulkanGraph;
use self::memory::Buffer;
use self::queue::Shared;
use super::{Caps, Encoder, GpuBackend, Graph, Pipeline, Record, Ticket};
use crate::contract::{Kernel, Spec};
use crate::error::{Error, Result};
use crate::memory::{DevicePtr, Region};

const NAME: &str = "vulkan";
/// Bytes that one read brings back at a time.
const READBACK: u64 = 64 << 20;

/// Turns a Vulkan error into ours.
fn driver(call: &'static str) -> impl Fn(vk::Result) -> Error {
    move |error| Error::Driver { call, message: error.to_string() }
}

/// A panic while a lock was held left nothing half done: every state behind our locks is valid at each step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poison| poison.into_inner())
}

/// Devices that this backend can open.
///
/// # Errors
/// [`Error::Unavailable`] without a Vulkan loader, without a driver, or when every device lacks a feature.
pub fn devices() -> Result<Vec<Caps>> {
    let (good, refused) = Instance::new()?.candidates()?;
    if good.is_empty() {
        return Err(none(&refused));
    }
    Ok(good.into_iter().map(|candidate| candidate.caps).collect())
}

/// Opens device `index` of [`devices`].
///
/// # Errors
/// [`Error::Unavailable`] when there is none, [`Error::Driver`] when the driver refuses to open it.
pub fn open(index: usize) -> Result<Arc<dyn GpuBackend>> {
    Ok(Arc::new(VulkanBackend::open(index)?))
}

fn none(refused: &[String]) -> Error {
    let reason = if refused.is_empty() { "no Vulkan device is present".to_owned() } else { refused.join("; ") };
    Error::Unavailable { backend: NAME, reason }
}

/// One Vulkan device and one of its queues.
pub struct VulkanBackend {
    shared: Arc<Shared>,
}

impl fmt::Debug for VulkanBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VulkanBackend on {}", self.shared.caps.device)
    }
}

impl VulkanBackend {
    /// Opens device `index` of [`devices`].
    ///
    /// # Errors
    /// [`Error::Unavailable`] when there is none, [`Error::Driver`] when the driver refuses to open it.
    pub fn open(index: usize) -> Result<Self> {
        let (good, refused) = Instance::new()?.candidates()?;
        if good.is_empty() {
            return Err(none(&refused));
        }
        let found = good.len();
        let candidate = good.into_iter().nth(index).ok_or_else(|| Error::Unavailable {
            backend: NAME,
            reason: format!(
                "no device {index}; there are {found}, counted from 0{}",
                refused.iter().map(|r| format!("; {r}")).collect::<String>()
            ),
        })?;
        let (device, caps) = candidate.open()?;
        Ok(Self { shared: Arc::new(Shared::new(device, caps, Arc::default())?) })
    }

    /// Records with the backend's own frames; when `record` fails nothing is left behind.
    fn submit_with(&self, record: &mut dyn FnMut(&mut encoder::VulkanEncoder<'_>) -> Result<()>) -> Result<Ticket> {
        let mut recording = self.shared.begin()?;
        let once = vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT;
        record(&mut recording.frame().encode(&self.shared, once, None)?)?;
        recording.submit()
    }
}

impl GpuBackend for VulkanBackend {
    fn caps(&self) -> &Caps {
        &self.shared.caps
    }

    fn alloc(&self, len: u64, label: &str) -> Result<Region> {
        let limit = self.shared.caps.max_alloc;
        if len > limit {
            return Err(Error::Limit { what: "allocation", found: len, limit, hint: " bytes" });
        }
        // Kernels read whole words, and the zeroes come in words.
        let size = len.max(1).next_multiple_of(16);
        let raw = self.shared.memory.buffer(&self.shared.device, size, MemoryLocation::GpuOnly, label)?;
        let (buffer, address) = (raw.buffer, raw.address);
        let region = Region::new(DevicePtr(address), len, Arc::new(Buffer::owned(self.shared.clone(), raw)));
        self.submit_with(&mut |encoder| {
            encoder.clear(buffer, size);
            Ok(())
        })?;
        Ok(region)
    }

    fn load(&self, kernel: Kernel, spec: Spec) -> Result<Pipeline> {
        module::load(&self.shared, kernel, spec)
    }

    fn submit(&self, record: Record<'_>) -> Result<Ticket> {
        self.submit_with(&mut |encoder| record(encoder))
    }

    fn capture(&self, record: Record<'_>) -> Result<Box<dyn Graph>> {
        let mut recording = self.shared.begin()?;
        let mut owners = Owners::default();
        let many = vk::CommandBufferUsageFlags::SIMULTANEOUS_USE;
        record(&mut recording.frame().encode(&self.shared, many, Some(&mut owners))? as &mut dyn Encoder)?;
        Ok(Box::new(VulkanGraph::new(self.shared.clone(), recording.keep()?, owners)))
    }

    fn completed(&self) -> Result<Ticket> {
        self.shared.completed()
    }

    fn wait(&self, ticket: Ticket) -> Result<()> {
        self.shared.wait(ticket)
    }

    fn read(&self, src: &Region) -> Result<Vec<u8>> {
        let from = Buffer::of(src, &self.shared)?;
        let mut out = Vec::with_capacity(src.len() as usize);
        // One read at a time: they share the buffer.
        let mut readback = lock(&self.shared.readback);
        while (out.len() as u64) < src.len() {
            let done = out.len() as u64;
            let size = (src.len() - done).min(READBACK);
            let buffer = self.shared.readback_of(&mut readback, size)?;
            let ticket = self.submit_with(&mut |encoder| {
                encoder.transfer((buffer.buffer, 0), (from.buffer, src.offset() + done), size);
                encoder.release_to_host();
                Ok(())
            })?;
            self.shared.wait(ticket)?;
            let bytes = buffer.bytes(size as usize);
            out.extend_from_slice(bytes.ok_or_else(|| Error::Driver {
                call: "vkMapMemory",
                message: "readback memory is not mapped".into(),
            })?);
        }
        Ok(out)
    }
}
