//! The loaded adapter set: one pool, what each slot of it holds, and who is active.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use super::layers::cells_of;
use super::{AdapterSlot, LoraLayerWeights, OverlayRawSlot, SlotRef};
use crate::adapter::{LoraModule, PeftAdapterConfig, ServedTables};
use crate::backend::GpuBackend;
use crate::contract::RowRef;
use crate::error::{Error, Result};
use crate::memory::DevicePtr;
use crate::pool::{Plan, Pool};

/// The loaded adapter set: a fixed-address, rank-padded pool of `max_loras` equal slots, an
/// [`AdapterSlot`] for each, and `[max_loras]` device tables for every site of the model.
///
/// Nothing in it moves after [`LoraWeights::load`]: `pool`, `tables` and `scale_table` may be captured
/// in graphs. `name` and `adapter_config` mirror the active slot.
#[derive(Debug)]
pub struct LoraWeights {
    /// Name of the active adapter.
    pub name: String,
    /// Config of the active adapter.
    pub adapter_config: PeftAdapterConfig,
    /// Rank that every slot has room for.
    pub max_rank: usize,
    /// Number of slots.
    pub max_loras: usize,
    /// First byte of the pool. A device that caps allocations has the rest in further blocks:
    /// [`LoraWeights::storage`].
    pub pool: DevicePtr,
    /// Bytes of the pool, over all blocks.
    pub pool_bytes: usize,
    /// First byte of the pool of routed experts' pairs, whose further blocks are in [`LoraWeights::storage`]; `None` where
    /// there is none. Routers are linears like any other.
    pub expert_pool: Option<DevicePtr>,
    /// Bytes of the expert pool.
    pub expert_pool_bytes: usize,
    /// Contents of the slots, `max_loras` of them; vacant ones have an empty name.
    pub slots: Vec<AdapterSlot>,
    /// Index of the active slot; [`LoraWeights::NO_SLOT`] while none is.
    pub active: usize,
    /// Site to its `[max_loras]` tables of A addresses and of B addresses, 8 bytes an entry, 0 = this
    /// slot has no delta here. There is a key for every site of the model, adapted or not.
    pub tables: BTreeMap<(usize, LoraModule), (DevicePtr, DevicePtr)>,
    /// `[max_loras]` f32: the scale of each slot's adapter, 0 for a vacant slot. A site whose scale a
    /// pattern changes has its own in the site tables, which are what kernels read.
    pub scale_table: DevicePtr,
    /// Sequences that use each slot.
    pub ref_counts: Vec<AtomicUsize>,
    /// Slots `[0, pinned)` hold the adapters of the start and are never evicted; the rest is the cache.
    pub pinned: usize,
    /// Tick of each slot's last use.
    pub last_used: Vec<AtomicU64>,
    /// The last tick given out.
    pub lru_tick: AtomicU64,
    /// Token overlays that wait for the served tables ([`LoraWeights::set_served_tables`]), one entry a slot. A slot that
    /// has one serves no row before.
    pub overlay_raw: Vec<Option<OverlayRawSlot>>,
    pub(super) served: Option<Arc<dyn ServedTables + Send + Sync>>,
    pub(super) storage: Arc<Pool>,
    pub(super) gpu: Arc<dyn GpuBackend>,
}

impl LoraWeights {
    /// `active` while no adapter is.
    pub const NO_SLOT: usize = usize::MAX;

    /// The pool behind the addresses.
    pub fn storage(&self) -> &Arc<Pool> {
        &self.storage
    }

    /// The device that the pool is on.
    pub fn gpu(&self) -> &Arc<dyn GpuBackend> {
        &self.gpu
    }

    /// The active adapter's layers, global-layer-indexed; none while no adapter is active.
    pub fn active_layers(&self) -> &[Option<LoraLayerWeights>] {
        self.slots.get(self.active).map_or(&[], |slot| &slot.layers)
    }

    /// The slot that holds the adapter `name`. A vacant slot has no name: `""` finds nothing.
    pub fn slot_of(&self, name: &str) -> Option<usize> {
        self.slots.iter().position(|slot| !slot.is_vacant() && slot.name == name)
    }

    /// Names of all resident adapters, in slot order.
    pub fn adapter_names(&self) -> Vec<String> {
        self.slots.iter().filter(|slot| !slot.is_vacant()).map(|slot| slot.name.clone()).collect()
    }

    /// Identity of what a selector stands for: -1 the active adapter, k >= 0 slot k; 0 for anything
    /// else. Content, not name: see [`AdapterSlot::id`].
    pub fn adapter_id_for_slot(&self, slot: i32) -> u64 {
        self.resolve(slot).map_or(0, |slot| self.slots[slot].id())
    }

    /// The slot whose pairs a prefill has to be routed to: `Some` only for a slot other than the
    /// active one; `None` for the active one (-1 or by number) and for a number out of range.
    pub fn routed_prefill_slot(&self, adapter_slot: i32) -> Option<usize> {
        self.resolve(adapter_slot).filter(|slot| *slot != self.active)
    }

    /// -1 and other negative numbers: the active slot; `None` out of range.
    pub(super) fn resolve(&self, slot: i32) -> Option<usize> {
        match usize::try_from(slot) {
            Err(_) => Some(self.active),
            Ok(slot) => Some(slot),
        }
        .filter(|slot| *slot < self.max_loras)
    }

    /// Makes the adapter `name` the one that unnamed requests get.
    ///
    /// # Errors
    /// [`Error::UnknownAdapter`].
    pub fn activate(&mut self, name: &str) -> Result<()> {
        let slot = self.slot_of(name).ok_or_else(|| self.unknown(name))?;
        self.active = slot;
        self.mirror();
        Ok(())
    }

    /// What the kernels' row table says for `slot`: -1 for the base.
    ///
    /// # Errors
    /// [`Error::UnknownSlot`] for a slot that doesn't exist or holds nothing, [`Error::NoActive`]: a request for an
    /// adapter is never answered by the base. [`Error::OverlayPending`] as long as its token rows wait for the served tables.
    pub fn device_slot(&self, slot: SlotRef) -> Result<i32> {
        let slot = match slot {
            SlotRef::Base => return Ok(-1),
            SlotRef::Active if self.active == Self::NO_SLOT => {
                return Err(Error::NoActive { resident: self.adapter_names() });
            }
            SlotRef::Active => self.active,
            SlotRef::Slot(slot) => slot as usize,
        };
        let filled = self.slots.get(slot).is_some_and(|s| !s.is_vacant());
        if !filled {
            return Err(Error::UnknownSlot { slot: slot as i64, slots: self.max_loras });
        }
        match self.overlay_raw[slot] {
            None => Ok(slot as i32),
            Some(_) => Err(Error::OverlayPending { slot, name: self.slots[slot].name.clone() }),
        }
    }

    /// Plans a batch, row by row, each row with its own multiplier of its adapter's scale.
    ///
    /// # Errors
    /// As [`LoraWeights::device_slot`].
    pub fn plan(&self, rows: impl IntoIterator<Item = (SlotRef, f32)>) -> Result<Plan> {
        let row = |(slot, scale)| self.device_slot(slot).map(|slot| RowRef { slot, scale });
        Ok(Plan::new(rows.into_iter().map(row).collect::<Result<_>>()?))
    }

    /// Sets `slot`'s entries in every site's tables, and its scale, to what `layers` and `scale` say, in
    /// one write ahead of all later work of `gpu`. Sites that `layers` leave out get no delta; no other
    /// slot's entry changes, nor do those of routed experts.
    ///
    /// # Errors
    /// [`Error::UnknownSlot`], or the backend's; the tables are then as before.
    pub fn refresh_slot_tables(
        &self,
        slot: usize,
        layers: &[Option<LoraLayerWeights>],
        scale: f32,
        gpu: &dyn GpuBackend,
    ) -> Result<()> {
        self.storage.check_slot(slot as i64)?;
        let cells = cells_of(&self.storage, layers);
        self.storage.publish(gpu, slot as u32, &cells, scale, &mut |_| Ok(()))?;
        Ok(())
    }

    /// Copies the active slot's name and config to the fields that mirror them.
    pub(super) fn mirror(&mut self) {
        let active = self.slots.get(self.active);
        self.name = active.map(|slot| slot.name.clone()).unwrap_or_default();
        self.adapter_config = active.map(|slot| slot.adapter_config.clone()).unwrap_or_default();
    }

    pub(super) fn unknown(&self, name: &str) -> Error {
        Error::UnknownAdapter { name: name.to_owned(), resident: self.adapter_names() }
    }
}
