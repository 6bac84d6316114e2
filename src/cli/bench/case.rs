//! What is timed: how many rows, which adapters, which rank.

use clap::ValueEnum;
use lorapool::conformance::Dice;
use lorapool::ops::Op;
use serde::Serialize;

/// How adapters are spread over the rows of a case. Every row has one: base rows cost nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mix {
    /// Row after row the next adapter, all equally often
    Distinct,
    /// Each row's adapter is drawn, all with the same chance
    Uniform,
    /// Each row's adapter is drawn, adapter k with a chance of 1/k^1.2: few are popular
    Zipf,
}

/// One case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Case {
    /// Rows, adapters and rank: `64x64-r16`.
    pub name: String,
    /// Which kernels.
    #[serde(serialize_with = "op_name")]
    pub op: Op,
    /// Rows of the batch.
    pub rows: u32,
    /// Adapters that the rows are spread over.
    pub adapters: u32,
    /// Rank of every adapter.
    pub rank: u32,
    /// How they are spread.
    pub mix: Mix,
    /// Whether the last adapter is a small one: rank 8, on the o projections alone.
    pub small_last: bool,
}

fn op_name<S: serde::Serializer>(op: &Op, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(op.name())
}

impl Case {
    /// A case named after its numbers.
    pub fn new(op: Op, rows: u32, adapters: u32, rank: u32, mix: Mix) -> Self {
        let spread = match mix {
            Mix::Distinct => "",
            Mix::Uniform => "uniform",
            Mix::Zipf => "zipf",
        };
        let name = format!("{rows}x{spread}{adapters}-r{rank}");
        Self { name, op, rows, adapters, rank, mix, small_last: false }
    }

    /// The cases that a server's day is made of: decode of few and many rows, prefill.
    pub fn usual() -> Vec<Self> {
        use Mix::{Distinct, Zipf};
        let decode = [
            (1, 1, 16, Distinct),
            (4, 4, 16, Distinct),
            (16, 16, 16, Distinct),
            (32, 32, 16, Distinct),
            (64, 64, 16, Distinct),
            (64, 64, 16, Zipf),
            (64, 1, 16, Distinct),
            (256, 64, 16, Distinct),
            (256, 64, 16, Zipf),
            (1, 1, 64, Distinct),
            (16, 16, 64, Distinct),
            (64, 64, 64, Distinct),
            (64, 1, 64, Distinct),
        ];
        let prefill = [(2048, 1, 16, Distinct), (4096, 8, 16, Distinct), (4096, 8, 64, Zipf)];
        let of = |op| move |(rows, adapters, rank, mix)| Case::new(op, rows, adapters, rank, mix);
        let small = Case { name: "64x64-r64-small".into(), small_last: true, ..of(Op::Bgmv)((64, 64, 64, Distinct)) };
        decode.into_iter().map(of(Op::Bgmv)).chain([small]).chain(prefill.into_iter().map(of(Op::Sgmv))).collect()
    }

    /// The same for routed layers: rows are tokens, and its name says so.
    pub fn of_experts(op: Op, tokens: u32, adapters: u32, rank: u32, mix: Mix) -> Self {
        let case = Self::new(op, tokens, adapters, rank, mix);
        Self { name: format!("experts-{}", case.name), ..case }
    }

    /// The usual cases of routed layers: a token's experts are drawn, so that even one adapter's rows are of many.
    pub fn usual_experts() -> Vec<Self> {
        let decode =
            [(1, 1, 16), (4, 4, 16), (16, 16, 16), (64, 16, 16), (64, 1, 16), (256, 16, 16), (1, 1, 64), (16, 4, 64)];
        let prefill = [(2048, 1, 16), (4096, 8, 16)];
        let of = |op| move |(tokens, adapters, rank)| Self::of_experts(op, tokens, adapters, rank, Mix::Distinct);
        decode.into_iter().map(of(Op::Bgmv)).chain(prefill.into_iter().map(of(Op::Sgmv))).collect()
    }

    /// Decode against rows and against adapters, at rank 16.
    pub fn sweep() -> Vec<Self> {
        let powers = |last: u32| (0..=last).map(|power| 1 << power);
        let one = powers(8).map(|rows| (rows, 1));
        let each = powers(6).skip(1).map(|rows| (rows, rows));
        let some = powers(5).skip(1).map(|adapters| (64, adapters));
        let case = |(rows, adapters)| Self::new(Op::Bgmv, rows, adapters, 16, Mix::Distinct);
        one.chain(each).chain(some).map(case).collect()
    }

    /// The step that swaps are timed beside.
    pub fn usual_step() -> Self {
        Self::new(Op::Bgmv, 16, 16, 16, Mix::Distinct)
    }

    /// Each row's slot. A prefill's rows are in segments.
    pub fn slots(&self, seed: u64) -> Vec<i32> {
        let mut dice = Dice::new(seed);
        let weights: Vec<f64> = (0..self.adapters).map(|slot| f64::from(slot + 1).powf(-1.2)).collect();
        let total: f64 = weights.iter().sum();
        let mut slots: Vec<i32> = (0..self.rows)
            .map(|row| match self.mix {
                Mix::Distinct => row % self.adapters,
                Mix::Uniform => dice.below(self.adapters),
                Mix::Zipf => {
                    let mut at = f64::from(dice.unit().abs()) * total;
                    let drawn = weights.iter().position(|weight| {
                        at -= weight;
                        at < 0.0
                    });
                    drawn.map_or(self.adapters - 1, |slot| slot as u32)
                }
            })
            .map(|slot| slot as i32)
            .collect();
        if self.op == Op::Sgmv {
            slots.sort_unstable();
        }
        slots
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_usual_cases_differ_and_every_row_has_an_adapter_of_the_case() {
        let cases: Vec<Case> = Case::usual().into_iter().chain(Case::usual_experts()).collect();
        assert!(cases.iter().any(|case| case.name == "64x64-r16"));
        assert!(cases.iter().any(|case| case.name == "experts-16x4-r64"));
        for (i, case) in cases.iter().enumerate() {
            assert!(cases[..i].iter().all(|other| other.name != case.name), "{}", case.name);
            let slots = case.slots(1);
            assert_eq!(slots.len(), case.rows as usize);
            assert!(slots.iter().all(|slot| (0..case.adapters as i32).contains(slot)));
            assert!(case.op == Op::Bgmv || slots.is_sorted());
        }
    }

    #[test]
    fn a_distinct_mix_has_every_adapter_and_a_zipf_mix_has_favourites() {
        let count = |case: &Case, slot| case.slots(1).iter().filter(|s| **s == slot).count();
        let distinct = Case::new(Op::Bgmv, 256, 64, 16, Mix::Distinct);
        assert!((0..64).all(|slot| count(&distinct, slot) == 4));
        let zipf = Case::new(Op::Bgmv, 256, 64, 16, Mix::Zipf);
        assert!(count(&zipf, 0) > 4 * count(&zipf, 9).max(1));
    }
}
