//! From a batch's rows to what kernels read: one entry a row, and tiles and packs of rows that share a slot.

use std::collections::HashMap;

use crate::contract::{BGMV_PACK_ROWS, Pack, RowRef, SGMV_TILE_ROWS, Tile};
use crate::error::{Error, Result};

/// How many rows, tiles and packs a recorded launch was made for; a batch that it serves has no more of any.
///
/// For a graph that is to serve later batches too, [`Capacity::any`] is never too small. One captured for each number of
/// adapters in use ([`Capacity::of_slots`]) may run faster: devices that take a slot's rows together start as many
/// workgroups as the packs are worth, in use or not. A batch that needs more is refused ([`Plan::encode`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Rows.
    pub rows: u32,
    /// Tiles, up to [`SGMV_TILE_ROWS`] neighbouring rows of one slot each; used by SGMV alone.
    pub tiles: u32,
    /// Packs, up to [`BGMV_PACK_ROWS`] rows of one slot each; used by BGMV alone.
    pub packs: u32,
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

    /// The least capacity that serves this batch. Another of as many rows may need more tiles or packs.
    pub fn capacity(&self) -> Capacity {
        let [rows, tiles, packs] = [self.rows.len(), self.tiles.len(), self.packs.len()].map(|count| count as u32);
        Capacity { rows, tiles, packs }
    }

    /// The batch as kernels recorded for `capacity` read it: rows, the number of tiles, then tiles and packs, the rest of each empty.
    ///
    /// # Errors
    /// [`Error::Limit`] when the batch has more rows, tiles or packs than `capacity`.
    pub fn encode(&self, capacity: Capacity) -> Result<Vec<u8>> {
        let own = self.capacity();
        own.check_within(capacity, " (what the launch was recorded for)")?;
        let mut bytes = Vec::with_capacity(capacity.bytes() as usize);
        bytes.extend_from_slice(bytemuck::cast_slice(&self.rows));
        let spare_row = RowRef { slot: -1, scale: 0.0 };
        (own.rows..capacity.rows).for_each(|_| bytes.extend_from_slice(bytemuck::bytes_of(&spare_row)));
        bytes.extend_from_slice(bytemuck::cast_slice(&[own.tiles, 0, 0, 0]));
        bytes.extend_from_slice(bytemuck::cast_slice(&self.tiles));
        let spare_tile = Tile { slot: -1, ..Tile::default() };
        (own.tiles..capacity.tiles).for_each(|_| bytes.extend_from_slice(bytemuck::bytes_of(&spare_tile)));
        bytes.extend_from_slice(bytemuck::cast_slice(&self.packs));
        let spare_pack = Pack { slot: -1, ..Pack::default() };
        (own.packs..capacity.packs).for_each(|_| bytes.extend_from_slice(bytemuck::bytes_of(&spare_pack)));
        Ok(bytes)
    }
}

/// Words of the batch operand for the number of tiles in use: one, and what keeps tiles at multiples of 8 bytes.
const COUNTS: u32 = 4;

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
    /// Enough for any mix of so many rows: at worst each is a tile and a pack of its own.
    pub const fn any(rows: u32) -> Self {
        Self::of_slots(rows, rows)
    }

    /// Enough for any mix of so many rows that has so many different slots at most, in any order. Rows without a delta have
    /// no slot.
    pub const fn of_slots(rows: u32, slots: u32) -> Self {
        Self { rows, tiles: if slots == 0 { 0 } else { rows }, packs: Pack::most(rows, slots) }
    }

    /// Whether nothing is more than `limit` has.
    pub(crate) fn check_within(self, limit: Self, hint: &'static str) -> Result<()> {
        let counts = [
            ("number of rows", self.rows, limit.rows),
            ("number of tiles", self.tiles, limit.tiles),
            ("number of packs", self.packs, limit.packs),
        ];
        match counts.into_iter().find(|(_, found, limit)| found > limit) {
            Some((what, found, limit)) => Err(Error::Limit { what, found: found.into(), limit: limit.into(), hint }),
            None => Ok(()),
        }
    }

    /// Word offset in the batch operand of the number of tiles in use.
    pub fn counts_at(self) -> u32 {
        self.rows * 2
    }

    /// Word offset of the tiles in the batch operand.
    pub fn tiles_at(self) -> u32 {
        self.counts_at() + COUNTS
    }

    /// Word offset of the packs in the batch operand.
    pub fn packs_at(self) -> u32 {
        self.tiles_at() + self.tiles * (size_of::<Tile>() / 4) as u32
    }

    /// Bytes of the batch operand.
    pub fn bytes(self) -> u64 {
        let part = |count: u32, size: usize| u64::from(count) * size as u64;
        part(self.rows, size_of::<RowRef>())
            + part(COUNTS, 4)
            + part(self.tiles, size_of::<Tile>())
            + part(self.packs, size_of::<Pack>())
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
        let own = Capacity { rows: 3, tiles: 3, packs: 2 };
        assert_eq!(plan.capacity(), own);
        for (capacity, found) in [
            (Capacity { rows: 2, ..own }, "number of rows is 3, the limit is 2"),
            (Capacity { tiles: 2, ..own }, "number of tiles is 3, the limit is 2"),
            (Capacity { packs: 1, ..own }, "number of packs is 2, the limit is 1"),
        ] {
            let message = plan.encode(capacity).unwrap_err().to_string();
            assert_eq!(message, format!("{found} (what the launch was recorded for)"));
        }
        let capacity = Capacity { rows: 5, tiles: 4, packs: 4 };
        let bytes = plan.encode(capacity).unwrap();
        assert_eq!(bytes.len(), 5 * 8 + 16 + 4 * 16 + 4 * 48);
        assert_eq!(bytes.len() as u64, capacity.bytes());
        assert_eq!(bytes[4 * 8..4 * 8 + 4], (-1i32).to_le_bytes());
        assert_eq!(bytes[5 * 8..5 * 8 + 4], 3u32.to_le_bytes(), "tiles in use");
        let last = capacity.tiles_at() as usize * 4 + 3 * 16;
        assert_eq!(bytes[last..last + 4], (-1i32).to_le_bytes());
        let packs = capacity.packs_at() as usize * 4;
        let slots = [0, 1, 2, 3].map(|pack| i32::from_le_bytes(*bytes[packs + pack * 48..].first_chunk().unwrap()));
        assert_eq!(slots, [0, 1, -1, -1]);
    }

    #[test]
    fn a_capacity_for_some_slots_serves_every_mix_of_them_and_its_packs_are_no_more_than_the_worst_needs() {
        // Numbers of rows that each slot has, all that make up `rows`.
        fn mixes(rows: u32, slots: u32) -> Vec<Vec<u32>> {
            match slots {
                0 => vec![vec![]],
                _ => (0..=rows)
                    .flat_map(|own| {
                        mixes(rows - own, slots - 1).into_iter().map(move |rest| [&[own], &rest[..]].concat())
                    })
                    .collect(),
            }
        }
        for (rows, slots) in (0..=20).flat_map(|rows| (0..=3).map(move |slots| (rows, slots))) {
            let capacity = Capacity::of_slots(rows, slots);
            let mut worst = 0;
            for mix in mixes(rows, slots) {
                let slots = mix.iter().enumerate().flat_map(|(slot, rows)| (0..*rows).map(move |_| slot as i32));
                let plan = Plan::from_slots(slots);
                assert!(plan.encode(capacity).is_ok(), "{mix:?}");
                worst = worst.max(plan.capacity().packs);
            }
            assert_eq!(capacity.packs, worst, "{rows} rows of {slots} slots");
        }
        for rows in [0, 1, 16, 33] {
            assert_eq!(Capacity::any(rows), Capacity { rows, tiles: rows, packs: rows });
            assert_eq!(Plan::from_slots(0..rows as i32).capacity(), Capacity::any(rows));
        }
        assert_eq!(Capacity::of_slots(64, 1).packs, 8);
    }
}
