//! The tables of an expert pool: an entry for each expert of each routed linear, slot after slot.

use std::sync::{Mutex, PoisonError};

use crate::backend::{Encoder, GpuBackend};
use crate::error::Result;
use crate::memory::{DevicePtr, Region};

/// Four arrays of `slots * stride` entries: addresses of A and of B, ranks, scales. A slot's entries of each are
/// contiguous.
#[derive(Debug)]
pub(super) struct ExpertTables {
    region: Region,
    stride: u32,
    slots: u32,
    /// What was last set on the host, slot by slot.
    entries: Mutex<Vec<Entries>>,
}

/// One slot's part of the four arrays.
#[derive(Clone, Debug)]
pub(crate) struct Entries {
    a: Vec<u64>,
    b: Vec<u64>,
    ranks: Vec<u32>,
    scales: Vec<f32>,
}

impl Entries {
    /// No expert has a pair.
    pub(super) fn empty(stride: u32) -> Self {
        let n = stride as usize;
        Self { a: vec![0; n], b: vec![0; n], ranks: vec![0; n], scales: vec![0.0; n] }
    }

    pub(super) fn put(&mut self, entry: u32, a: DevicePtr, b: DevicePtr, rank: u32, scale: f32) {
        let entry = entry as usize;
        (self.a[entry], self.b[entry], self.ranks[entry], self.scales[entry]) = (a.0, b.0, rank, scale);
    }
}

impl ExpertTables {
    /// Tables whose entries are all empty.
    pub(super) fn new(backend: &dyn GpuBackend, stride: u32, slots: u32) -> Result<Self> {
        let region = backend.alloc(u64::from(stride) * u64::from(slots) * 24, "expert tables")?;
        let entries = Mutex::new(vec![Entries::empty(stride); slots as usize]);
        Ok(Self { region, stride, slots, entries })
    }

    pub(super) fn region(&self) -> &Region {
        &self.region
    }

    pub(super) fn stride(&self) -> u32 {
        self.stride
    }

    /// Words where the four arrays have entry `entry`.
    pub(super) fn words(&self, entry: u32) -> [u32; 4] {
        let n = self.stride * self.slots;
        [2 * entry, 2 * n + 2 * entry, 4 * n + entry, 5 * n + entry]
    }

    /// Replaces a slot's entries on the host and gives the old ones.
    pub(super) fn set(&self, slot: u32, entries: Entries) -> Entries {
        let mut all = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut all[slot as usize], entries)
    }

    /// Records the writes of a slot's entries.
    pub(super) fn publish(&self, slot: u32, encoder: &mut dyn Encoder) -> Result<()> {
        let all = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let Entries { a, b, ranks, scales } = &all[slot as usize];
        let parts: [&[u8]; 4] = [
            bytemuck::cast_slice(a),
            bytemuck::cast_slice(b),
            bytemuck::cast_slice(ranks),
            bytemuck::cast_slice(scales),
        ];
        for (word, bytes) in self.words(slot * self.stride).into_iter().zip(parts) {
            encoder.write(&self.region.slice(u64::from(word) * 4, bytes.len() as u64)?, bytes)?;
        }
        Ok(())
    }
}
