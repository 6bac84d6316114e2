//! The backend trait: memory, pipelines, recorded work and captured graphs, on any GPU API.
//!
//! Four folders implement it, with the same file names: `mod` (the backend and its memory), `encoder`
//! (recording into a stream, command buffer or pass), `graph` (work kept for replay) and `module`
//! (kernels of one device). Everything above uses only this trait; what differs between devices is
//! data in [`Caps`].

mod caps;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod launch;
mod product;
mod registry;
mod transfer;
#[cfg(feature = "vulkan")]
pub mod vulkan;
#[cfg(feature = "webgpu")]
pub mod webgpu;

use std::fmt::Debug;

pub use caps::{Caps, DeviceClass, WeightLayout};
pub use launch::{Launch, Pipeline};
pub use product::Product;
pub use registry::{Listing, best, list, names, open};
pub use transfer::{HostBuffer, HostBytes, check_download};

use crate::contract::{Kernel, Spec};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Region;

/// A point in a backend's queue; later submissions have larger tickets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Records work. A closure, so that an encoder can't be left half open.
pub type Record<'a> = &'a mut dyn FnMut(&mut dyn Encoder) -> Result<()>;

/// One device of one GPU API.
///
/// Work runs in the order of submission. All methods may be called from any thread.
pub trait GpuBackend: Debug + Send + Sync {
    /// What the device can do.
    fn caps(&self) -> &Caps;

    /// `len` bytes at a fixed address, all zero. `label` names it in errors and debuggers.
    ///
    /// # Errors
    /// [`Error::Limit`] past [`Caps::max_alloc`], [`Error::OutOfMemory`] when the device has no room.
    fn alloc(&self, len: u64, label: &str) -> Result<Region>;

    /// Compiles a kernel, or finds it compiled. Slow the first time: never on a hot path.
    fn load(&self, kernel: Kernel, spec: Spec) -> Result<Pipeline>;

    /// Records work and sends it to the device. When `record` fails, nothing is sent.
    fn submit(&self, record: Record<'_>) -> Result<Ticket>;

    /// Records work and keeps it instead. Bytes given to [`Encoder::write`] are kept with it.
    fn capture(&self, record: Record<'_>) -> Result<Box<dyn Graph>>;

    /// The last ticket whose work has finished.
    fn completed(&self) -> Result<Ticket>;

    /// Blocks until `ticket`'s work has finished.
    fn wait(&self, ticket: Ticket) -> Result<()>;

    /// The bytes of `src` after all work submitted so far. Any offset and length.
    fn read(&self, src: &Region) -> Result<Vec<u8>>;

    /// `len` zero bytes of host memory: [`GpuBackend::upload`] from there and [`GpuBackend::download`] to there
    /// go at the full speed of the device's link.
    ///
    /// # Errors
    /// The driver's, when the host has no room.
    fn alloc_host(&self, len: usize) -> Result<HostBuffer> {
        Ok(HostBuffer::plain(len))
    }

    /// Copies `bytes` to the start of `dst` and blocks until they are there, beside the queue: neither waits for
    /// the other where the device can copy while it computes; elsewhere the queue is shared in small pieces.
    /// No unfinished work may touch `dst`: [wait](GpuBackend::wait) for it first.
    ///
    /// # Errors
    /// As [`Encoder::write`].
    fn upload(&self, dst: &Region, bytes: &[u8]) -> Result<()> {
        transfer::upload_in_pieces(self, dst, bytes)
    }

    /// Copies the start of `src` to `to`, as [`GpuBackend::upload`] does the other way. No unfinished work may
    /// write `src`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] when `to` is longer than `src`.
    fn download(&self, src: &Region, to: &mut [u8]) -> Result<()> {
        transfer::download_in_pieces(self, src, to)
    }

    /// Names of the ways in which this device can run a kernel, the plainest first; none where there is only one. Which
    /// of them a kernel is run in is decided by a measured table, by device and types alone.
    fn variants(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// The same device opened once more, to run kernels in `variant` or a plainer one alone. For measurement.
    ///
    /// # Errors
    /// [`Error::Input`] for a name that isn't in [`GpuBackend::variants`], or those of opening a device.
    fn limited_to(&self, variant: &str) -> Result<std::sync::Arc<dyn GpuBackend>> {
        Err(Error::Input(format!("no variant {variant:?}; there are {:?}", self.variants())))
    }

    /// Keeps `products` of matrices of `dtype`, one after the other, by the vendor's own matrix library: what the
    /// base model costs a host's engine. For measurement alone.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where there is no such library, which is so on most devices.
    fn capture_products(&self, dtype: DType, products: &[Product<'_>]) -> Result<Box<dyn Graph>> {
        let _ = (dtype, products);
        let reason = "no matrix library".to_owned();
        Err(Error::Unavailable { backend: self.caps().backend, reason })
    }
}

/// Records launches and copies. Each call sees the effects of the calls before it.
pub trait Encoder {
    /// Launches that may run at once: none may write what another one touches.
    fn launch(&mut self, batch: &[Launch<'_>]) -> Result<()>;

    /// Copies host bytes to the start of `dst`. Offset in the allocation and length are multiples of 4
    /// ([`check_write`]).
    fn write(&mut self, dst: &Region, bytes: &[u8]) -> Result<()>;

    /// Copies `src` to `dst`, of one length, not overlapping; offsets and length are multiples of 4
    /// ([`check_copy`]).
    fn copy(&mut self, dst: &Region, src: &Region) -> Result<()>;
}

/// Work kept for replay: addresses and parameters are fixed, the bytes behind them are not.
pub trait Graph: Debug + Send {
    /// Sends the work to the device once more.
    fn replay(&self) -> Result<Ticket>;
}

/// What every [`Encoder::write`] checks first.
///
/// # Errors
/// [`Error::OutOfBounds`] when `bytes` are more than `dst` holds, [`Error::Shape`] when an offset or
/// length is no multiple of 4.
pub fn check_write(dst: &Region, bytes: &[u8]) -> Result<()> {
    if bytes.len() as u64 > dst.len() {
        return Err(Error::OutOfBounds { offset: 0, len: bytes.len() as u64, available: dst.len() });
    }
    check_words("write", dst, bytes.len() as u64)
}

/// What every [`Encoder::copy`] checks first.
///
/// # Errors
/// [`Error::Shape`] when lengths differ, regions overlap, or an offset or length is no multiple of 4.
pub fn check_copy(dst: &Region, src: &Region) -> Result<()> {
    if dst.len() != src.len() || dst.overlaps(src) {
        return Err(Error::shape(
            "copy",
            format!("{} bytes to {}{}", src.len(), dst.len(), if dst.overlaps(src) { ", overlapping" } else { "" }),
            "two separate regions of one length",
        ));
    }
    check_words("copy to", dst, dst.len())?;
    check_words("copy from", src, src.len())
}

fn check_words(what: &str, region: &Region, len: u64) -> Result<()> {
    if !region.offset().is_multiple_of(4) || !len.is_multiple_of(4) {
        return Err(Error::shape(what, format!("{len} bytes at offset {}", region.offset()), "multiples of 4"));
    }
    Ok(())
}
