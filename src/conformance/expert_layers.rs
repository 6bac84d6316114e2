//! One routed layer's step through the public API: its batch made on the device, its experts applied between guards, every
//! row held against the oracle.

use std::collections::HashMap;

use rayon::prelude::*;

use super::data::Dice;
use super::oracle::{Check, Expected, Oracle, Pair};
use super::synthetic;
use crate::adapter::{Adapter, ExpertPair, HostMatrix};
use crate::backend::{Encoder, GpuBackend};
use crate::contract::RowRef;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Region;
use crate::ops::{Applier, ExpertApplier, ExpertInput, Experts, Matrix, Op, Output, Routing};
use crate::pool::{Capacity, ExpertPool, Plan};

/// Elements of guard before and behind every matrix.
const GUARD: usize = 64;

/// Routed layers whose experts are in a pool, and what applies them.
pub(super) struct Layers<'a> {
    pub backend: &'a dyn GpuBackend,
    pub pool: &'a ExpertPool,
    pub tokens: &'a Applier,
    pub applier: &'a ExpertApplier,
    pub resident: Resident<'a>,
}

/// What the slots of a pool hold: each one's pairs by site and expert.
pub(super) struct Resident<'a>(Vec<HashMap<(usize, u32), &'a ExpertPair>>);

impl<'a> Resident<'a> {
    /// `slots`: the adapter of each slot, where there is one.
    pub fn new(pool: &ExpertPool, slots: impl IntoIterator<Item = Option<&'a Adapter>>) -> Self {
        let pairs = |adapter: Option<&'a Adapter>| {
            let pairs = adapter.map_or(&[][..], |adapter| &adapter.experts);
            pairs.iter().filter_map(|pair| Some(((pool.site_at(&pair.site.path)?, pair.expert), pair))).collect()
        };
        Self(slots.into_iter().map(pairs).collect())
    }

    /// Experts that a slot has a pair for at a site, in order.
    pub fn experts(&self, slot: i32, site: usize) -> Vec<u32> {
        let pairs = usize::try_from(slot).ok().and_then(|slot| self.0.get(slot));
        let here = pairs.into_iter().flat_map(HashMap::keys).filter(|(at, _)| *at == site);
        let mut experts: Vec<u32> = here.map(|(_, expert)| *expert).collect();
        experts.sort_unstable();
        experts
    }
}

/// How rows lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Row `i` is token `i / top_k`'s.
    Tokens,
    /// By expert, each row's token and expert named.
    Named,
    /// By expert, the tokens named and the experts known by their first rows.
    Offsets,
}

/// One step of a routed layer: its tokens, and the experts of each.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub batch: Vec<RowRef>,
    pub experts: u32,
    pub top_k: u32,
    pub order: Order,
    /// Token and expert of each row; a token or expert that isn't there is none.
    pub rows: Vec<(u32, u32)>,
}

impl Step {
    /// Tokens of any adapter and of none, each with `top_k` experts, some of which aren't there.
    pub fn new(tokens: usize, slots: u32, (experts, top_k): (u32, u32), order: Order, seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let batch = synthetic::batch(&mut dice, tokens, slots);
        let expert = |dice: &mut Dice| match dice.below(12) {
            0 if order != Order::Offsets => [experts, u32::MAX][dice.below(2) as usize],
            _ => dice.below(experts),
        };
        let tokens = 0..tokens as u32;
        let mut rows: Vec<_> =
            tokens.flat_map(|token| (0..top_k).map(move |_| token)).map(|token| (token, expert(&mut dice))).collect();
        if order != Order::Tokens {
            rows.sort_by_key(|(_, expert)| *expert);
            // Padding.
            rows.extend([(u32::MAX, 0), (u32::MAX, experts)]);
        }
        Self { batch, experts, top_k, order, rows }
    }
}

/// x of a call: of the tokens or of the rows.
pub(super) struct Input {
    pub of_tokens: bool,
    pub values: Vec<f32>,
}

/// Memory of a matrix between guards: the region, and its image.
pub(super) struct Guarded {
    all: Region,
    image: Vec<u8>,
    matrix: Matrix,
    stride: usize,
}

impl Layers<'_> {
    fn act(&self) -> DType {
        self.tokens.act()
    }

    /// What a row has at a site: nothing where y must keep its bits.
    fn pair(&self, step: &Step, row: usize, site: usize) -> Option<(&ExpertPair, f32)> {
        let (token, expert) = step.rows[row];
        let entry = step.batch.get(token as usize)?;
        let pair = *self.resident.0.get(usize::try_from(entry.slot).ok()?)?.get(&(site, expert))?;
        (expert < step.experts).then_some((pair, entry.scale))
    }

    fn upload(&self, rows: usize, width: usize, bytes: &[u8], fill: f32) -> Result<Guarded> {
        let (size, stride) = (self.act().size() as usize, width + 3);
        let mut image = Vec::new();
        self.act().encode(&vec![fill; (2 * GUARD + rows * stride).next_multiple_of(2)], &mut image);
        for (row, bytes) in bytes.chunks(width * size).enumerate() {
            let at = (GUARD + row * stride) * size;
            image[at..at + bytes.len()].copy_from_slice(bytes);
        }
        let all = self.backend.alloc(image.len() as u64, "conformance matrix")?;
        self.backend.submit(&mut |encoder| encoder.write(&all, &image))?;
        let used = all.slice((GUARD * size) as u64, (rows * stride * size) as u64)?;
        Ok(Guarded { matrix: Matrix::new(used, stride as u32), all, image, stride })
    }

    /// The router's results of a step in device memory: experts, and places where rows are sorted.
    fn route(&self, step: &Step) -> Result<[Region; 2]> {
        let [experts, places] = routes(step);
        let region = |len: usize| self.backend.alloc((len as u64 * 4).max(4), "conformance routing");
        let regions = [region(experts.len())?, region(places.len())?];
        self.send(&regions, step)?;
        Ok(regions)
    }

    fn send(&self, regions: &[Region; 2], step: &Step) -> Result<()> {
        let words = routes(step);
        let plan = Plan::new(step.batch.clone());
        self.backend.submit(&mut |encoder| {
            let capacity = Capacity::of_slots(step.batch.len() as u32, 0);
            // Rows alone: tiles and packs of tokens are of no use here.
            let rows: &[u8] = bytemuck::cast_slice(plan.rows());
            self.tokens.batch(capacity).and_then(|batch| encoder.write(&batch, rows))?;
            regions.iter().zip(&words).try_for_each(|(to, words)| encoder.write(to, bytemuck::cast_slice(words)))
        })?;
        Ok(())
    }

    fn encode(
        &self,
        encoder: &mut dyn Encoder,
        op: Op,
        step: &Step,
        regions: &[Region; 2],
        (sites, x, y): (&[usize], (bool, &Matrix), &[Guarded]),
    ) -> Result<()> {
        let tokens = step.batch.len() as u32;
        let named = step.order != Order::Tokens;
        let routing = Routing {
            rows: step.rows.len() as u32,
            experts: step.experts,
            // Places count tokens one by one here.
            top_k: if named { 1 } else { step.top_k },
            expert: match step.order {
                Order::Offsets => Experts::Offsets(&regions[0]),
                _ => Experts::ByRow(&regions[0]),
            },
            places: named.then_some(&regions[1]),
        };
        let capacity = Capacity::of_slots(tokens, 0);
        self.applier.encode_rows(encoder, op, self.pool, self.tokens, capacity, &routing)?;
        let outputs: Vec<Output<'_>> =
            sites.iter().zip(y).map(|(site, y)| Output { site: *site, y: &y.matrix }).collect();
        let input = if x.0 { ExpertInput::Tokens(x.1) } else { ExpertInput::Rows(x.1) };
        self.applier.encode(encoder, self.pool, op, routing.rows, tokens, input, &outputs)
    }

    /// Applies the experts to `y` of some sites and gives each site's memory, guards and all, by way of a graph if so.
    pub fn run(
        &self,
        op: Op,
        step: &Step,
        sites: &[usize],
        x: &Input,
        y: &[Vec<u8>],
        graph: bool,
    ) -> Result<Vec<(Guarded, Vec<u8>)>> {
        let first = &self.pool.sites()[sites[0]];
        let rows = if x.of_tokens { step.batch.len() } else { step.rows.len() };
        let mut bytes = Vec::new();
        self.act().encode(&x.values, &mut bytes);
        let input = self.upload(rows, first.in_features as usize, &bytes, f32::NAN)?;
        let outputs = sites
            .iter()
            .zip(y)
            .map(|(site, y)| self.upload(step.rows.len(), self.pool.sites()[*site].out_features as usize, y, 1.5));
        let outputs: Vec<Guarded> = outputs.collect::<Result<_>>()?;
        let regions = self.route(step)?;
        let mut record = |encoder: &mut dyn Encoder| {
            self.encode(encoder, op, step, &regions, (sites, (x.of_tokens, &input.matrix), &outputs))
        };
        match graph {
            false => drop(self.backend.submit(&mut record)?),
            true => {
                let graph = self.backend.capture(&mut record)?;
                // Of other rows first, whose outputs are then taken back.
                let other = Step { rows: step.rows.iter().rev().copied().collect(), ..step.clone() };
                if step.order != Order::Offsets {
                    self.send(&regions, &other)?;
                    graph.replay()?;
                }
                self.send(&regions, step)?;
                self.backend.submit(&mut |encoder| {
                    outputs.iter().try_for_each(|output| encoder.write(&output.all, &output.image))
                })?;
                graph.replay()?;
            }
        }
        let read = |output: Guarded| self.backend.read(&output.all).map(|bytes| (output, bytes));
        outputs.into_iter().map(read).collect()
    }

    /// Bytes of a row in a memory.
    pub fn range(&self, output: &Guarded, row: usize, width: u32) -> std::ops::Range<usize> {
        let size = self.act().size() as usize;
        let start = (GUARD + row * output.stride) * size;
        start..start + width as usize * size
    }

    /// Compares every row with the oracle, or with `truth(site, row, before, expected)`, and all else with what it was.
    fn check(
        &self,
        step: &Step,
        sites: &[usize],
        x: &Input,
        memory: &[(Guarded, Vec<u8>)],
        truth: impl Fn(usize, usize, &[f32], Expected) -> Expected + Sync,
    ) -> Check {
        let dtype = self.pool.dtype();
        let stored = |m: &HostMatrix| m.to(dtype).map(|bytes| dtype.decode(&bytes)).unwrap_or_default();
        let mut check = Check::default();
        for (site, (output, got)) in sites.iter().zip(memory) {
            let spec = &self.pool.sites()[*site];
            let of_row = |row: usize| {
                let (pair, scale) = self.pair(step, row, *site)?;
                let (a, b) = (stored(&pair.a), stored(&pair.b));
                let view = Pair {
                    a: &a,
                    b: &b,
                    rank: pair.rank(),
                    in_features: pair.in_features(),
                    out_features: pair.out_features(),
                };
                let x_row = if x.of_tokens { step.rows[row].0 as usize } else { row };
                let width = spec.in_features as usize;
                let oracle = Oracle::new(view, &x.values[x_row * width..(x_row + 1) * width]);
                let range = self.range(output, row, spec.out_features);
                let before = self.act().decode(&output.image[range.clone()]);
                let scale = f64::from(pair.scale) * f64::from(scale);
                let expected = truth(*site, row, &before, oracle.expand(&before, scale, self.act(), None));
                let mut check = Check::default();
                check.row(&spec.id.path, row, self.act(), &expected, &self.act().decode(&got[range]));
                Some(check)
            };
            let rows: Vec<Option<Check>> = (0..step.rows.len()).into_par_iter().map(of_row).collect();
            let mut kept = output.image.clone();
            for (row, of_row) in rows.into_iter().enumerate() {
                match of_row {
                    Some(of_row) => {
                        check.merge(of_row);
                        let range = self.range(output, row, spec.out_features);
                        kept[range.clone()].copy_from_slice(&got[range]);
                    }
                    None => check.elements += u64::from(spec.out_features),
                }
            }
            let elements = check.elements;
            check.bits(&format!("untouched parts of {}", spec.id.path), 0, self.act(), &kept, got);
            check.elements = elements;
        }
        check
    }

    /// x and y for a step at some sites.
    pub fn activations(&self, step: &Step, sites: &[usize], of_tokens: bool, seed: u64) -> (Input, Vec<Vec<u8>>) {
        let mut dice = Dice::new(seed);
        let rows = if of_tokens { step.batch.len() } else { step.rows.len() };
        let width = self.pool.sites()[sites[0]].in_features as usize;
        let values = (0..rows * width).map(|_| self.act().round(dice.unit())).collect();
        let y = sites.iter().map(|site| {
            let values: Vec<f32> = (0..step.rows.len() * self.pool.sites()[*site].out_features as usize)
                .map(|_| dice.unit() * 4.0)
                .collect();
            let mut bytes = Vec::new();
            self.act().encode(&values, &mut bytes);
            bytes
        });
        let y = y.collect();
        (Input { of_tokens, values }, y)
    }

    /// A step at some sites, checked.
    pub fn step(
        &self,
        op: Op,
        step: &Step,
        (sites, of_tokens): (&[usize], bool),
        graph: bool,
        truth: impl Fn(&Input, usize, usize, &[f32], Expected) -> Expected + Sync,
    ) -> Result<Check> {
        let (x, y) = self.activations(step, sites, of_tokens, 5);
        let memory = self.run(op, step, sites, &x, &y, graph)?;
        Ok(self.check(step, sites, &x, &memory, |site, row, before, expected| truth(&x, site, row, before, expected)))
    }
}

/// The words that a router leaves: of experts, and of places.
fn routes(step: &Step) -> [Vec<u32>; 2] {
    let experts = match step.order {
        Order::Offsets => {
            let ends = (0..=step.experts).map(|e| step.rows.iter().filter(|(t, x)| *t != u32::MAX && *x < e).count());
            ends.map(|end| end as u32).collect()
        }
        _ => step.rows.iter().map(|(_, expert)| *expert).collect(),
    };
    [experts, step.rows.iter().map(|(token, _)| *token).collect()]
}
