//! The tables of cases.

use super::case::{Case, Mix, Op, Ranks, Values};
use crate::dtype::DType;

/// Every pair of activation and weight type.
fn types() -> impl Iterator<Item = (DType, DType)> {
    DType::ALL.into_iter().flat_map(|act| DType::ALL.map(|weight| (act, weight)))
}

/// A few small cases for each kernel and type: odd widths and ranks, strided rows, several sites, rows
/// without an adapter, slots without a pair.
pub fn smoke() -> Vec<Case> {
    let mut cases = Vec::new();
    for op in Op::ALL {
        for (act, weight) in types() {
            let base = Case { op, act, weight, ..Case::default() };
            cases.push(base.clone());
            cases.push(Case { in_features: 131, outs: vec![37], ranks: Ranks::All(6), max_rank: 6, ..base.clone() });
            cases.push(Case {
                values: Values::Real,
                in_features: 37,
                outs: vec![131, 1, 48],
                ranks: Ranks::Mixed,
                max_rank: 17,
                rows: 33,
                slots: 5,
                mix: Mix::Zipf,
                nulls: true,
                row_scales: true,
                pad: 5,
                shift: 3,
                ..base.clone()
            });
            cases.push(Case {
                in_features: 1,
                outs: vec![5, 3, 1, 2],
                ranks: Ranks::All(1),
                max_rank: 1,
                rows: 9,
                shared_y: true,
                shift: 1,
                ..base
            });
        }
    }
    cases
}
