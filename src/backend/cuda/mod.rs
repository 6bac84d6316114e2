//! The CUDA driver API through cudarc: plain addresses for operands, events for tickets, stream capture for
//! graphs, the committed PTX for kernels.
//!
//! Nothing is needed to build it. A driver of CUDA 12.0 or later and a device of compute capability 7.0 or later
//! are looked for when the program runs.

mod device;
mod driver;
mod encoder;
mod graph;
mod grouped;
mod host;
mod memory;
mod module;
mod product;
mod queue;
mod routed;
mod sm90;
mod sm90a;
mod transfer;
mod variant;

use std::sync::Arc;

use self::device::{Device, candidates};
use self::encoder::CudaEncoder;
use self::memory::Memory;
use self::queue::Shared;
use self::variant::Variant;
use super::{Caps, GpuBackend, Graph, HostBuffer, Pipeline, Product, Record, Ticket};
use crate::contract::{Kernel, Spec};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Region;

const NAME: &str = "cuda";

/// Devices that this backend can open.
///
/// # Errors
/// [`Error::Unavailable`] without a driver, without a device, or when driver or devices are too old.
pub fn devices() -> Result<Vec<Caps>> {
    let (good, refused) = candidates()?;
    if good.is_empty() {
        let reason = if refused.is_empty() { "the driver has no device".into() } else { refused.join("; ") };
        return Err(Error::Unavailable { backend: NAME, reason });
    }
    Ok(good.into_iter().map(|candidate| candidate.caps).collect())
}

/// Opens device `index` of [`devices`], on its primary context and a stream of its own.
///
/// # Errors
/// [`Error::Unavailable`] without a driver or such a device, [`Error::Driver`] when the driver refuses a context.
pub fn open(index: usize) -> Result<Arc<dyn GpuBackend>> {
    Ok(Arc::new(CudaBackend::new(index)?))
}

/// A device, its stream, and the kernels loaded on it.
#[derive(Debug)]
pub struct CudaBackend {
    shared: Arc<Shared>,
}

impl CudaBackend {
    /// On device `index` of [`devices`].
    ///
    /// # Errors
    /// As [`open`].
    pub fn new(index: usize) -> Result<Self> {
        let (mut good, refused) = candidates()?;
        if index >= good.len() {
            let found = format!("no device {index}; there are {}", good.len());
            let reason = refused.into_iter().fold(found, |all, one| all + "; " + &one);
            return Err(Error::Unavailable { backend: NAME, reason });
        }
        let device = Device::open(good.swap_remove(index))?;
        Ok(Self { shared: Arc::new(Shared::new(device)?) })
    }
}

impl GpuBackend for CudaBackend {
    fn caps(&self) -> &Caps {
        &self.shared.device.caps
    }

    fn alloc(&self, len: u64, label: &str) -> Result<Region> {
        let limit = self.caps().max_alloc;
        if len > limit {
            return Err(Error::Limit { what: "allocation", found: len, limit, hint: " bytes" });
        }
        Memory::alloc(&self.shared, len, label)
    }

    fn load(&self, kernel: Kernel, spec: Spec) -> Result<Pipeline> {
        module::load(&self.shared, kernel, spec)
    }

    fn submit(&self, record: Record<'_>) -> Result<Ticket> {
        let mut encoder = CudaEncoder::new(&self.shared, None);
        record(&mut encoder)?;
        let mut commands = encoder.finish();
        let (list, chunks) = (&commands.list, &mut commands.chunks);
        let ticket = self.shared.send(chunks, |stream| list.enqueue(stream));
        self.shared.recycle(commands);
        ticket
    }

    fn capture(&self, record: Record<'_>) -> Result<Box<dyn Graph>> {
        let mut encoder = CudaEncoder::new(&self.shared, None);
        record(&mut encoder)?;
        let mut commands = encoder.finish();
        let graph = graph::capture(&self.shared, &mut commands);
        self.shared.recycle(commands);
        Ok(Box::new(graph?))
    }

    fn completed(&self) -> Result<Ticket> {
        self.shared.completed()
    }

    fn wait(&self, ticket: Ticket) -> Result<()> {
        self.shared.wait(ticket)
    }

    fn read(&self, src: &Region) -> Result<Vec<u8>> {
        Memory::read(&self.shared, src)
    }

    fn alloc_host(&self, len: usize) -> Result<HostBuffer> {
        transfer::alloc_host(&self.shared, len)
    }

    fn upload(&self, dst: &Region, bytes: &[u8]) -> Result<()> {
        transfer::upload(&self.shared, dst, bytes)
    }

    fn download(&self, src: &Region, to: &mut [u8]) -> Result<()> {
        transfer::download(&self.shared, src, to)
    }

    fn variants(&self) -> Vec<&'static str> {
        let able = |variant: &Variant| variant.runs_on(self.shared.device.capability);
        Variant::ALL.into_iter().filter(able).map(Variant::name).collect()
    }

    fn limited_to(&self, variant: &str) -> Result<Arc<dyn GpuBackend>> {
        let limit = Variant::ALL.into_iter().find(|known| known.name() == variant);
        let limit = limit.filter(|limit| self.variants().contains(&limit.name())).ok_or_else(|| {
            Error::Input(format!("no variant {variant:?} on this device; there are {:?}", self.variants()))
        })?;
        let shared = Shared::new(self.shared.device.again(limit)?)?;
        Ok(Arc::new(Self { shared: Arc::new(shared) }))
    }

    fn capture_products(&self, dtype: DType, products: &[Product<'_>]) -> Result<Box<dyn Graph>> {
        Ok(Box::new(product::capture(&self.shared, dtype, products)?))
    }
}
