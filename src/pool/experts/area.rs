//! Where the bytes of a slot's experts lie: pure arithmetic.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::pool::Limits;

/// Slots and blocks start at multiples of this many bytes.
const ALIGN: u64 = 256;

/// Equal areas, one a slot. Where a device caps an allocation or a binding, a block holds some slots, or a part of one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Area {
    slots: u32,
    /// Bytes of a slot.
    len: u64,
    /// Bytes of a slot that lie in one block.
    chunk: u64,
    /// Slots in a block; 1 where a slot takes several blocks.
    block_slots: u32,
}

impl Area {
    /// Areas that hold `bytes` of matrices, none larger than `largest`, however they are ordered.
    ///
    /// # Errors
    /// [`Error::Limit`] when the device can't reach a matrix of that size.
    pub(super) fn new(bytes: u64, largest: u64, slots: u32, limits: Limits) -> Result<Self> {
        let limit = limits.max_alloc.min(limits.max_binding) / ALIGN * ALIGN;
        let len = bytes.next_multiple_of(ALIGN).max(ALIGN);
        if len <= limit {
            let block_slots = (limit / len).min(slots.into()) as u32;
            return Ok(Self { slots, len, chunk: len, block_slots });
        }
        // No matrix lies in two blocks: the end of a block may stay empty, by less than the largest of them.
        let Some(usable) = limit.checked_sub(largest).filter(|usable| *usable > 0) else {
            let hint = " (lower the expert pool's max_rank)";
            return Err(Error::Limit { what: "size of an expert's matrix in bytes", found: largest, limit, hint });
        };
        Ok(Self { slots, len: bytes.div_ceil(usable) * limit, chunk: limit, block_slots: 1 })
    }

    /// Sizes of the allocations to make.
    pub(super) fn blocks(&self) -> Vec<u64> {
        let parts = self.len / self.chunk;
        match parts {
            1 => (0..self.slots)
                .step_by(self.block_slots as usize)
                .map(|first| u64::from(self.block_slots.min(self.slots - first)) * self.len)
                .collect(),
            _ => vec![self.chunk; (parts * u64::from(self.slots)) as usize],
        }
    }

    /// Slots that have bytes in block `block`.
    pub(super) fn slots_of(&self, block: usize) -> Range<u32> {
        let parts = self.len / self.chunk;
        let first = (block as u64 / parts) as u32 * self.block_slots;
        first..(first + self.block_slots).min(self.slots)
    }

    /// Block and offset of byte `offset` of a slot.
    pub(super) fn place(&self, slot: u32, offset: u64) -> (usize, u64) {
        let parts = self.len / self.chunk;
        let block = u64::from(slot / self.block_slots) * parts + offset / self.chunk;
        (block as usize, u64::from(slot % self.block_slots) * self.len + offset % self.chunk)
    }

    /// Where a matrix of `len` bytes goes that follows what ends at `cursor`; `None` where the slot is full.
    pub(super) fn take(&self, cursor: &mut u64, len: u64) -> Option<u64> {
        let mut start = *cursor;
        if start / self.chunk != (start + len - 1) / self.chunk {
            start = start.next_multiple_of(self.chunk);
        }
        *cursor = start + len;
        (*cursor <= self.len).then_some(start)
    }

    /// Bytes of a slot.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Bytes of a slot that lie in one block.
    pub(super) fn chunk(&self) -> u64 {
        self.chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::WeightLayout;

    fn limits(limit: u64) -> Limits {
        Limits { order: WeightLayout::SlotMajor, max_alloc: limit, max_binding: u64::MAX }
    }

    #[test]
    fn a_slot_holds_what_it_was_made_for_in_any_order_and_no_matrix_lies_in_two_blocks() {
        for limit in [1 << 12, 1 << 14, 1 << 30] {
            for sizes in [[16, 4000, 16, 2048], [3999 / 16 * 16, 3984, 16, 32]] {
                let list: Vec<u64> = sizes.into_iter().cycle().take(40).collect();
                let bytes = list.iter().sum();
                let area = Area::new(bytes, 4000, 5, limits(limit)).unwrap();
                for reverse in [false, true] {
                    let mut cursor = 0;
                    let order: Vec<u64> = if reverse { list.iter().rev().copied().collect() } else { list.clone() };
                    let mut seen: Vec<(usize, u64, u64)> = Vec::new();
                    for len in order {
                        let start = area.take(&mut cursor, len).expect("room for all");
                        for slot in 0..5 {
                            let (block, at) = area.place(slot, start);
                            assert!(at + len <= area.blocks()[block] && area.slots_of(block).contains(&slot));
                            seen.push((block, at, len));
                        }
                    }
                    seen.sort_unstable();
                    assert!(seen.windows(2).all(|w| w[0].0 != w[1].0 || w[0].1 + w[0].2 <= w[1].1));
                }
            }
        }
        assert!(Area::new(1 << 20, 4096, 1, limits(4096)).is_err());
    }
}
