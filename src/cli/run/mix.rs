//! Which adapter each row of a synthetic batch has.

use clap::ValueEnum;
use lorapool::conformance::Dice;
use serde::Serialize;

/// How adapters are spread over the rows. There are rows of the base in every mix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mix {
    /// Every row has another adapter than its neighbours
    Distinct,
    /// Every adapter, and the base, with the same chance
    Uniform,
    /// Adapter k with a chance of 1/k^1.2: few are popular
    Zipf,
}

impl Mix {
    /// `rows` slots out of `0..slots`, or -1 for a row of the base: the last one, if there are two or more.
    pub fn slots(self, rows: u32, slots: u32, dice: &mut Dice) -> Vec<i32> {
        let weights: Vec<f64> = (0..slots).map(|slot| f64::from(slot + 1).powf(-1.2)).collect();
        let total: f64 = weights.iter().sum();
        let slot = |row: u32, dice: &mut Dice| -> i32 {
            let slot = match self {
                // The base is one more adapter in the round.
                Mix::Distinct => row % (slots + 1),
                Mix::Uniform => dice.below(slots + 1),
                Mix::Zipf if dice.below(8) == 0 => slots,
                Mix::Zipf => {
                    let mut at = f64::from(dice.unit().abs()) * total;
                    let popular = weights.iter().position(|weight| {
                        at -= weight;
                        at < 0.0
                    });
                    popular.map_or(slots - 1, |slot| slot as u32)
                }
            };
            if slot < slots { slot as i32 } else { -1 }
        };
        let mut batch: Vec<i32> = (0..rows).map(|row| slot(row, dice)).collect();
        if let [_, .., last] = &mut batch[..] {
            *last = -1;
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mix_has_each_adapter_and_the_base_and_nothing_else() {
        for mix in [Mix::Distinct, Mix::Uniform, Mix::Zipf] {
            let batch = mix.slots(200, 5, &mut Dice::new(1));
            assert_eq!(batch.len(), 200);
            for slot in -1..5 {
                assert!(batch.contains(&slot), "{mix:?} {slot}");
            }
            assert!(batch.iter().all(|slot| (-1..5).contains(slot)));
        }
    }

    #[test]
    fn distinct_rows_differ_from_their_neighbours_and_one_row_has_an_adapter() {
        let batch = Mix::Distinct.slots(9, 3, &mut Dice::new(1));
        assert!(batch[..8].windows(2).all(|pair| pair[0] != pair[1]));
        for mix in [Mix::Distinct, Mix::Uniform, Mix::Zipf] {
            assert_eq!(mix.slots(1, 1, &mut Dice::new(3)).len(), 1);
        }
        assert_eq!(Mix::Distinct.slots(1, 1, &mut Dice::new(3)), [0]);
    }
}
