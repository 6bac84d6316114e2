//! The backends of this build, and the devices each finds.

use std::sync::Arc;

use serde::Serialize;

use super::{Caps, DeviceClass, GpuBackend};
use crate::error::{Error, Result};

/// One backend's part of the registry.
struct Entry {
    name: &'static str,
    devices: fn() -> Result<Vec<Caps>>,
    open: fn(usize) -> Result<Arc<dyn GpuBackend>>,
}

/// Backends of this build, best first where several devices are of one class.
const ENTRIES: &[Entry] = &[
    #[cfg(feature = "cuda")]
    Entry { name: "cuda", devices: super::cuda::devices, open: super::cuda::open },
    #[cfg(feature = "vulkan")]
    Entry { name: "vulkan", devices: super::vulkan::devices, open: super::vulkan::open },
    #[cfg(feature = "webgpu")]
    Entry { name: "webgpu", devices: super::webgpu::devices, open: super::webgpu::open },
    Entry { name: "cpu", devices: super::cpu::devices, open: super::cpu::open },
];

/// A backend of this build: its devices, or why there are none.
#[derive(Debug, Serialize)]
pub struct Listing {
    /// `cpu`, `cuda`, `vulkan` or `webgpu`.
    pub backend: &'static str,
    /// Devices, in the order in which [`open`] counts them.
    pub devices: Vec<Caps>,
    /// Why `devices` is empty.
    pub unavailable: Option<String>,
}

/// Names of the backends of this build.
pub fn names() -> Vec<&'static str> {
    ENTRIES.iter().map(|e| e.name).collect()
}

/// Every backend of this build and every device it finds.
pub fn list() -> Vec<Listing> {
    let listing = |e: &Entry| match (e.devices)() {
        Ok(devices) => {
            let unavailable = devices.is_empty().then(|| "no device".to_owned());
            Listing { backend: e.name, devices, unavailable }
        }
        Err(error) => {
            let reason = match error {
                Error::Unavailable { reason, .. } => reason,
                other => other.to_string(),
            };
            Listing { backend: e.name, devices: Vec::new(), unavailable: Some(reason) }
        }
    };
    ENTRIES.iter().map(listing).collect()
}

/// Opens device `index` (in [`list`]'s order) of the named backend.
///
/// # Errors
/// [`Error::Input`] for a name that isn't in [`names`], [`Error::Unavailable`] without driver or device.
pub fn open(name: &str, index: usize) -> Result<Arc<dyn GpuBackend>> {
    let entry = ENTRIES
        .iter()
        .find(|e| e.name == name)
        .ok_or_else(|| Error::Input(format!("no backend {name:?} in this build; there are {}", names().join(", "))))?;
    (entry.open)(index)
}

/// Opens the best device present: a GPU before the CPU, the CPU before a driver that computes on it.
///
/// # Errors
/// Only when even the CPU backend can't be opened.
pub fn best() -> Result<Arc<dyn GpuBackend>> {
    let rank = |class| match class {
        DeviceClass::Discrete => 0,
        DeviceClass::Integrated => 1,
        DeviceClass::Other => 2,
        DeviceClass::Cpu => 3,
        DeviceClass::Software => 4,
    };
    let mut found: Vec<_> = list()
        .into_iter()
        .flat_map(|l| l.devices.into_iter().enumerate().map(move |(i, caps)| (rank(caps.class), l.backend, i)))
        .collect();
    found.sort_by_key(|(rank, ..)| *rank);
    let mut last = Error::Unavailable { backend: "any backend", reason: "no device".into() };
    for (_, name, index) in found {
        match open(name, index) {
            Ok(backend) => return Ok(backend),
            Err(error) => {
                tracing::warn!(backend = name, %error, "listed, but could not be opened");
                last = error;
            }
        }
    }
    Err(last)
}
