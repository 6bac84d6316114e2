//! The batch of a routed layer from that of its tokens: a row for each of a token's experts, and its tiles.

use super::memory::Bytes;
use crate::contract::{Params, ROUTED_OFFSETS, ROUTED_TOKENS, RowRef, SGMV_TILE_ROWS, THREADS, Tile};

/// No row of x.
const NO_ROW: u32 = u32::MAX;

/// Does a launch of expert_rows that has been checked; each operand is as long as its extent or longer.
pub(super) fn rows(params: &Params, operands: &mut [Bytes<'_>]) {
    let (inputs, rest) = operands.split_at_mut(2);
    let Some((out, tokens)) = rest.split_first_mut() else { return };
    let words = |bytes: &Bytes<'_>| -> Vec<u32> { bytemuck::pod_collect_to_vec(bytes.get()) };
    let (batch, experts) = (words(&inputs[0]), words(&inputs[1]));
    let tokens = tokens.first().map(words).filter(|_| params.routed & ROUTED_TOKENS != 0);
    let routing = Routing { params, batch: &batch, experts: &experts, tokens: tokens.as_deref() };
    let rows: Vec<(RowRef, u32)> = (0..params.rows).map(|row| routing.row(row)).collect();

    let mut write = |word: usize, value: u32| write(out, word, value);
    for (i, (row, x_row)) in rows.iter().enumerate() {
        write(2 * i, row.slot as u32);
        write(2 * i + 1, row.scale.to_bits());
        if params.x_rows_at != 0 {
            write(params.x_rows_at as usize + i, *x_row);
        }
    }
    if params.counts_at != 0 {
        let slots: Vec<i32> = rows.iter().map(|(row, _)| row.slot).collect();
        for (i, slots) in slots.chunks(THREADS as usize).enumerate() {
            write(params.counts_at as usize + 1 + i, used(slots).count() as u32);
        }
    }
}

/// Does a launch of expert_tiles that has been checked.
pub(super) fn tiles(params: &Params, operands: &mut [Bytes<'_>]) {
    let [out] = operands else { return };
    let entries: Vec<RowRef> = bytemuck::pod_collect_to_vec(&out.get()[..8 * params.rows as usize]);
    let slots: Vec<i32> = entries.iter().map(|row| row.slot).collect();
    let mut tiles: Vec<Tile> = used(&slots).collect();
    write(out, params.counts_at as usize, tiles.len() as u32);
    tiles.resize(slots.len(), Tile { slot: -1, ..Tile::default() });
    let first = 4 * params.tiles_at as usize;
    let bytes: &[u8] = bytemuck::cast_slice(&tiles);
    out.get_mut()[first..first + bytes.len()].copy_from_slice(bytes);
}

fn write(out: &mut Bytes<'_>, word: usize, value: u32) {
    out.get_mut()[4 * word..4 * word + 4].copy_from_slice(&value.to_ne_bytes());
}

/// The tiles that rows of these slots are in, in order.
fn used(slots: &[i32]) -> impl Iterator<Item = Tile> {
    let runs = slots.chunks(THREADS as usize).flat_map(|group| group.chunk_by(|a, b| a == b));
    let tiles = runs.flat_map(|run| run.chunks(SGMV_TILE_ROWS as usize)).scan(0, |first, run| {
        let tile = Tile { slot: run[0], first_row: *first, rows: run.len() as u32, reserved: 0 };
        *first += tile.rows;
        Some(tile)
    });
    tiles.filter(|tile| tile.slot >= 0)
}

/// A launch's inputs.
struct Routing<'a> {
    params: &'a Params,
    batch: &'a [u32],
    experts: &'a [u32],
    tokens: Option<&'a [u32]>,
}

impl Routing<'_> {
    /// Row `row`'s entry in the new batch, and its row of x: its token.
    fn row(&self, row: u32) -> (RowRef, u32) {
        let none = (RowRef { slot: -1, scale: 0.0 }, NO_ROW);
        let params = self.params;
        let token = self.tokens.map_or(row, |tokens| tokens[row as usize]) / params.top_k;
        let Some(expert) = self.expert(row).filter(|_| token < params.x_rows) else { return none };
        let (slot, scale) = (self.batch[2 * token as usize], self.batch[2 * token as usize + 1]);
        // A negative slot is past any.
        if slot >= params.slots {
            return none;
        }
        (RowRef { slot: (slot * params.slot_stride + expert) as i32, scale: f32::from_bits(scale) }, token)
    }

    /// Row `row`'s expert, if it has one.
    fn expert(&self, row: u32) -> Option<u32> {
        let count = self.params.experts;
        if self.params.routed & ROUTED_OFFSETS == 0 {
            return Some(self.experts[row as usize]).filter(|expert| *expert < count);
        }
        // The first whose rows end past this one.
        let (mut low, mut high) = (0, count);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.experts[middle as usize + 1] <= row { low = middle + 1 } else { high = middle }
        }
        (low < count && self.experts[low as usize] <= row).then_some(low)
    }
}
