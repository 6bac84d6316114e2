//! Who uses which slot, and when it was used last.

use std::sync::atomic::Ordering;

use super::{LoraWeights, SlotView};

impl LoraWeights {
    /// Resolves `slot` (-1: the active one) and counts one more sequence on it. Returns the resolved
    /// index, which is what [`LoraWeights::release_slot`] takes: the active slot may be another by then.
    /// Returns -1, and counts nothing, for a slot that does not exist.
    pub fn acquire_slot(&self, slot: i32) -> i32 {
        match self.resolve(slot) {
            Some(slot) => {
                self.ref_counts[slot].fetch_add(1, Ordering::AcqRel);
                self.touch_slot(slot);
                slot as i32
            }
            None => -1,
        }
    }

    /// Undoes one [`LoraWeights::acquire_slot`], by the index that it returned. -1 does nothing, and so
    /// does a release too many.
    pub fn release_slot(&self, resolved: i32) {
        let count = usize::try_from(resolved).ok().and_then(|slot| self.ref_counts.get(slot));
        if let Some(count) = count {
            // A failed update means the count was 0 already.
            let _ = count.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1));
        }
    }

    /// Marks `slot` as just used, without counting a sequence: a slot that was just filled is then not
    /// the next one to give way. Out of range: nothing.
    pub fn touch_slot(&self, slot: usize) {
        if let Some(last_used) = self.last_used.get(slot) {
            let tick = self.lru_tick.fetch_add(1, Ordering::Relaxed) + 1;
            last_used.fetch_max(tick, Ordering::Relaxed);
        }
    }

    /// Tick of `slot`'s last use; larger is later; 0: never, or out of range.
    pub fn slot_last_used(&self, slot: usize) -> u64 {
        self.last_used.get(slot).map_or(0, |tick| tick.load(Ordering::Relaxed))
    }

    /// Sequences that use `slot`; 0 out of range.
    pub fn slot_ref_count(&self, slot: usize) -> usize {
        self.ref_counts.get(slot).map_or(0, |count| count.load(Ordering::Acquire))
    }

    /// The cache slots `[pinned, max_loras)`, for [`select_victim_slot`](super::select_victim_slot).
    pub fn cache_slot_views(&self) -> Vec<(usize, SlotView)> {
        (self.pinned..self.max_loras)
            .map(|slot| {
                let view = SlotView {
                    filled: !self.slots[slot].is_vacant(),
                    ref_count: self.slot_ref_count(slot),
                    last_used: self.slot_last_used(slot),
                };
                (slot, view)
            })
            .collect()
    }
}
