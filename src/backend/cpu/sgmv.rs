//! SGMV: the batch lists tiles of consecutive rows of one slot.

use super::job::{RUN_ROWS, Run};
use super::module::Launched;
use crate::contract::Tile;

/// The launch's part of each tile, in the order of their rows.
pub(super) fn runs(launched: &Launched<'_>) -> Vec<Run> {
    let (first, end) =
        (launched.params.row_first as usize, launched.params.row_first as usize + launched.params.rows as usize);
    let part = |tile: &Tile| {
        let slot = launched.slot(tile.slot)?;
        let row = tile.first_row as usize;
        let (start, stop) = (row.max(first), (row + (tile.rows as usize).min(RUN_ROWS)).min(end));
        (start < stop).then(|| Run { slot, row: start - first, rows: stop - start })
    };
    let mut runs: Vec<Run> = launched.tiles().filter_map(|tile| part(&tile)).collect();
    runs.sort_by_key(|run| run.row);
    runs
}
