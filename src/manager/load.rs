//! Filling slots: several adapters at the start, one at a time later.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use super::layers::{layer_count, layers_of};
use super::{AdapterSlot, LoraLayerWeights, LoraWeights, OverlayRawSlot};
use crate::adapter::{self, Adapter, BaseModel, PeftAdapterConfig};
use crate::backend::{GpuBackend, HostBuffer};
use crate::error::{Error, Result};
use crate::memory::{DevicePtr, Region};
use crate::pool::{ExpertSpec, Pool, PoolSpec, SlotImage};

/// A named adapter to be put in a slot.
#[derive(Clone, Copy, Debug)]
pub struct LoraAdapterInput<'a> {
    /// What requests will call it; not empty.
    pub name: &'a str,
    /// Its weights.
    pub adapter: &'a Adapter,
}

impl LoraWeights {
    /// Allocates the pool and packs `adapters` into slots 0, 1, ...; the first one is active, all are
    /// pinned. Nothing is visible to kernels before all are packed. Token rows that have to be compared with the served
    /// tables first wait in [`LoraWeights::overlay_raw`]. Where some adapters have routed experts, there is a pool of those
    /// too, with room in each slot for the largest of these adapters.
    ///
    /// # Errors
    /// [`Error::Limit`] for more adapters than slots or a rank above the pool's, [`Error::Shape`] for a
    /// site that doesn't fit, [`Error::Input`] for an empty or repeated name, or the backend's.
    pub fn load(gpu: &Arc<dyn GpuBackend>, spec: PoolSpec, adapters: &[LoraAdapterInput<'_>]) -> Result<Self> {
        let experts = ExpertSpec::for_adapters(adapters.iter().map(|input| input.adapter), spec.dtype)?;
        Self::load_with_experts(gpu, spec, experts, adapters)
    }

    /// The same with a pool of experts for more than these adapters need: those that come later must fit it.
    ///
    /// # Errors
    /// As [`LoraWeights::load`]; [`Error::Limit`] also for more bytes of experts than `experts` gives a slot.
    pub fn load_with_experts(
        gpu: &Arc<dyn GpuBackend>,
        spec: PoolSpec,
        experts: Option<ExpertSpec>,
        adapters: &[LoraAdapterInput<'_>],
    ) -> Result<Self> {
        let slots = spec.max_loras as usize;
        if adapters.len() > slots {
            let (found, limit) = (adapters.len() as u64, slots as u64);
            return Err(Error::Limit { what: "number of adapters", found, limit, hint: " (raise max_loras)" });
        }
        let storage = Arc::new(Pool::with_experts(&**gpu, spec, experts)?);
        let tables = storage
            .sites()
            .iter()
            .enumerate()
            .filter(|(_, site)| !site.is_token_rows())
            .map(|(i, site)| ((site.id.layer, site.id.module.clone()), storage.tables().addresses(i)));
        let vacant = AdapterSlot::vacant(layer_count(&storage));
        let mut weights = Self {
            name: String::new(),
            adapter_config: PeftAdapterConfig::default(),
            max_rank: storage.spec().max_rank as usize,
            max_loras: slots,
            pool: storage.blocks().first().map_or(DevicePtr::NULL, Region::ptr),
            pool_bytes: storage.bytes() as usize,
            expert_pool: storage.experts().map(|experts| experts.blocks()[0].ptr()),
            expert_pool_bytes: storage.experts().map_or(0, |experts| experts.bytes() as usize),
            slots: vec![vacant; slots],
            active: if adapters.is_empty() { Self::NO_SLOT } else { 0 },
            tables: tables.collect(),
            scale_table: storage.tables().slot_scales(),
            ref_counts: (0..slots).map(|_| AtomicUsize::new(0)).collect(),
            pinned: adapters.len(),
            last_used: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            lru_tick: AtomicU64::new(0),
            overlay_raw: (0..slots).map(|_| None).collect(),
            served: None,
            storage,
            gpu: gpu.clone(),
        };
        for (slot, input) in adapters.iter().enumerate() {
            weights.swap(slot, *input)?;
        }
        weights.mirror();
        Ok(weights)
    }

    /// Replaces what `slot` holds by `input`. All that can be wrong with the adapter shows before
    /// anything changes; bytes and tables then change between two steps, in one submission. Graphs that
    /// were captured before stay valid.
    ///
    /// # Errors
    /// [`Error::SlotBusy`] while sequences use the slot; otherwise as [`LoraWeights::load`]. The old
    /// adapter then still serves.
    pub fn swap(&mut self, slot: usize, input: LoraAdapterInput<'_>) -> Result<()> {
        self.storage.check_slot(slot as i64)?;
        self.check_idle(slot)?;
        self.check_name(slot, input.name)?;
        let compared;
        let adapter = match input.adapter.raw_tokens.is_empty() {
            true => input.adapter,
            false => {
                compared = self.compared(input.adapter.clone())?;
                &compared
            }
        };
        if let Some(raw) = adapter.raw_tokens.iter().find(|raw| self.storage.token_site_at(&raw.site.path).is_none()) {
            let expected = "a pool with room for token rows there";
            let what = format!("token rows of {}", raw.site.path);
            return Err(Error::shape(what, "no such site in the pool", expected));
        }
        let memory = HostBuffer::plain(SlotImage::len_in(&self.storage));
        let image = SlotImage::of_known(&self.storage, adapter, memory)?;
        let layers = layers_of(&self.storage, slot as u32, adapter)?;
        let span = tracing::info_span!("swap", slot, adapter = input.name, bytes = image.bytes().len());
        let _entered = span.enter();
        self.write(slot as u32, &image)?;
        self.occupy(slot, input.name, adapter, layers);
        self.touch_slot(slot);
        Ok(())
    }

    /// [`LoraWeights::swap`] with an adapter from disk. Bytes are read and checked before the slot is touched.
    ///
    /// # Errors
    /// The loader's refusal, or as [`LoraWeights::swap`].
    pub fn swap_from_dir(&mut self, slot: usize, name: &str, dir: &Path, base: Option<&BaseModel>) -> Result<()> {
        self.storage.check_slot(slot as i64)?;
        self.check_idle(slot)?;
        let adapter = adapter::load(dir, base)?;
        self.swap(slot, LoraAdapterInput { name, adapter: &adapter })
    }

    /// Empties `slot`: no entry, no byte of its adapter is left.
    ///
    /// # Errors
    /// [`Error::UnknownSlot`], [`Error::SlotBusy`], or the backend's; the adapter then still serves.
    pub fn clear(&mut self, slot: usize) -> Result<()> {
        self.storage.check_slot(slot as i64)?;
        self.check_idle(slot)?;
        self.write(slot as u32, &SlotImage::empty(&self.storage))?;
        self.vacate(slot);
        Ok(())
    }

    /// Takes down who is in a slot now, which the device already serves.
    pub(super) fn occupy(&mut self, slot: usize, name: &str, adapter: &Adapter, layers: Vec<Option<LoraLayerWeights>>) {
        self.slots[slot] = AdapterSlot {
            name: name.to_owned(),
            adapter_config: adapter.config.clone(),
            layers,
            generation: self.slots[slot].generation + 1,
            digest: adapter.digest,
        };
        let raw = &adapter.raw_tokens;
        self.overlay_raw[slot] = (!raw.is_empty()).then(|| OverlayRawSlot { tables: raw.clone() });
        self.mirror();
    }

    /// Forgets who was in a slot. No other adapter becomes active by itself.
    pub(super) fn vacate(&mut self, slot: usize) {
        if slot == self.active {
            self.active = Self::NO_SLOT;
        }
        let generation = self.slots[slot].generation;
        self.overlay_raw[slot] = None;
        self.slots[slot] = AdapterSlot { generation, ..AdapterSlot::vacant(self.slots[slot].layers.len()) };
        self.mirror();
    }

    /// Writes a slot's bytes and publishes its tables, in one submission.
    fn write(&self, slot: u32, image: &SlotImage) -> Result<()> {
        let pool = &self.storage;
        pool.publish_image(&*self.gpu, slot, image, &mut |encoder| image.write(pool, slot, encoder))?;
        Ok(())
    }

    fn check_idle(&self, slot: usize) -> Result<()> {
        match self.slot_ref_count(slot) {
            0 => Ok(()),
            refs => Err(Error::SlotBusy { slot, name: self.slots[slot].name.clone(), refs }),
        }
    }

    fn check_name(&self, slot: usize, name: &str) -> Result<()> {
        if name.is_empty() {
            return Err(Error::Input("an adapter's name can't be empty".into()));
        }
        match self.slot_of(name) {
            Some(other) if other != slot => Err(Error::Input(format!("adapter {name:?} is already in slot {other}"))),
            _ => Ok(()),
        }
    }
}
