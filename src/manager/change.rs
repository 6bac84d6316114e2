//! Changes of slots and tables, which happen between two steps.

use std::time::Instant;

use super::cache::Ready;
use super::manager::{AdapterManager, State};
use super::sync::{MutexGuard, lock, wait_until, write};
use crate::error::Result;

impl AdapterManager {
    /// Copies the staged bytes into a claimed slot and publishes its tables, between two steps.
    pub(super) fn publish(&self, slot: u32, name: &str, ready: &Ready, deadline: Instant) -> Result<()> {
        let Ready { adapter, image } = ready;
        let layers = super::layers::layers_of(&self.pool, slot, adapter)?;
        self.begin_change(deadline)?;
        let mut stage =
            |encoder: &mut dyn crate::backend::Encoder| self.staging.copy_to(&self.pool, slot, image, encoder);
        let sent = self.pool.publish_image(&*self.gpu, slot, image, &mut stage);
        let sent = sent.map(|ticket| self.staging.busy_until(ticket));
        let mut state = lock(&self.state);
        if sent.is_ok() {
            let mut weights = write(&self.weights);
            let evicted = std::mem::take(&mut weights.slots[slot as usize].name);
            if !evicted.is_empty() && evicted != name {
                metrics::counter!("lorapool_evictions_total").increment(1);
                tracing::info!(slot, evicted, "evicted");
            }
            // An older adapter of the name that still drains keeps its slot, but not the name.
            let older = weights.slot_of(name).filter(|older| *older != slot as usize);
            if let Some(older) = older {
                weights.slots[older].name = format!("{name} (generation {})", weights.slots[older].generation);
                if weights.active == older {
                    weights.active = slot as usize;
                }
            }
            weights.occupy(slot as usize, name, adapter, layers);
            let pinned = state.pinned.iter().any(|pinned| **pinned == *name) || weights.active == slot as usize;
            drop(weights);
            state.slots.publish(slot, &name.into(), pinned);
            if let Some(older) = older {
                self.note_vacant(&state, older as u32);
            }
            self.seat(&mut state, name, slot);
        }
        self.end_change(state);
        sent
    }

    /// Waits until no step is under way, and keeps new ones from beginning.
    pub(super) fn begin_change(&self, deadline: Instant) -> Result<()> {
        let mut state = lock(&self.state);
        while state.publishing {
            state =
                wait_until(&self.changed, state, deadline).map_err(|state| self.timed_out("another change", &state))?;
        }
        state.publishing = true;
        while state.steps > 0 {
            state = match wait_until(&self.changed, state, deadline) {
                Ok(state) => state,
                Err(state) => {
                    let error = self.timed_out("a step to end", &state);
                    self.end_change(state);
                    return Err(error);
                }
            };
        }
        Ok(())
    }

    /// Lets steps begin again.
    pub(super) fn end_change(&self, mut state: MutexGuard<'_, State>) {
        state.publishing = false;
        drop(state);
        self.changed.notify_all();
    }

    /// Empties the tables of a slot that an unload has freed, unless it has been filled again.
    pub(super) fn wipe(&self, slot: u32, generation: u64, deadline: Instant) -> Result<()> {
        self.begin_change(deadline)?;
        let still = {
            let state = lock(&self.state);
            let now = &state.slots.slots()[slot as usize];
            now.name.is_none() && now.generation == generation
        };
        let sent = match still {
            true => self.pool.clear(&*self.gpu, slot).map(|_| ()),
            false => Ok(()),
        };
        self.end_change(lock(&self.state));
        sent
    }
}
