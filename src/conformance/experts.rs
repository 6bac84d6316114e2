//! Routed layers through the public API: expert pools, batches made on the device, decode and sorted prefill.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;

use super::data::Dice;
use super::oracle::{Check, Expected, Oracle, Pair};
use super::{Outcome, Trial};
use crate::adapter::{self, Adapter, BaseModel, ExpertPair, HostMatrix, SiteId};
use crate::backend::{Encoder, GpuBackend};
use crate::contract::RowRef;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::ops::{Applier, ExpertApplier, ExpertInput, Experts, Matrix, Op, Output, Routing};
use crate::pool::{Capacity, ExpertPool, ExpertSite, ExpertSpec, Plan, Pool, PoolSpec, SlotImage};

/// Elements of guard before and behind every matrix.
const GUARD: usize = 64;

/// A pool of experts on a device, and what its slots hold.
pub(super) struct Bench<'b> {
    backend: &'b dyn GpuBackend,
    pool: Pool,
    tokens: Applier,
    applier: ExpertApplier,
    act: DType,
    slots: Vec<Option<Adapter>>,
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
        let batch = (0..tokens)
            .map(|_| RowRef {
                slot: dice.below(slots + 2) as i32 - 2,
                scale: [1.0, 1.0, 0.5, -1.5][dice.below(4) as usize],
            })
            .collect();
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
struct Guarded {
    all: Region,
    image: Vec<u8>,
    matrix: Matrix,
    stride: usize,
}

impl<'b> Bench<'b> {
    pub fn new(
        backend: &'b dyn GpuBackend,
        (spec, slots): (ExpertSpec, u32),
        (act, dtype): (DType, DType),
        rows: u32,
        scratch: Option<u64>,
    ) -> Result<Self> {
        let sites = PoolSpec { max_rank: 1, ..PoolSpec::for_adapters([], slots, dtype)? };
        let pool = Pool::with_experts(backend, sites, Some(spec))?;
        let capacity = Capacity { rows, tiles: 0 };
        let tokens = Applier::new(backend, &pool, act, capacity)?;
        let experts = pool.experts().expect("a pool that was made with experts");
        let applier = match scratch {
            None => ExpertApplier::new(backend, experts, act, rows)?,
            Some(bytes) => ExpertApplier::with_scratch(backend, experts, act, rows, bytes)?,
        };
        let slots = (0..slots).map(|_| None).collect();
        Ok(Self { backend, pool, tokens, applier, act, slots })
    }

    pub fn pool(&self) -> &ExpertPool {
        self.pool.experts().expect("a pool that was made with experts")
    }

    /// Puts an adapter in a slot, or empties it.
    pub fn put(&mut self, slot: u32, adapter: Option<&Adapter>) -> Result<()> {
        let image = match adapter {
            Some(adapter) => SlotImage::new(&self.pool, adapter)?,
            None => SlotImage::empty(&self.pool),
        };
        self.pool.publish_image(self.backend, slot, &image, &mut |e| image.write(&self.pool, slot, e))?;
        self.slots[slot as usize] = adapter.cloned();
        Ok(())
    }

    /// What a row has at a site: nothing where y must keep its bits.
    fn pair(&self, step: &Step, row: usize, site: usize) -> Option<(&ExpertPair, f32)> {
        let (token, expert) = step.rows[row];
        let entry = step.batch.get(token as usize)?;
        let adapter = self.slots.get(usize::try_from(entry.slot).ok()?)?.as_ref()?;
        let path = &self.pool().sites()[site].id.path;
        let pair = adapter.experts.iter().find(|pair| pair.site.path == *path && pair.expert == expert)?;
        (expert < step.experts).then_some((pair, entry.scale))
    }

    fn upload(&self, rows: usize, width: usize, bytes: &[u8], fill: f32) -> Result<Guarded> {
        let (size, stride) = (self.act.size() as usize, width + 3);
        let mut image = Vec::new();
        self.act.encode(&vec![fill; (2 * GUARD + rows * stride).next_multiple_of(2)], &mut image);
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
            let capacity = Capacity { rows: step.batch.len() as u32, tiles: 0 };
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
        let capacity = Capacity { rows: tokens, tiles: 0 };
        self.applier.encode_rows(encoder, self.pool(), &self.tokens, capacity, &routing)?;
        let outputs: Vec<Output<'_>> =
            sites.iter().zip(y).map(|(site, y)| Output { site: *site, y: &y.matrix }).collect();
        let input = if x.0 { ExpertInput::Tokens(x.1) } else { ExpertInput::Rows(x.1) };
        self.applier.encode(encoder, self.pool(), op, routing.rows, tokens, input, &outputs)
    }

    /// Applies the experts to `y` of some sites and gives each site's memory, guards and all, by way of a graph if so.
    fn run(
        &self,
        op: Op,
        step: &Step,
        sites: &[usize],
        x: &Input,
        y: &[Vec<u8>],
        graph: bool,
    ) -> Result<Vec<(Guarded, Vec<u8>)>> {
        let first = &self.pool().sites()[sites[0]];
        let rows = if x.of_tokens { step.batch.len() } else { step.rows.len() };
        let mut bytes = Vec::new();
        self.act.encode(&x.values, &mut bytes);
        let input = self.upload(rows, first.in_features as usize, &bytes, f32::NAN)?;
        let outputs = sites
            .iter()
            .zip(y)
            .map(|(site, y)| self.upload(step.rows.len(), self.pool().sites()[*site].out_features as usize, y, 1.5));
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
    fn range(&self, output: &Guarded, row: usize, width: u32) -> std::ops::Range<usize> {
        let size = self.act.size() as usize;
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
        truth: impl Fn(usize, usize, &[f32], Expected) -> Expected,
    ) -> Check {
        let dtype = self.pool().dtype();
        let stored = |m: &HostMatrix| m.to(dtype).map(|bytes| dtype.decode(&bytes)).unwrap_or_default();
        let mut check = Check::default();
        for (site, (output, got)) in sites.iter().zip(memory) {
            let spec = &self.pool().sites()[*site];
            let mut kept = output.image.clone();
            for row in 0..step.rows.len() {
                let range = self.range(output, row, spec.out_features);
                let Some((pair, scale)) = self.pair(step, row, *site) else {
                    check.elements += u64::from(spec.out_features);
                    continue;
                };
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
                let before = self.act.decode(&output.image[range.clone()]);
                let scale = f64::from(pair.scale) * f64::from(scale);
                let expected = truth(*site, row, &before, oracle.expand(&before, scale, self.act, None));
                check.row(&spec.id.path, row, self.act, &expected, &self.act.decode(&got[range.clone()]));
                kept[range.clone()].copy_from_slice(&got[range]);
            }
            let elements = check.elements;
            check.bits(&format!("untouched parts of {}", spec.id.path), 0, self.act, &kept, got);
            check.elements = elements;
        }
        check
    }

    /// x and y for a step at some sites.
    fn activations(&self, step: &Step, sites: &[usize], of_tokens: bool, seed: u64) -> (Input, Vec<Vec<u8>>) {
        let mut dice = Dice::new(seed);
        let rows = if of_tokens { step.batch.len() } else { step.rows.len() };
        let width = self.pool().sites()[sites[0]].in_features as usize;
        let values = (0..rows * width).map(|_| self.act.round(dice.unit())).collect();
        let y = sites.iter().map(|site| {
            let values: Vec<f32> = (0..step.rows.len() * self.pool().sites()[*site].out_features as usize)
                .map(|_| dice.unit() * 4.0)
                .collect();
            let mut bytes = Vec::new();
            self.act.encode(&values, &mut bytes);
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
        truth: impl Fn(&Input, usize, usize, &[f32], Expected) -> Expected,
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

/// Two routed layers: one with gate and up apart, one with both in one.
fn model() -> Vec<ExpertSite> {
    let site = |path: &str, experts, in_features, out_features| ExpertSite {
        id: SiteId::from_path(path),
        experts,
        in_features,
        out_features,
    };
    vec![
        site("model.layers.0.mlp.experts.gate_proj", 6, 48, 21),
        site("model.layers.0.mlp.experts.up_proj", 6, 48, 21),
        site("model.layers.0.mlp.experts.down_proj", 6, 21, 48),
        site("model.layers.1.mlp.experts.gate_up_proj", 9, 37, 44),
        site("model.layers.1.mlp.experts.down_proj", 9, 22, 37),
    ]
}

/// Calls of the model: sites, whether they read the tokens' x, and their layer's experts.
const CALLS: [(&[usize], bool, u32); 4] = [(&[0, 1], true, 6), (&[2], false, 6), (&[3], true, 9), (&[4], false, 9)];

const MAX_RANK: u32 = 11;
const SLOTS: u32 = 5;

/// An adapter of some of the experts, `of` in eight, ranks 1..=max.
fn adapter(sites: &[ExpertSite], of: u32, seed: u64) -> Adapter {
    let mut dice = Dice::new(seed);
    let dtype = DType::ALL[seed as usize % 3];
    let mut experts = Vec::new();
    for site in sites {
        for expert in 0..site.experts {
            if dice.below(8) >= of {
                continue;
            }
            let rank = 1 + dice.below(MAX_RANK);
            let mut matrix = |rows: u32, cols: u32| {
                let values: Vec<f32> = (0..rows * cols).map(|_| dice.unit()).collect();
                let mut bytes = Vec::new();
                dtype.encode(&values, &mut bytes);
                HostMatrix { dtype, rows: rows as usize, cols: cols as usize, bytes }
            };
            let (a, b) = (matrix(rank, site.in_features), matrix(site.out_features, rank));
            let scale = 0.25 + dice.unit().abs();
            experts.push(ExpertPair { site: site.id.clone(), expert, experts: site.experts, a, b, scale });
        }
    }
    Adapter::from_pairs(Vec::new()).with_experts(experts)
}

/// The pool's spec for these adapters, and the adapters: sparse ones, a whole one, one without any.
fn adapters(dtype: DType) -> (ExpertSpec, Vec<Adapter>) {
    let list: Vec<Adapter> =
        [3, 8, 0, 1, 5].into_iter().zip(1..).map(|(of, seed)| adapter(&model(), of, seed)).collect();
    let mut spec = ExpertSpec { sites: model(), max_rank: MAX_RANK, slot_bytes: 0 };
    spec.slot_bytes = list.iter().map(|adapter| spec.adapter_bytes(adapter, dtype)).max().unwrap_or(0);
    (spec, list)
}

fn stage(
    backend: &dyn GpuBackend,
    (act, dtype): (DType, DType),
    rows: u32,
    scratch: Option<u64>,
) -> Result<(Bench<'_>, Vec<Adapter>)> {
    let (spec, list) = adapters(dtype);
    let mut bench = Bench::new(backend, (spec, SLOTS), (act, dtype), rows, scratch)?;
    for (slot, adapter) in (0..).zip(&list) {
        bench.put(slot, Some(adapter))?;
    }
    Ok((bench, list))
}

const TOKENS: usize = 23;
const TOP_K: u32 = 3;
const ROWS: u32 = TOKENS as u32 * TOP_K + 2;
const ORDERS: [Order; 3] = [Order::Tokens, Order::Named, Order::Offsets];

/// All trials of routed layers.
pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for op in Op::ALL {
        let name = op.name();
        for act in DType::ALL {
            for dtype in DType::ALL {
                trials.push(Trial::new(format!("experts {name}[{act}x{dtype}] mixed"), move |backend| {
                    mixed(backend, op, (act, dtype), None)
                }));
            }
            let types = (act, DType::Bf16);
            trials.push(Trial::new(format!("experts {name}[{act}xbf16] to the bit"), move |backend| {
                bits(backend, op, types)
            }));
            trials.push(Trial::new(format!("experts {name}[{act}xbf16] swaps"), move |backend| {
                swaps(backend, op, types)
            }));
        }
    }
    trials.push(Trial::new("experts of more bytes than a slot", too_many));
    let folder = PathBuf::from(std::env::var(super::fixtures::FOLDER).unwrap_or_else(|_| "tests/fixtures".to_owned()));
    for (name, base) in FIXTURES.into_iter().filter(|(name, _)| folder.join(name).exists()) {
        for op in Op::ALL {
            let folder = folder.clone();
            let run = move |backend: &dyn GpuBackend| fixture(backend, &folder, name, base, op);
            trials.push(Trial::new(format!("fixture {name} {} experts", op.name()), run));
        }
    }
    trials
}

/// Every order of rows at every call, eager and by a graph that has served another routing.
fn mixed(backend: &dyn GpuBackend, op: Op, types: (DType, DType), scratch: Option<u64>) -> Result<Outcome> {
    let (bench, _) = stage(backend, types, ROWS, scratch)?;
    let mut check = Check::default();
    for (seed, order) in (0..).zip(ORDERS) {
        for (sites, of_tokens, experts) in CALLS {
            let step = Step::new(TOKENS, SLOTS, (experts, TOP_K), order, seed);
            for graph in [false, true] {
                check.merge(bench.step(op, &step, (sites, of_tokens), graph, |_, _, _, _, expected| expected)?);
            }
        }
    }
    Ok(Outcome::Checked(check))
}

/// A row's bits are the same alone and in any batch, in any order of rows, in any slot, however many pass at a time, by a
/// graph and without.
fn bits(backend: &dyn GpuBackend, op: Op, types: (DType, DType)) -> Result<Outcome> {
    let (mut bench, list) = stage(backend, types, ROWS, None)?;
    let act = types.0;
    let mut check = Check::default();
    let row = 4 * 4 * u64::from(MAX_RANK);
    let few = [1, 5, 16, 33].map(|rows| stage(backend, types, ROWS, Some(rows * row)));
    for (sites, of_tokens, experts) in CALLS {
        let step = Step::new(TOKENS, SLOTS, (experts, TOP_K), Order::Named, 3);
        let (x, y) = bench.activations(&step, sites, of_tokens, 5);
        let whole = bench.run(op, &step, sites, &x, &y, false)?;
        let mut same = |name: &str, other: &[(Guarded, Vec<u8>)]| {
            for (want, got) in whole.iter().zip(other) {
                check.bits(name, 0, act, &want.1, &got.1);
            }
        };
        same("by a graph", &bench.run(op, &step, sites, &x, &y, true)?);
        for few in &few {
            let Ok((few, _)) = few else { continue };
            same("few rows at a time", &few.run(op, &step, sites, &x, &y, false)?);
        }
        // One row after the other, backwards.
        for (i, row) in step.rows.iter().enumerate().rev() {
            let one = Step { rows: vec![*row], ..step.clone() };
            let width = bench.pool().sites()[sites[0]].in_features as usize;
            let x = match of_tokens {
                true => Input { of_tokens, values: x.values.clone() },
                false => Input { of_tokens, values: x.values[i * width..(i + 1) * width].to_vec() },
            };
            let widths: Vec<u32> = sites.iter().map(|site| bench.pool().sites()[*site].out_features).collect();
            let cut = |(y, width): (&Vec<u8>, &u32)| {
                let bytes = *width as usize * act.size() as usize;
                y[i * bytes..(i + 1) * bytes].to_vec()
            };
            let y: Vec<Vec<u8>> = y.iter().zip(&widths).map(cut).collect();
            let alone = bench.run(op, &one, sites, &x, &y, false)?;
            for ((want, got), width) in whole.iter().zip(&alone).zip(&widths) {
                let (want, got) = (&want.1[bench.range(&want.0, i, *width)], &got.1[bench.range(&got.0, 0, *width)]);
                check.bits("a row alone", i, act, want, got);
            }
        }
    }
    // Every adapter in another slot.
    let moved: BTreeMap<i32, i32> = (0..SLOTS as i32).map(|slot| (slot, (slot + 2) % SLOTS as i32)).collect();
    let step = Step::new(TOKENS, SLOTS, (6, TOP_K), Order::Tokens, 8);
    let (x, y) = bench.activations(&step, &[0, 1], true, 6);
    let before = bench.run(op, &step, &[0, 1], &x, &y, false)?;
    for (from, to) in &moved {
        bench.put(*to as u32, Some(&list[*from as usize]))?;
    }
    let batch = step.batch.iter().map(|row| RowRef { slot: moved.get(&row.slot).copied().unwrap_or(-1), ..*row });
    let after = bench.run(op, &Step { batch: batch.collect(), ..step.clone() }, &[0, 1], &x, &y, false)?;
    for (want, got) in before.iter().zip(&after) {
        check.bits("another slot", 0, act, &want.1, &got.1);
    }
    Ok(Outcome::Checked(check))
}

/// Adapters come and go; nothing of an old one is left.
fn swaps(backend: &dyn GpuBackend, op: Op, types: (DType, DType)) -> Result<Outcome> {
    let (mut bench, list) = stage(backend, types, ROWS, None)?;
    let mut check = Check::default();
    let step = Step::new(TOKENS, SLOTS, (9, TOP_K), Order::Named, 12);
    let (x, y) = bench.activations(&step, &[3], true, 5);
    let first = bench.run(op, &step, &[3], &x, &y, false)?;
    for incoming in [Some(2), None, Some(3), Some(0), Some(4), Some(1)] {
        let incoming = incoming.map(|index: usize| &list[index]);
        bench.put(1, incoming)?;
        for (sites, of_tokens, experts) in CALLS {
            let step = Step::new(TOKENS, SLOTS, (experts, TOP_K), Order::Named, 12);
            check.merge(bench.step(op, &step, (sites, of_tokens), false, |_, _, _, _, expected| expected)?);
        }
    }
    let again = bench.run(op, &step, &[3], &x, &y, false)?;
    check.bits("the first adapter loaded again", 0, types.0, &first[0].1, &again[0].1);
    Ok(Outcome::Checked(check))
}

/// Adapters that PEFT itself saved, and their bases.
const FIXTURES: [(&str, &str); 4] = [
    ("24_moe_target_params_mixtral", "mixtral"),
    ("25_moe_target_params_qwen3", "qwen3moe"),
    ("26b_moe_gptoss_transposed", "gptoss"),
    ("41_moe_v4_per_expert_keys", "mixtral"),
];

/// One of them, held to PEFT's own f64 change of each expert's weight.
fn fixture(backend: &dyn GpuBackend, folder: &Path, name: &str, base: &str, op: Op) -> Result<Outcome> {
    let base = BaseModel::open(folder.join("_base").join(base))?;
    let mut adapter = adapter::load(folder.join(name), Some(&base))?;
    // Linears are another pool's.
    adapter.pairs.clear();
    let path = folder.join(name).join("expected.safetensors");
    let bytes = std::fs::read(&path).map_err(|source| Error::Io { path: path.display().to_string(), source })?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| Error::Input(format!("{}: {e}", path.display())))?;
    let dtype = DType::F32;
    let Some(spec) = ExpertSpec::for_adapters([&adapter], dtype)? else {
        return Err(Error::Input(format!("{name}: no experts were loaded")));
    };
    let mut bench = Bench::new(backend, (spec.over(&base), 3), (dtype, dtype), 64, None)?;
    bench.put(1, Some(&adapter))?;
    let sites = bench.pool().sites().to_vec();
    let mut check = Check::default();
    for (index, site) in sites.iter().enumerate() {
        let changes: Vec<Vec<f64>> = (0..site.experts)
            .map(|expert| change(&file, site, expert))
            .collect::<Option<_>>()
            .ok_or_else(|| Error::Input(format!("{}: nothing for {}", path.display(), site.id.path)))?;
        let of_tokens = !site.id.path.ends_with("down_proj");
        for order in ORDERS {
            let step = Step::new(19, 3, (site.experts, 2), order, 4);
            let truth = |x: &Input, _: usize, row: usize, before: &[f32], oracle: Expected| {
                let (token, expert) = step.rows[row];
                let width = site.in_features as usize;
                let x = &x.values[if of_tokens { token as usize } else { row } * width..][..width];
                let scale = f64::from(step.batch[token as usize].scale);
                let weight = &changes[expert as usize];
                let want = before.iter().enumerate().map(|(n, y)| {
                    let sum: f64 = weight[n * width..][..width].iter().zip(x).map(|(w, x)| w * f64::from(*x)).sum();
                    f64::from(*y) + scale * sum
                });
                Expected { want: want.collect(), bound: oracle.bound }
            };
            check.merge(bench.step(op, &step, (&[index], of_tokens), false, truth)?);
        }
    }
    Ok(Outcome::Checked(check))
}

/// PEFT's change of one expert's weight, `[out][in]`.
fn change(file: &SafeTensors<'_>, site: &ExpertSite, expert: u32) -> Option<Vec<f64>> {
    let read = |name: &str| {
        let tensor = file.tensor(&format!("{name}|delta_w")).ok()?;
        let values = tensor.data().as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect::<Vec<_>>();
        Some((tensor.shape().to_vec(), values))
    };
    let (inputs, outputs) = (site.in_features as usize, site.out_features as usize);
    if let Some((shape, values)) = read(&site.id.path) {
        let one = &values[expert as usize * inputs * outputs..][..inputs * outputs];
        return Some(match shape == [site.experts as usize, outputs, inputs] {
            true => one.to_vec(),
            false => (0..outputs).flat_map(|n| (0..inputs).map(move |k| one[k * outputs + n])).collect(),
        });
    }
    let (owner, leaf) = site.id.path.rsplit_once(".mlp.experts.")?;
    let of = |name: &str| Some(read(&format!("{owner}.block_sparse_moe.experts.{expert}.{name}"))?.1);
    match leaf {
        "down_proj" => of("w2"),
        _ => Some([of("w1")?, of("w3")?].concat()),
    }
}

/// More experts than the pool was made for are refused by name, and the old ones serve on.
fn too_many(backend: &dyn GpuBackend) -> Result<Outcome> {
    let types = (DType::F32, DType::F32);
    let (mut spec, list) = adapters(types.1);
    spec.slot_bytes = spec.adapter_bytes(&list[0], types.1);
    let mut bench = Bench::new(backend, (spec, SLOTS), types, ROWS, None)?;
    bench.put(1, Some(&list[0]))?;
    let refused = bench.put(1, Some(&list[1])).err().map(|error| error.to_string());
    let step = Step::new(TOKENS, SLOTS, (6, TOP_K), Order::Tokens, 2);
    let mut check = bench.step(Op::Bgmv, &step, (&[2], false), false, |_, _, _, _, expected| expected)?;
    if !refused.is_some_and(|message| message.contains("slot_bytes")) {
        check.mismatch(super::oracle::Mismatch {
            site: "an adapter that is larger than a slot was taken".into(),
            row: 0,
            column: 0,
            got: 0.0,
            want: 1.0,
            bound: 0.0,
        });
    }
    Ok(Outcome::Checked(check))
}
