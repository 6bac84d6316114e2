//! The time in which a batch is planned and sent.

use super::SlotRef;
use super::manager::AdapterManager;
use crate::error::Result;
use crate::pool::Plan;

/// A step under way: until it is dropped no slot and no table changes.
#[derive(Debug)]
pub struct Step<'a> {
    manager: &'a AdapterManager,
}

impl<'a> Step<'a> {
    pub(super) fn new(manager: &'a AdapterManager) -> Self {
        Self { manager }
    }

    /// Plans the step's batch, row by row, each with its own multiplier of its adapter's scale.
    ///
    /// # Errors
    /// [`Error::UnknownSlot`](crate::Error::UnknownSlot) for a slot that holds nothing.
    pub fn plan(&self, rows: impl IntoIterator<Item = (SlotRef, f32)>) -> Result<Plan> {
        self.manager.weights().plan(rows)
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.manager.end_step();
    }
}
