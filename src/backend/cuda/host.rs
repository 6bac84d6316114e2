//! On a host engine's own context and stream.

#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use super::CudaBackend;
use super::device::Device;
use super::encoder::CudaEncoder;
use super::memory::Memory;
use super::queue::Shared;
use crate::backend::Record;
use crate::error::{Error, Result};
use crate::memory::Region;

impl CudaBackend {
    /// A backend on the host's context (a `CUcontext`) and stream (a `CUstream`; null is the legacy default
    /// stream). All its work goes to that stream, in order with the host's own. The host keeps owning both.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without a usable driver or device, [`Error::Driver`] when the driver refuses the
    /// context.
    ///
    /// # Safety
    /// - `context` is a valid context, and `stream` one of its streams.
    /// - Both outlive the backend and all its regions, pipelines and graphs.
    pub unsafe fn adopt(context: *mut c_void, stream: *mut c_void) -> Result<Self> {
        // SAFETY: the caller vouches for the context.
        let device = unsafe { Device::adopt(context.cast()) }?;
        // SAFETY: the caller vouches for the stream.
        Ok(Self { shared: Arc::new(unsafe { Shared::adopt(device, stream.cast()) }) })
    }

    /// Records work straight onto the backend's stream, for an adopted backend the host's. Also while the host
    /// captures that stream: then the work becomes a part of the host's graph, nothing is allocated and nothing
    /// waited for. When `record` fails, nothing is sent.
    ///
    /// Regions that the host has captured must be kept by the host while its graph may run: the backend can't
    /// see those runs, and frees a region after the work that it has seen.
    ///
    /// # Errors
    /// Those of `record`, [`Error::Driver`], and [`Error::Input`] for a write during a capture: its bytes would
    /// have to outlive this backend's sight. Write the batch before the capture, or into memory of the host's.
    pub fn encode(&self, record: Record<'_>) -> Result<()> {
        let capturing = self.shared.capturing()?;
        let no_writes = capturing.then_some("bytes can't be written while the host is capturing its stream");
        let mut encoder = CudaEncoder::new(&self.shared, no_writes);
        record(&mut encoder)?;
        let mut commands = encoder.finish();
        let sent = if capturing {
            self.shared.send_to_capture(|stream| commands.list.enqueue(stream))
        } else {
            let (list, chunks) = (&commands.list, &mut commands.chunks);
            self.shared.send(chunks, |stream| list.enqueue(stream)).map(drop)
        };
        self.shared.recycle(commands);
        sent
    }

    /// The host's memory at device address `address` as a region of this backend. `owner` is held as long as the
    /// region and its clones; a host that keeps the memory itself gives `Arc::new(())`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] when the range wraps around, or starts at null.
    ///
    /// # Safety
    /// - `address` is accessible in the backend's context for `len` bytes, as long as `owner` lives and, when
    ///   that is longer, until the work on the region has finished.
    /// - No two imports overlap, unless both are only read or are never operands of one launch or copy.
    pub unsafe fn import(&self, address: u64, len: u64, owner: Arc<dyn Any + Send + Sync>) -> Result<Region> {
        if address == 0 || address.checked_add(len).is_none() {
            return Err(Error::OutOfBounds { offset: address, len, available: u64::MAX });
        }
        Ok(Memory::import(&self.shared, address, len, owner))
    }
}
