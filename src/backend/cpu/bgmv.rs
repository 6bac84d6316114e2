//! BGMV: each row has its own slot. Neighbours of one slot are taken together, which changes no bit:
//! every row's sums are its own.

use super::job::{RUN_ROWS, Run};
use super::module::Launched;

/// The launch's rows in runs of one slot.
pub(super) fn runs(launched: &Launched<'_>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for row in 0..launched.params.rows as usize {
        let Some(slot) = launched.slot(launched.row(row).slot) else { continue };
        match runs.last_mut() {
            Some(last) if last.slot == slot && last.row + last.rows == row && last.rows < RUN_ROWS => last.rows += 1,
            _ => runs.push(Run { slot, row, rows: 1 }),
        }
    }
    runs
}
