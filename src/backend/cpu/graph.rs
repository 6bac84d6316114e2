//! A recording kept for replay.

use std::sync::Arc;

use super::Device;
use super::encoder::Recording;
use crate::backend::{Graph, Ticket};
use crate::error::Result;

/// Recorded work and the device that does it.
#[derive(Debug)]
pub(super) struct CpuGraph {
    pub(super) device: Arc<Device>,
    pub(super) recording: Recording,
}

impl Graph for CpuGraph {
    fn replay(&self) -> Result<Ticket> {
        self.device.run(&self.recording)
    }
}
