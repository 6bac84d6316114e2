//! Routed layers of expert pools through the public API: adapters in mixed batches, decode and sorted prefill, swaps, and
//! PEFT's own files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;

use super::data::Dice;
use super::expert_layers::{Guarded, Input, Layers, Order, Resident, Step};
use super::oracle::{Check, Expected};
use super::{Outcome, Trial, synthetic};
use crate::adapter::{self, Adapter, BaseModel, ExpertPair, SiteId};
use crate::backend::GpuBackend;
use crate::contract::RowRef;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ops::{Applier, ExpertApplier, Op};
use crate::pool::{Capacity, ExpertPool, ExpertSite, ExpertSpec, Pool, PoolSpec, SlotImage};

/// A pool of experts on a device, and what its slots hold.
struct Bench<'b> {
    backend: &'b dyn GpuBackend,
    pool: Pool,
    tokens: Applier,
    applier: ExpertApplier,
    slots: Vec<Option<Adapter>>,
}

impl<'b> Bench<'b> {
    fn new(
        backend: &'b dyn GpuBackend,
        (spec, slots): (ExpertSpec, u32),
        (act, dtype): (DType, DType),
        rows: u32,
        scratch: Option<u64>,
    ) -> Result<Self> {
        let sites = PoolSpec { max_rank: 1, ..PoolSpec::for_adapters([], slots, dtype)? };
        let pool = Pool::with_experts(backend, sites, Some(spec))?;
        let tokens = Applier::new(backend, &pool, act, Capacity::of_slots(rows, 0))?;
        let experts = pool.experts().expect("a pool that was made with experts");
        let applier = match scratch {
            None => ExpertApplier::new(backend, experts, act, rows)?,
            Some(bytes) => ExpertApplier::with_scratch(backend, experts, act, rows, bytes)?,
        };
        let slots = (0..slots).map(|_| None).collect();
        Ok(Self { backend, pool, tokens, applier, slots })
    }

    fn pool(&self) -> &ExpertPool {
        self.pool.experts().expect("a pool that was made with experts")
    }

    /// Puts an adapter in a slot, or empties it.
    fn put(&mut self, slot: u32, adapter: Option<&Adapter>) -> Result<()> {
        let image = match adapter {
            Some(adapter) => SlotImage::new(&self.pool, adapter)?,
            None => SlotImage::empty(&self.pool),
        };
        self.pool.publish_image(self.backend, slot, &image, &mut |e| image.write(&self.pool, slot, e))?;
        self.slots[slot as usize] = adapter.cloned();
        Ok(())
    }

    fn layers(&self) -> Layers<'_> {
        let Self { backend, tokens, applier, slots, .. } = self;
        let pool = self.pool();
        let resident = Resident::new(pool, slots.iter().map(Option::as_ref));
        Layers { backend: *backend, pool, tokens, applier, resident }
    }
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
            let (a, b, scale) = synthetic::pair(&mut dice, dtype, MAX_RANK, [site.in_features, site.out_features]);
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
                check
                    .merge(bench.layers().step(op, &step, (sites, of_tokens), graph, |_, _, _, _, expected| expected)?);
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
        let (x, y) = bench.layers().activations(&step, sites, of_tokens, 5);
        let whole = bench.layers().run(op, &step, sites, &x, &y, false)?;
        let mut same = |name: &str, other: &[(Guarded, Vec<u8>)]| {
            for (want, got) in whole.iter().zip(other) {
                check.bits(name, 0, act, &want.1, &got.1);
            }
        };
        same("by a graph", &bench.layers().run(op, &step, sites, &x, &y, true)?);
        for few in &few {
            let Ok((few, _)) = few else { continue };
            same("few rows at a time", &few.layers().run(op, &step, sites, &x, &y, false)?);
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
            let alone = bench.layers().run(op, &one, sites, &x, &y, false)?;
            for ((want, got), width) in whole.iter().zip(&alone).zip(&widths) {
                let (want, got) = (
                    &want.1[bench.layers().range(&want.0, i, *width)],
                    &got.1[bench.layers().range(&got.0, 0, *width)],
                );
                check.bits("a row alone", i, act, want, got);
            }
        }
    }
    // Every adapter in another slot.
    let moved: BTreeMap<i32, i32> = (0..SLOTS as i32).map(|slot| (slot, (slot + 2) % SLOTS as i32)).collect();
    let step = Step::new(TOKENS, SLOTS, (6, TOP_K), Order::Tokens, 8);
    let (x, y) = bench.layers().activations(&step, &[0, 1], true, 6);
    let before = bench.layers().run(op, &step, &[0, 1], &x, &y, false)?;
    for (from, to) in &moved {
        bench.put(*to as u32, Some(&list[*from as usize]))?;
    }
    let batch = step.batch.iter().map(|row| RowRef { slot: moved.get(&row.slot).copied().unwrap_or(-1), ..*row });
    let after = bench.layers().run(op, &Step { batch: batch.collect(), ..step.clone() }, &[0, 1], &x, &y, false)?;
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
    let (x, y) = bench.layers().activations(&step, &[3], true, 5);
    let first = bench.layers().run(op, &step, &[3], &x, &y, false)?;
    for incoming in [Some(2), None, Some(3), Some(0), Some(4), Some(1)] {
        let incoming = incoming.map(|index: usize| &list[index]);
        bench.put(1, incoming)?;
        for (sites, of_tokens, experts) in CALLS {
            let step = Step::new(TOKENS, SLOTS, (experts, TOP_K), Order::Named, 12);
            check.merge(bench.layers().step(op, &step, (sites, of_tokens), false, |_, _, _, _, expected| expected)?);
        }
    }
    let again = bench.layers().run(op, &step, &[3], &x, &y, false)?;
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
            check.merge(bench.layers().step(op, &step, (&[index], of_tokens), false, truth)?);
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
    let mut check = bench.layers().step(Op::Bgmv, &step, (&[2], false), false, |_, _, _, _, expected| expected)?;
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
