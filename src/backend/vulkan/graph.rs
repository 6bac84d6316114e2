//! Work kept for replay: a command buffer that may be pending more than once.

#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use super::encoder::{Frame, Owners};
use super::queue::{Garbage, Shared};
use crate::backend::{Graph, Ticket};
use crate::error::Result;

/// A reusable command buffer, its parameters and captured bytes, and all the memory that it touches.
///
/// Its commands begin with a barrier on all earlier ones, so a replay that is sent while another one is
/// pending runs after it.
pub(super) struct VulkanGraph {
    shared: Arc<Shared>,
    frame: Option<Frame>,
    /// Kept alive, as the commands hold their addresses.
    owners: Owners,
}

impl VulkanGraph {
    /// `frame` was recorded for simultaneous use and touches only `owners`.
    pub(super) fn new(shared: Arc<Shared>, frame: Frame, owners: Owners) -> Self {
        Self { shared, frame: Some(frame), owners }
    }
}

impl fmt::Debug for VulkanGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VulkanGraph on {} allocations", self.owners.len())
    }
}

impl Graph for VulkanGraph {
    fn replay(&self) -> Result<Ticket> {
        let commands = self.frame.as_ref().map(|frame| frame.commands).unwrap_or_default();
        // SAFETY: `capture` ended the command buffer and began it for simultaneous use; `drop` retires it.
        unsafe { self.shared.replay(commands) }
    }
}

impl Drop for VulkanGraph {
    fn drop(&mut self) {
        if let Some(frame) = self.frame.take() {
            self.shared.retire(Garbage::Frame(frame));
        }
    }
}
