//! What a manager holds, for people and for routers.

use std::fmt;

use serde::Serialize;

use super::manager::AdapterManager;
use crate::pool::Phase;

/// A slot that is not vacant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Resident {
    /// Index of the slot.
    pub slot: u32,
    /// The adapter's name.
    pub name: String,
    /// Identity of its contents.
    pub id: u64,
    /// How many adapters the slot has held.
    pub generation: u64,
    /// Leases on it.
    pub refs: u32,
    /// Bytes of device memory.
    pub bytes: u64,
    /// Whether it is never evicted.
    pub pinned: bool,
    /// Whether it takes no one new.
    pub draining: bool,
}

/// A manager at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Slots that are not vacant, by index.
    pub residents: Vec<Resident>,
    /// Number of slots.
    pub slots: usize,
    /// Loads that stage or wait for their turn.
    pub loading: usize,
}

impl AdapterManager {
    /// Slots, leases and loads as they are now.
    pub fn status(&self) -> Status {
        let bytes = self.pool().layout().slot_bytes();
        let state = self.state();
        let weights = self.weights();
        let resident = |(index, slot): (usize, &crate::pool::Slot)| {
            Some(Resident {
                slot: index as u32,
                name: slot.name.as_deref()?.to_owned(),
                id: weights.slots[index].id(),
                generation: slot.generation,
                refs: slot.refs,
                bytes,
                pinned: slot.pinned,
                draining: slot.phase == Phase::Draining,
            })
        };
        let residents = state.slots.slots().iter().enumerate().filter_map(resident).collect();
        Status { residents, slots: state.slots.slots().len(), loading: self.in_line() }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} of {} slots hold an adapter, {} loading", self.residents.len(), self.slots, self.loading)?;
        for r in &self.residents {
            let marks = [(r.pinned, " pinned"), (r.draining, " draining")];
            let marks: String = marks.iter().filter(|(on, _)| *on).map(|(_, mark)| *mark).collect();
            let line = format!(
                "{:>4}  {:016x}  generation {}, {} leases, {} bytes",
                r.slot, r.id, r.generation, r.refs, r.bytes
            );
            writeln!(f, "{line}{marks}  {}", r.name)?;
        }
        Ok(())
    }
}
