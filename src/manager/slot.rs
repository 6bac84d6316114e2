//! What a slot holds, and how callers name one.

use super::LoraLayerWeights;
use crate::adapter::PeftAdapterConfig;

/// What a row is to be computed with.
///
/// The `i32` selectors of [`LoraWeights`](super::LoraWeights) say -1 for "the active adapter" and have
/// no word for the base; kernels say -1 for "no delta". This type has a word for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotRef {
    /// The base model, whatever is loaded.
    Base,
    /// The active adapter.
    Active,
    /// The adapter in this slot.
    Slot(u32),
}

/// A slot's contents. A slot that holds nothing has an empty name.
#[derive(Clone, Debug)]
pub struct AdapterSlot {
    /// The adapter's name; empty: the slot is vacant.
    pub name: String,
    /// The adapter's config.
    pub adapter_config: PeftAdapterConfig,
    /// Its pairs, global-layer-indexed, `None` for a layer it does not touch.
    pub layers: Vec<Option<LoraLayerWeights>>,
    /// How many adapters the slot has held before this one.
    pub generation: u64,
    /// SHA-256 over config and weights; all zero in a vacant slot.
    pub digest: [u8; 32],
}

impl AdapterSlot {
    /// A slot with nothing in it.
    pub fn vacant(layers: usize) -> Self {
        Self {
            name: String::new(),
            adapter_config: PeftAdapterConfig::default(),
            layers: vec![None; layers],
            generation: 0,
            digest: [0; 32],
        }
    }

    /// Whether nothing is in it.
    pub fn is_vacant(&self) -> bool {
        self.name.is_empty()
    }

    /// Identity of the contents: the digest's first 8 bytes, little-endian. Same bytes, same id; other
    /// bytes under the same name, another id. 0 stands for the base and for a vacant slot alone.
    pub fn id(&self) -> u64 {
        if self.is_vacant() {
            return 0;
        }
        let [a, b, c, d, e, f, g, h, ..] = self.digest;
        u64::from_le_bytes([a, b, c, d, e, f, g, h]).max(1)
    }
}

/// What the choice of a victim needs to know of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotView {
    /// Whether the slot holds an adapter.
    pub filled: bool,
    /// Sequences that use it.
    pub ref_count: usize,
    /// Tick of its last use; larger is later.
    pub last_used: u64,
}
