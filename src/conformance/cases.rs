//! The tables of cases.

use std::collections::BTreeSet;

use super::case::{Case, Mix, Ranks, Values};
use crate::dtype::DType;
use crate::ops::Op;

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
                ..base.clone()
            });
            cases.push(Case {
                outs: vec![37, 48],
                rows: 19,
                slots: 4,
                row_scales: true,
                shift: 1,
                vectors: true,
                ..base
            });
        }
    }
    cases
}

/// The whole table of cases at the level of launches.
pub fn all() -> Vec<Case> {
    let groups = [smoke, ranks, tiles, widths, rows, mixes, sites, layouts, gathers, splits, values, vectors, hostile];
    let plain: Vec<Case> = groups.into_iter().flat_map(|group| group()).collect();
    let (packed, counted) = (packed(&plain), counted());
    plain.into_iter().chain(packed).chain(counted).collect()
}

/// The types that kernels may have ways of their own for: activations and weights of one 2-byte type.
pub(super) const FAST: [DType; 2] = [DType::Bf16, DType::F16];

/// The decode cases once more with packs, in the types that any backend has a packed kernel for.
fn packed(cases: &[Case]) -> Vec<Case> {
    let mut seen = BTreeSet::new();
    let decode = cases.iter().filter(|case| case.op == Op::Bgmv && case.gather == 0 && !case.one_allocation);
    decode
        .flat_map(|case| FAST.map(|dtype| Case { packs: true, act: dtype, weight: dtype, ..case.clone() }))
        .filter(|case| seen.insert(case.to_string()))
        .collect()
}

/// Some prefill cases once more with a number of tiles in use, as routed layers have them, in the same types in turn.
fn counted() -> Vec<Case> {
    let mut seen = BTreeSet::new();
    let groups = [(tiles as fn() -> Vec<Case>, 9), (gathers, 3), (splits, 3), (hostile, 3)];
    let of = |(group, every): (fn() -> Vec<Case>, _)| group().into_iter().filter(|c| c.op == Op::Sgmv).step_by(every);
    let typed = |(case, dtype)| Case { counted: true, act: dtype, weight: dtype, ..case };
    let typed = groups.into_iter().flat_map(of).zip(FAST.into_iter().cycle()).map(typed);
    typed.filter(|case| seen.insert(case.to_string())).collect()
}

/// Sets the types of each case in turn, so that a sweep takes all pairs of types without nine times the cases.
fn in_turn(cases: impl IntoIterator<Item = Case>) -> Vec<Case> {
    let types: Vec<_> = types().collect();
    let typed = |(i, case): (usize, Case)| {
        let (act, weight) = types[i % types.len()];
        Case { act, weight, ..case }
    };
    cases.into_iter().enumerate().map(typed).collect()
}

/// Both ops, each with types that the other has at another place of the sweep.
fn both_ops(sweep: impl Fn() -> Vec<Case>) -> Vec<Case> {
    let sgmv = sweep().into_iter().skip(4).chain(sweep().into_iter().take(4));
    let sgmv = sgmv.map(|case| Case { op: Op::Sgmv, ..case });
    let sgmv = in_turn(sgmv);
    in_turn(sweep()).into_iter().chain(sgmv).collect()
}

/// Any rank: all up to 130, and those around larger powers of two.
fn ranks() -> Vec<Case> {
    let swept = |rank| Case {
        ranks: Ranks::All(rank),
        max_rank: rank,
        in_features: 37,
        outs: vec![19],
        rows: 4,
        slots: 2,
        mix: Mix::Distinct,
        ..Case::default()
    };
    let mut cases = both_ops(|| (1..=130).chain([255, 256, 257, 511, 512]).map(swept).collect());
    for op in Op::ALL {
        for (act, weight) in types() {
            for rank in [33, 128] {
                let wide = Case { ranks: Ranks::All(rank), max_rank: rank + 7, values: Values::Real, ..swept(rank) };
                cases.push(Case { op, act, weight, in_features: 80, outs: vec![131], rows: 9, ..wide });
            }
        }
    }
    cases
}

/// Ranks that fill B's rows and some that don't, outputs in whole tiles: kernels may have ways of their own for these. One row a
/// slot and many, a tile a worker and several.
fn tiles() -> Vec<Case> {
    let mut cases = Vec::new();
    for (op, dtype) in Op::ALL.into_iter().flat_map(|op| FAST.map(|dtype| (op, dtype))) {
        for rank in [8, 16, 24, 32, 64, 128] {
            let of = |outs: &[u32]| Case {
                op,
                act: dtype,
                weight: dtype,
                in_features: 80,
                outs: outs.to_vec(),
                ranks: Ranks::All(rank),
                max_rank: rank,
                row_scales: true,
                ..Case::default()
            };
            let few = Case { rows: 9, slots: 9, mix: Mix::Distinct, values: Values::Real, ..of(&[64, 192]) };
            cases.push(Case { in_features: 2304, ..few.clone() });
            cases.push(few);
            cases.push(Case { rows: 41, slots: 3, mix: Mix::Zipf, nulls: true, vectors: true, ..of(&[320, 64, 128]) });
            cases.push(Case { max_rank: 2 * rank, rows: 41, slots: 3, mix: Mix::Uniform, ..of(&[320, 100]) });
            // Several tiles for each worker of a large device.
            if [8, 16, 64].contains(&rank) {
                let (rows, slots) = if rank == 8 { (12, 12) } else { (24, 3) };
                cases.push(Case { rows, slots, mix: Mix::Distinct, ..of(&[12_288, 4864]) });
            }
        }
    }
    cases
}

/// Any width, as input and as output.
fn widths() -> Vec<Case> {
    const WIDTHS: [u32; 11] = [1, 2, 3, 37, 48, 80, 131, 896, 3696, 4864, 12_288];
    let of = |in_features, out| Case {
        in_features,
        outs: vec![out],
        ranks: Ranks::All(6),
        max_rank: 6,
        rows: 3,
        slots: 2,
        mix: Mix::Distinct,
        ..Case::default()
    };
    let mut cases = Vec::new();
    for op in Op::ALL {
        for act in DType::ALL {
            for (i, width) in WIDTHS.into_iter().enumerate() {
                let weight = DType::ALL[(i + act as usize) % 3];
                let values = if i % 2 == 0 { Values::Grid } else { Values::Real };
                cases.push(Case { op, act, weight, values, ..of(width, 131) });
                cases.push(Case { op, act, weight, values, ..of(80, width) });
            }
        }
    }
    cases.extend(both_ops(|| vec![of(3696, 4864), of(4864, 896), of(896, 3696), of(12_288, 12_288)]));
    cases
}

/// Any number of rows, and more workgroups than a dimension of a grid holds.
fn rows() -> Vec<Case> {
    let of = |rows| Case { rows, slots: 4, mix: Mix::Zipf, nulls: true, row_scales: true, ..Case::default() };
    let mut cases = Vec::new();
    for op in Op::ALL {
        for act in DType::ALL {
            for rows in [1, 2, 7, 8, 9, 15, 16, 17, 33, 257] {
                cases.push(Case { op, act, weight: act, outs: vec![37], ..of(rows) });
            }
            let many = Case { in_features: 3, outs: vec![3], ranks: Ranks::All(2), max_rank: 2, ..of(70_000) };
            cases.push(Case { op, act, weight: DType::F16, ..many });
        }
        // 274 parts a row for bgmv, 2188 a tile for sgmv: more groups than 65,535 in one dimension.
        let rows = if op == Op::Bgmv { 240 } else { 31 };
        let wide = Case { in_features: 5, outs: vec![70_000], ranks: Ranks::All(1), max_rank: 1, ..Case::default() };
        cases.push(Case { op, act: DType::Bf16, rows, slots: 7, mix: Mix::Distinct, ..wide.clone() });
        cases.push(Case { op, rows: 2, ..wide });
    }
    cases
}

/// How adapters mix in a batch.
fn mixes() -> Vec<Case> {
    let of = |mix| Case {
        mix,
        rows: 33,
        slots: 7,
        in_features: 131,
        outs: vec![80],
        ranks: Ranks::Mixed,
        max_rank: 24,
        nulls: true,
        row_scales: true,
        values: Values::Real,
        ..Case::default()
    };
    let mut cases = Vec::new();
    for op in Op::ALL {
        for act in DType::ALL {
            let weight = DType::ALL[(act as usize + 1) % 3];
            for mix in [Mix::Distinct, Mix::Uniform, Mix::Zipf, Mix::Base, Mix::These(vec![6]), Mix::These(vec![-1, 0])]
            {
                cases.push(Case { op, act, weight, ..of(mix) });
            }
        }
    }
    cases.push(Case { slots: 64, rows: 257, ..of(Mix::Uniform) });
    cases.push(Case { op: Op::Sgmv, slots: 64, rows: 257, ..of(Mix::Uniform) });
    cases
}

/// One to four sites in a launch, each with a y of its own or all in parts of one.
fn sites() -> Vec<Case> {
    let mut cases = Vec::new();
    for op in Op::ALL {
        for act in DType::ALL {
            for sites in 1..=4 {
                for shared_y in [false, true] {
                    cases.push(Case {
                        op,
                        act,
                        weight: DType::ALL[sites % 3],
                        outs: [48, 17, 80, 131][..sites].to_vec(),
                        ranks: Ranks::Mixed,
                        max_rank: 11,
                        rows: 19,
                        slots: 4,
                        nulls: true,
                        shared_y,
                        pad: sites as u32 - 1,
                        ..Case::default()
                    });
                }
            }
        }
    }
    cases
}

/// Strided rows, operands that start anywhere, operands in one allocation.
fn layouts() -> Vec<Case> {
    let base =
        Case { rows: 17, in_features: 45, outs: vec![51, 7], ranks: Ranks::All(5), max_rank: 5, ..Case::default() };
    let mut cases = Vec::new();
    for op in Op::ALL {
        for (act, weight) in types().filter(|(act, weight)| act == weight || *act == DType::Bf16) {
            for (pad, shift) in [(1, 0), (0, 1), (2, 1), (3, 3), (8, 0), (300, 5)] {
                cases.push(Case { op, act, weight, pad, shift, ..base.clone() });
            }
            cases.push(Case { op, act, weight, one_allocation: true, shift: 1, ..base.clone() });
            cases.push(Case { op, act, weight, table_shift: 1, pad: 1, ..base.clone() });
        }
    }
    cases
}

/// Rows that name the rows of x that they read, some of which aren't there.
fn gathers() -> Vec<Case> {
    let of = |rows, gather| Case {
        rows,
        gather,
        slots: 5,
        mix: Mix::Uniform,
        in_features: 45,
        outs: vec![37, 8],
        ranks: Ranks::Mixed,
        max_rank: 18,
        nulls: true,
        row_scales: true,
        ..Case::default()
    };
    let mut cases = Vec::new();
    for op in Op::ALL {
        for (act, weight) in types() {
            cases.push(Case { op, act, weight, ..of(33, 5) });
            cases.push(Case { op, act, weight, values: Values::Real, pad: 3, shift: 1, ..of(19, 40) });
            cases.push(Case { op, act, weight, chunk: 7, window: 2, ..of(40, 1) });
        }
        let many = Case { in_features: 3, outs: vec![3], ranks: Ranks::All(2), max_rank: 2, ..of(70_000, 11) };
        cases.push(Case { op, act: DType::Bf16, ..many });
    }
    cases
}

/// Batches and pools in parts: rows by launches, slots by windows, both.
fn splits() -> Vec<Case> {
    let base = Case {
        rows: 33,
        slots: 7,
        mix: Mix::Uniform,
        outs: vec![37, 11],
        ranks: Ranks::Mixed,
        max_rank: 9,
        nulls: true,
        row_scales: true,
        ..Case::default()
    };
    let mut cases = Vec::new();
    for op in Op::ALL {
        for act in DType::ALL {
            for (chunk, window) in [(1, 0), (5, 0), (16, 0), (0, 1), (0, 3), (7, 2)] {
                let case = Case { op, act, weight: DType::Bf16, chunk, window, pad: chunk % 2, ..base.clone() };
                if window > 0 {
                    cases.push(Case { all_weights: true, ..case.clone() });
                }
                cases.push(case);
            }
        }
    }
    cases
}

/// Subnormals, overflow, NaN and infinity.
fn values() -> Vec<Case> {
    let mut cases = Vec::new();
    for op in Op::ALL {
        for (act, weight) in types() {
            for values in [Values::Subnormal, Values::Large, Values::NonFinite] {
                cases.push(Case {
                    op,
                    act,
                    weight,
                    values,
                    rows: 21,
                    in_features: 37,
                    outs: vec![53],
                    ..Case::default()
                });
            }
        }
    }
    cases
}

/// Pairs with and without vectors in one batch: any width, rank and stride, one to four sites, kept values too.
fn vectors() -> Vec<Case> {
    let base = Case {
        values: Values::Real,
        rows: 33,
        slots: 7,
        mix: Mix::Zipf,
        ranks: Ranks::Mixed,
        max_rank: 19,
        nulls: true,
        row_scales: true,
        vectors: true,
        ..Case::default()
    };
    let mut cases = Vec::new();
    for op in Op::ALL {
        for (act, weight) in types() {
            let base = Case { op, act, weight, ..base.clone() };
            cases.push(Case { outs: vec![131, 1, 48], in_features: 37, pad: 5, shift: 3, ..base.clone() });
            cases.push(Case { values: Values::Grid, outs: vec![257, 34], shared_y: true, shift: 1, ..base.clone() });
            for values in [Values::Subnormal, Values::Large, Values::NonFinite] {
                cases.push(Case { values, outs: vec![53], row_scales: false, ..base.clone() });
            }
            cases.push(Case { outs: vec![37, 11], window: 3, chunk: 7, ..base.clone() });
            cases.push(Case { outs: vec![37, 48], short_span: true, pad: 1, ..base.clone() });
        }
        for (i, width) in [1, 2, 3, 4, 5, 31, 80, 131, 895, 4864].into_iter().enumerate() {
            for (rank, max_rank) in [(1, 1), (16, 16), (33, 70), (128, 128)] {
                let (act, weight) = (DType::ALL[i % 3], DType::ALL[(i + rank as usize) % 3]);
                let ranks = Ranks::All(rank);
                cases.push(Case { op, act, weight, outs: vec![width], ranks, max_rank, rows: 9, ..base.clone() });
                for dtype in FAST {
                    let types = Case { act: dtype, weight: dtype, ..base.clone() };
                    cases.push(Case { op, outs: vec![width], ranks, max_rank, rows: 17, ..types });
                }
            }
        }
    }
    cases
}

/// Tables and batches that no pool would write: nothing crashes, and the rows concerned keep their bits.
fn hostile() -> Vec<Case> {
    let slots = 15;
    let mut rows: Vec<i32> = (0..slots).collect();
    rows.extend([slots, slots + 1, 1 << 20, i32::MAX, -1, -2, i32::MIN]);
    let mut cases = Vec::new();
    for op in Op::ALL {
        for (act, weight) in types() {
            for vectors in [false, true] {
                cases.push(Case {
                    op,
                    act,
                    weight,
                    rows: 2 * rows.len() as u32 + 1,
                    slots: slots as u32,
                    mix: Mix::These(rows.clone()),
                    outs: vec![37, 48],
                    hostile: true,
                    vectors,
                    ..Case::default()
                });
            }
        }
    }
    cases
}
