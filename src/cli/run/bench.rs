//! Synthetic activations, and the check of every element against the f64 oracle.

use std::sync::Arc;

use lorapool::adapter::{Adapter, HostMatrix, HostPair, RowVectors};
use lorapool::backend::GpuBackend;
use lorapool::conformance::Dice;
use lorapool::conformance::oracle::{Check, Oracle, Pair};
use lorapool::ops::Op;
use lorapool::pool::{Plan, Pool, SiteSpec};
use lorapool::{DType, Error, Result};
use rayon::prelude::*;

use super::super::progress::Progress;
use super::step::{Group, Step};

/// Checks a step: knows which adapter is in which slot.
#[derive(Debug)]
pub struct Bench<'a> {
    gpu: &'a Arc<dyn GpuBackend>,
    pool: &'a Pool,
    step: &'a Step,
    /// By slot.
    resident: Vec<&'a Adapter>,
    seed: u64,
}

/// A pair with the exact values that the pool stores.
struct Stored {
    a: Vec<f32>,
    b: Vec<f32>,
    rank: usize,
    scale: f64,
    vectors: Option<RowVectors>,
}

impl Stored {
    fn new(pair: &HostPair, dtype: DType) -> Result<Self> {
        let values = |matrix: &HostMatrix, part: &str| -> Result<Vec<f32>> {
            // The pool took the same values before.
            let fault = |error| Error::Input(format!("{part} of {}: {error:?}", pair.site.path));
            Ok(dtype.decode(&matrix.to(dtype).map_err(fault)?))
        };
        let (a, b) = (values(&pair.a, "lora_A")?, values(&pair.b, "lora_B")?);
        Ok(Self { a, b, rank: pair.rank(), scale: f64::from(pair.scale), vectors: pair.vectors.clone() })
    }
}

impl<'a> Bench<'a> {
    /// `resident`: the adapter of each slot of `pool`.
    pub fn new(
        gpu: &'a Arc<dyn GpuBackend>,
        pool: &'a Pool,
        step: &'a Step,
        resident: Vec<&'a Adapter>,
        seed: u64,
    ) -> Self {
        Self { gpu, pool, step, resident, seed }
    }

    /// Fills the activations, runs the step once for the batch `plan`, and checks every element of every output:
    /// rows with a delta against the oracle, all others to the bit.
    pub fn check(&self, op: Op, plan: &Plan, progress: &mut Progress) -> Result<Check> {
        self.step.set_batch(plan)?;
        let slots: Vec<i32> = plan.rows().iter().map(|row| row.slot).collect();
        let mut check = Check::default();
        self.step.run(
            op,
            |group| self.fill(group, &slots),
            |group| {
                for (site, y) in &group.sites {
                    let spec = &self.pool.sites()[*site];
                    progress.start(&spec.id.path);
                    let got = self.gpu.read(y.region())?;
                    check.merge(self.compare(group, *site, &slots, &got)?);
                    progress.done();
                }
                Ok(())
            },
        )?;
        Ok(check)
    }

    fn spec(&self, site: usize) -> &SiteSpec {
        &self.pool.sites()[site]
    }

    /// Each slot's pair at a site.
    fn pairs(&self, site: usize) -> Vec<Option<&HostPair>> {
        let id = &self.spec(site).id;
        let here = |pair: &&HostPair| pair.site.layer == id.layer && pair.site.module == id.module;
        self.resident.iter().map(|adapter| adapter.pairs.iter().find(here)).collect()
    }

    /// Writes a group's x and y.
    fn fill(&self, group: &Group, slots: &[i32]) -> Result<()> {
        let act = self.step.act();
        let mut x = Vec::new();
        act.encode(&self.x(group, slots.len()), &mut x);
        pad(&mut x);
        self.gpu.submit(&mut |encoder| encoder.write(group.x.region(), &x))?;
        for (site, matrix) in &group.sites {
            let mut y = self.y(*site, slots);
            pad(&mut y);
            self.gpu.submit(&mut |encoder| encoder.write(matrix.region(), &y))?;
        }
        Ok(())
    }

    /// A group's input, `[rows][in_features]`: each value one of the activation type.
    fn x(&self, group: &Group, rows: usize) -> Vec<f32> {
        let first = group.sites[0].0;
        let mut dice = Dice::new(self.seed ^ (first as u64) << 32);
        let act = self.step.act();
        (0..rows * self.spec(first).in_features as usize).map(|_| act.round(dice.unit())).collect()
    }

    /// The base's output at a site, encoded: numbers in rows that get a delta, any bits in rows that must
    /// keep them.
    fn y(&self, site: usize, slots: &[i32]) -> Vec<u8> {
        let act = self.step.act();
        let width = self.spec(site).out_features as usize;
        let mut dice = Dice::new(self.seed ^ (site as u64) << 32 ^ 1);
        let mut bytes = Vec::with_capacity(slots.len() * width * act.size() as usize);
        let pairs = self.pairs(site);
        for slot in slots {
            if at(&pairs, *slot).is_some_and(Option::is_some) {
                let values: Vec<f32> = (0..width).map(|_| dice.unit() * 4.0).collect();
                act.encode(&values, &mut bytes);
            } else {
                bytes.extend((0..width * act.size() as usize).map(|_| dice.bits() as u8));
            }
        }
        bytes
    }

    /// Compares what a site's output holds now with what it must.
    fn compare(&self, group: &Group, site: usize, slots: &[i32], got: &[u8]) -> Result<Check> {
        let act = self.step.act();
        let spec = self.spec(site);
        let (width, depth) = (spec.out_features as usize, spec.in_features as usize);
        let (x, y) = (self.x(group, slots.len()), self.y(site, slots));
        let stored = |pair: Option<&HostPair>| pair.map(|p| Stored::new(p, self.pool.spec().dtype)).transpose();
        let stored: Vec<Option<Stored>> = self.pairs(site).into_iter().map(stored).collect::<Result<_>>()?;
        let row_bytes = width * act.size() as usize;
        let rows: Vec<Check> = slots
            .par_iter()
            .enumerate()
            .map(|(row, slot)| {
                let mut check = Check::default();
                let bytes = row * row_bytes..(row + 1) * row_bytes;
                let (before, after) = (&y[bytes.clone()], got.get(bytes).unwrap_or_default());
                match at(&stored, *slot) {
                    Some(Some(stored)) => {
                        let Stored { a, b, rank, scale, vectors } = stored;
                        let pair = Pair { a, b, rank: *rank, in_features: depth, out_features: width };
                        let oracle = Oracle::new(pair, &x[row * depth..(row + 1) * depth]);
                        let vectors = vectors.as_ref().map(RowVectors::slices);
                        let expected = oracle.expand_shaped(&act.decode(before), [*scale, 1.0], vectors, act, None);
                        check.row(&spec.id.path, row, act, &expected, &act.decode(after));
                    }
                    _ => check.bits(&spec.id.path, row, act, before, after),
                }
                check
            })
            .collect();
        let mut check = Check::default();
        rows.into_iter().for_each(|row| check.merge(row));
        Ok(check)
    }
}

/// What a slot has; nothing for a row of the base.
fn at<T>(slots: &[T], slot: i32) -> Option<&T> {
    slots.get(usize::try_from(slot).ok()?)
}

/// Writes are whole words.
fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use lorapool::manager::{LoraAdapterInput, LoraWeights};
    use lorapool::pool::SiteKind;

    use super::super::super::adapters::pool_spec;
    use super::super::samples;
    use super::*;

    #[test]
    fn an_adapter_in_the_wrong_slot_and_a_row_that_should_be_the_bases_are_found() {
        let gpu = lorapool::backend::open("cpu", 0).unwrap();
        let (base, named) = samples::load().unwrap();
        let spec = pool_spec(Some(&base), &named, 2, DType::F32).unwrap();
        let input = |k: usize| LoraAdapterInput { name: &named[k].name, adapter: &named[k].adapter };
        let weights = LoraWeights::load(&gpu, spec, &[input(0), input(4)]).unwrap();
        let pool = weights.storage();
        let plans = Op::ALL.map(|op| (op, Plan::from_slots([0, 1, -1, 1])));
        let step = Step::new(&gpu, pool, DType::F32, &plans).unwrap();
        let check = |op, plan: &Plan, resident: [usize; 2]| {
            let resident = resident.map(|k| &named[k].adapter).to_vec();
            Bench::new(&gpu, pool, &step, resident, 7).check(op, plan, &mut Progress::new("test", 15)).unwrap()
        };
        let shifted = Plan::from_slots([0, 1, 0, 1]);
        let linears = pool.sites().iter().filter(|site| site.kind == SiteKind::Linear);
        let width: u64 = linears.map(|site| u64::from(site.out_features)).sum();
        for (op, plan) in &plans {
            let right = check(*op, plan, [0, 4]);
            assert_eq!((right.mismatches, right.elements), (0, 4 * width));
            assert!(check(*op, plan, [4, 4]).mismatches > width / 2, "{op:?}");
            // The samples' first two adapters differ in their weights alone.
            assert!(check(*op, plan, [1, 4]).mismatches > width / 2, "{op:?}");
            // The oracle is told that the base's row has an adapter, the device is not.
            step.set_batch(plan).unwrap();
            let bench = Bench::new(&gpu, pool, &step, vec![&named[0].adapter, &named[4].adapter], 7);
            let slots: Vec<i32> = shifted.rows().iter().map(|row| row.slot).collect();
            let mut wrong = 0;
            step.run(
                *op,
                |group| bench.fill(group, &slots),
                |group| {
                    for (site, y) in &group.sites {
                        wrong += bench.compare(group, *site, &slots, &gpu.read(y.region())?)?.mismatches;
                    }
                    Ok(())
                },
            )
            .unwrap();
            assert!(wrong > width / 2, "{op:?} {wrong}");
        }
    }
}
