//! A counted use of a slot.

use std::sync::Arc;

use super::SlotRef;
use super::manager::AdapterManager;

/// While it lives, its slot keeps its contents: rows that name [`Lease::slot_ref`] get this adapter, by
/// these bytes, whatever is loaded, replaced or unloaded meanwhile.
#[derive(Debug)]
pub struct Lease {
    manager: Arc<AdapterManager>,
    slot: u32,
    name: String,
    id: u64,
}

impl Lease {
    pub(super) fn new(manager: Arc<AdapterManager>, slot: u32, name: &str) -> Self {
        let id = manager.weights().slots[slot as usize].id();
        Self { manager, slot, name: name.to_owned(), id }
    }

    /// The slot.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// The slot as rows name it.
    pub fn slot_ref(&self) -> SlotRef {
        SlotRef::Slot(self.slot)
    }

    /// The name that it was acquired by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Identity of the contents: what a prefix cache of the host keys by. See [`AdapterSlot::id`](super::AdapterSlot::id).
    pub fn id(&self) -> u64 {
        self.id
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.manager.leave(self.slot);
    }
}
