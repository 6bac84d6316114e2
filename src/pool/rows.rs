//! From a batch's rows to what kernels read: one entry a row, and tiles and packs of rows that share a slot.

use std::collections::HashMap;

use crate::contract::{BGMV_PACK_ROWS, Pack, RowRef, SGMV_TILE_ROWS, Tile};
use crate::error::{Error, Result};

/// How many rows and tiles a recorded launch was made for; a batch it serves has at most that many, and never more
/// packs than rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Rows.
    pub rows: u32,
    /// Tiles; used by SGMV alone.
    pub tiles: u32,
}

/// A batch, planned: which adapter each row has, the tiles of neighbouring rows with one slot, and the packs of rows
/// with one slot wherever they are.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    rows: Vec<RowRef>,
    tiles: Vec<Tile>,
    packs: Vec<Pack>,
}

impl Plan {
    /// Plans rows in the order of the batch. Rows that share a slot cost least side by side in a prefill.
    pub fn new(rows: Vec<RowRef>) -> Self {
        let mut tiles = Vec::new();
        let mut first = 0;
        for segment in rows.chunk_by(|a, b| a.slot == b.slot) {
            if segment[0].slot >= 0 {
                for (i, tile) in segment.chunks(SGMV_TILE_ROWS as usize).enumerate() {
                    tiles.push(Tile {
                        slot: segment[0].slot,
                        first_row: first + i as u32 * SGMV_TILE_ROWS,
                        rows: tile.len() as u32,
                        reserved: 0,
                    });
                }
            }
            first += segment.len() as u32;
        }
        let packs = packs(&rows);
        Self { rows, tiles, packs }
    }

    /// Every row with its slot's own scale; -1 for rows without a delta.
    pub fn from_slots(slots: impl IntoIterator<Item = i32>) -> Self {
        Self::new(slots.into_iter().map(|slot| RowRef { slot, scale: 1.0 }).collect())
    }

    /// The rows.
    pub fn rows(&self) -> &[RowRef] {
        &self.rows
    }

    /// The tiles, in the order of their rows; rows without a delta are in none.
    pub fn tiles(&self) -> &[Tile] {
        &self.tiles
    }

    /// The packs: each row with a delta is in one, its slot's rows in the order of the batch.
    pub fn packs(&self) -> &[Pack] {
        &self.packs
    }

    /// The least capacity that serves this batch.
    pub fn capacity(&self) -> Capacity {
        Capacity { rows: self.rows.len() as u32, tiles: self.tiles.len() as u32 }
    }

    /// The batch as kernels recorded for `capacity` read it: rows, then tiles, then packs, the rest of each empty.
    ///
    /// # Errors
    /// [`Error::Limit`] when the batch has more rows or tiles than `capacity`.
    pub fn encode(&self, capacity: Capacity) -> Result<Vec<u8>> {
        let own = self.capacity();
        for (what, found, limit) in
            [("number of rows", own.rows, capacity.rows), ("number of tiles", own.tiles, capacity.tiles)]
        {
            if found > limit {
                let hint = " (what the launch was recorded for)";
                return Err(Error::Limit { what, found: found.into(), limit: limit.into(), hint });
            }
        }
        let mut bytes = Vec::with_capacity(capacity.bytes() as usize);
        bytes.extend_from_slice(bytemuck::cast_slice(&self.rows));
        let spare_row = RowRef { slot: -1, scale: 0.0 };
        (own.rows..capacity.rows).for_each(|_| bytes.extend_from_slice(bytemuck::bytes_of(&spare_row)));
        bytes.extend_from_slice(bytemuck::cast_slice(&self.tiles));
        let spare_tile = Tile { slot: -1, ..Tile::default() };
        (own.tiles..capacity.tiles).for_each(|_| bytes.extend_from_slice(bytemuck::bytes_of(&spare_tile)));
        bytes.extend_from_slice(bytemuck::cast_slice(&self.packs));
        let spare_pack = Pack { slot: -1, ..Pack::default() };
        (self.packs.len()..capacity.rows as usize)
            .for_each(|_| bytes.extend_from_slice(bytemuck::bytes_of(&spare_pack)));
        Ok(bytes)
    }
}

/// Rows by slot, slots in the order of their first rows.
fn packs(rows: &[RowRef]) -> Vec<Pack> {
    let mut by_slot: Vec<(i32, Vec<u32>)> = Vec::new();
    let mut known: HashMap<i32, usize> = HashMap::new();
    for (i, row) in rows.iter().enumerate().filter(|(_, row)| row.slot >= 0) {
        let at = *known.entry(row.slot).or_insert_with(|| {
            by_slot.push((row.slot, Vec::new()));
            by_slot.len() - 1
        });
        by_slot[at].1.push(i as u32);
    }
    let pack = |slot: i32, rows: &[u32]| {
        let mut pack = Pack { slot, rows: rows.len() as u32, ..Pack::default() };
        pack.row[..rows.len()].copy_from_slice(rows);
        pack
    };
    by_slot.iter().flat_map(|(slot, rows)| rows.chunks(BGMV_PACK_ROWS).map(|rows| pack(*slot, rows))).collect()
}

impl Capacity {
    /// Word offset of the tiles in the batch operand.
    pub fn tiles_at(self) -> u32 {
        self.rows * 2
    }

    /// Word offset of the packs in the batch operand.
    pub fn packs_at(self) -> u32 {
        self.tiles_at() + self.tiles * (size_of::<Tile>() / 4) as u32
    }

    /// Bytes of the batch operand.
    pub fn bytes(self) -> u64 {
        let row = (size_of::<RowRef>() + size_of::<Pack>()) as u64;
        u64::from(self.rows) * row + u64::from(self.tiles) * size_of::<Tile>() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_each_row_with_a_delta_once_and_never_mix_slots() {
        let slots: Vec<i32> = (0..200).map(|i| [0, 0, 0, -1, 3, 3, 5][(i * i / 40) % 7]).collect();
        let plan = Plan::from_slots(slots.clone());
        let mut seen = vec![0; slots.len()];
        for tile in plan.tiles() {
            assert!((1..=SGMV_TILE_ROWS).contains(&tile.rows));
            for row in tile.first_row..tile.first_row + tile.rows {
                assert_eq!(slots[row as usize], tile.slot);
                seen[row as usize] += 1;
            }
        }
        for (slot, seen) in slots.iter().zip(seen) {
            assert_eq!(seen, i32::from(*slot >= 0));
        }
    }

    #[test]
    fn packs_hold_each_row_with_a_delta_once_and_never_mix_slots() {
        let slots: Vec<i32> = (0..200).map(|i| [0, 7, 0, -1, 3, 3, 5][(i * i / 3) % 7]).collect();
        let plan = Plan::from_slots(slots.clone());
        let mut seen = vec![0; slots.len()];
        for pack in plan.packs() {
            assert!((1..=BGMV_PACK_ROWS as u32).contains(&pack.rows));
            for row in &pack.row[..pack.rows as usize] {
                assert_eq!(slots[*row as usize], pack.slot);
                seen[*row as usize] += 1;
            }
        }
        for (slot, seen) in slots.iter().zip(seen) {
            assert_eq!(seen, i32::from(*slot >= 0));
        }
        let full = plan.packs().iter().filter(|pack| pack.rows as usize == BGMV_PACK_ROWS).count();
        assert!(plan.packs().len() <= full + 4, "one part-filled pack a slot at most");
    }

    #[test]
    fn a_batch_larger_than_the_capacity_is_an_error_and_a_smaller_one_is_padded_with_nothing_to_do() {
        let plan = Plan::from_slots([0, 1, 0]);
        assert_eq!(plan.capacity(), Capacity { rows: 3, tiles: 3 });
        assert!(plan.encode(Capacity { rows: 3, tiles: 2 }).is_err());
        let bytes = plan.encode(Capacity { rows: 5, tiles: 4 }).unwrap();
        assert_eq!(bytes.len(), 5 * 8 + 4 * 16 + 5 * 48);
        assert_eq!(bytes[4 * 8..4 * 8 + 4], (-1i32).to_le_bytes());
        assert_eq!(bytes[5 * 8 + 3 * 16..5 * 8 + 3 * 16 + 4], (-1i32).to_le_bytes());
    }
}
