//! Adapters and batches of random numbers.

use super::data::Dice;
use crate::adapter::HostMatrix;
use crate::contract::RowRef;
use crate::dtype::DType;

/// Numbers up to 1 in a file's type.
pub(super) fn matrix(dice: &mut Dice, dtype: DType, rows: u32, cols: u32) -> HostMatrix {
    let values: Vec<f32> = (0..rows * cols).map(|_| dice.unit()).collect();
    let mut bytes = Vec::new();
    dtype.encode(&values, &mut bytes);
    HostMatrix { dtype, rows: rows as usize, cols: cols as usize, bytes }
}

/// A, B and scale of a pair of some rank up to `max_rank`, for a site of these inputs and outputs.
pub(super) fn pair(
    dice: &mut Dice,
    dtype: DType,
    max_rank: u32,
    [in_features, out_features]: [u32; 2],
) -> (HostMatrix, HostMatrix, f32) {
    let rank = 1 + dice.below(max_rank);
    let (a, b) = (matrix(dice, dtype, rank, in_features), matrix(dice, dtype, out_features, rank));
    (a, b, 0.25 + dice.unit().abs())
}

/// Rows of every one of `slots` slots and of the base, and multipliers.
pub(super) fn batch(dice: &mut Dice, rows: usize, slots: u32) -> Vec<RowRef> {
    let row = |_| RowRef {
        slot: dice.below(slots + 2) as i32 - 2,
        scale: [1.0, 1.0, 0.5, -1.5, 0.0][dice.below(5) as usize],
    };
    (0..rows).map(row).collect()
}
