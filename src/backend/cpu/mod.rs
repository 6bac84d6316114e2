//! The cpu backend.

use std::sync::Arc;

use super::{Caps, GpuBackend};
use crate::error::{Error, Result};

/// Devices that this backend can open.
pub fn devices() -> Result<Vec<Caps>> {
    Err(Error::Unavailable { backend: "cpu", reason: "in work".into() })
}

/// Opens device `index` of [`devices`].
pub fn open(_index: usize) -> Result<Arc<dyn GpuBackend>> {
    Err(Error::Unavailable { backend: "cpu", reason: "in work".into() })
}
