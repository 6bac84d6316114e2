//! Adapters that PEFT itself saved, with the outputs that PEFT itself computed from them in f64.
//!
//! In f32 the device is held to PEFT's own numbers; in f16 and bf16, where PEFT's y_base must be rounded
//! first, to the oracle on the same weights. Every linear of the base is in the pool, and those that an
//! adapter does not adapt must keep their bits.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};

use super::bench::{Bench, Place};
use super::data::Dice;
use super::oracle::{Check, Expected};
use super::{Outcome, Trial, token_pool};
use crate::adapter::{self, Adapter, BaseModel};
use crate::backend::GpuBackend;
use crate::contract::RowRef;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ops::Op;
use crate::pool::{Plan, PoolSpec, SiteKind, SiteSpec};

/// Environment variable that names the folder of fixtures; without it `tests/fixtures` is looked for.
pub const FOLDER: &str = "LORAPOOL_FIXTURES";
/// Cases that hold the weights of `VARIANTS_OF` under other keys, types or config spellings: its outputs are theirs.
const VARIANTS: [&str; 11] = [
    "d_config_bom",
    "d_config_no_peft_type",
    "d_config_null_patterns",
    "d_config_old_peft",
    "d_config_r_float",
    "d_config_unknown_fields",
    "d_default_infix",
    "d_double_prefix",
    "d_f64",
    "d_language_model_prefix",
    "d_no_prefix",
];
const VARIANTS_OF: &str = "05_r1";
/// The case that puts seven adapters in one batch.
const MIXED: &str = "42_batch_mixed";

/// A matrix of an expected-outputs file: exact where the file has f32.
pub(super) struct Truth {
    pub(super) width: usize,
    pub(super) values: Vec<f64>,
}

/// `MODULE|x`, `MODULE|y_base`, `MODULE|y` and `MODULE|ids` of each module, and `slots` where there are any.
pub(super) struct Expectation {
    pub(super) modules: BTreeMap<String, [Option<Truth>; 4]>,
    slots: Option<Vec<i64>>,
}

/// A case: an adapter, and where PEFT's outputs for it are.
#[derive(Clone)]
struct Fixture {
    name: String,
    dir: PathBuf,
    base: PathBuf,
    expected: PathBuf,
    /// Whether it has LoRA on an embedding or replaced token rows.
    tokens: bool,
}

/// A trial for each adapter, op and type; one that is ignored where there is no folder of fixtures.
pub fn trials() -> Vec<Trial> {
    let folder = PathBuf::from(std::env::var(FOLDER).unwrap_or_else(|_| "tests/fixtures".to_owned()));
    let fixtures = match fixtures(&folder) {
        Ok(fixtures) => fixtures,
        Err(error) => {
            let reason = format!("{error}; set {FOLDER} to the folder of fixtures");
            return vec![Trial::new("fixtures", move |_| Ok(Outcome::Ignored(reason.clone())))];
        }
    };
    let mut trials = Vec::new();
    for fixture in fixtures {
        for op in Op::ALL {
            for act in DType::ALL {
                // What differs in a variant is how it loads.
                if VARIANTS.contains(&&*fixture.name) && (op, act) != (Op::Bgmv, DType::F32) {
                    continue;
                }
                let name = format!("fixture {} {}[{act}]", fixture.name, op.name());
                let (folder, fixture) = (folder.clone(), fixture.clone());
                if fixture.tokens {
                    let fixture = fixture.clone();
                    trials.push(Trial::new(format!("{name} of tokens"), move |backend| {
                        tokens(backend, &fixture, op, act)
                    }));
                }
                trials.push(Trial::new(name, move |backend| match fixture.name == MIXED {
                    true => batch_mixed(backend, &folder, &fixture, op, act),
                    false => one(backend, &fixture, op, act),
                }));
            }
        }
    }
    trials
}

/// The cases that have outputs and aren't refused: those that must load, and those that do.
fn fixtures(folder: &Path) -> Result<Vec<Fixture>> {
    let path = folder.join("INDEX.json");
    let bad = |e: serde_json::Error| Error::Input(format!("{}: {e}", path.display()));
    let text = std::fs::read_to_string(&path).map_err(|source| io(&path, source))?;
    let index: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).map_err(bad)?;
    let mut fixtures = Vec::new();
    for (name, case) in index {
        let base = folder.join("_base").join(case["base"].as_str().unwrap_or_default());
        let truth = if VARIANTS.contains(&&*name) { VARIANTS_OF } else { &name };
        let (dir, expected) = (folder.join(&name), folder.join(truth).join("expected.safetensors"));
        let loaded = BaseModel::open(&base).and_then(|base| adapter::load(&dir, Some(&base)));
        // Experts are another pool's: `experts` has those.
        if loaded.as_ref().is_ok_and(|adapter| !adapter.experts.is_empty() && adapter.pairs.is_empty()) {
            continue;
        }
        let of_tokens = |adapter: &Adapter| !adapter.tokens.is_empty() || adapter.pairs.iter().any(|p| p.embedding);
        let tokens = loaded.as_ref().is_ok_and(of_tokens);
        let take = match case["want"].as_str() {
            Some("accept") => true,
            Some("decide") => loaded.is_ok(),
            _ => false,
        };
        if take && expected.exists() {
            fixtures.push(Fixture { name, dir, base, expected, tokens });
        }
    }
    Ok(fixtures)
}

fn io(path: &Path, source: std::io::Error) -> Error {
    Error::Io { path: path.display().to_string(), source }
}

fn expectation(path: &Path) -> Result<Expectation> {
    let bytes = std::fs::read(path).map_err(|source| io(path, source))?;
    let bad = |what: &dyn std::fmt::Display| Error::Input(format!("{}: {what}", path.display()));
    let file = SafeTensors::deserialize(&bytes).map_err(|e| bad(&e))?;
    let mut out = Expectation { modules: BTreeMap::new(), slots: None };
    for (key, tensor) in file.tensors() {
        let data = tensor.data();
        let words = || data.as_chunks::<8>().0.iter();
        if key == "slots" {
            out.slots = Some(words().map(|b| i64::from_le_bytes(*b)).collect());
        }
        let Some((module, part)) = key.rsplit_once('|') else { continue };
        let Some(part) = ["x", "y_base", "y", "ids"].iter().position(|p| *p == part) else { continue };
        let values = match tensor.dtype() {
            Dtype::I64 => words().map(|b| i64::from_le_bytes(*b) as f64).collect(),
            Dtype::F64 => words().map(|b| f64::from_le_bytes(*b)).collect(),
            Dtype::F32 => DType::F32.decode(data).into_iter().map(f64::from).collect(),
            other => return Err(bad(&format!("{key} is {other:?}"))),
        };
        let width = tensor.shape().last().copied().unwrap_or(1);
        out.modules.entry(module.to_owned()).or_default()[part] = Some(Truth { width, values });
    }
    Ok(out)
}

/// A pool over all sites of a base.
fn spec(base: &BaseModel, max_rank: usize, max_loras: u32, dtype: DType) -> PoolSpec {
    PoolSpec::for_base(base, max_rank as u32, max_loras, dtype)
}

/// One adapter in the middle slot of three: each row of PEFT's with it, without any, and with a vacant slot.
fn one(backend: &dyn GpuBackend, fixture: &Fixture, op: Op, act: DType) -> Result<Outcome> {
    let expected = expectation(&fixture.expected)?;
    let base = BaseModel::open(&fixture.base)?;
    let mut adapter = adapter::load(&fixture.dir, Some(&base))?;
    adapter.experts.clear();
    let rows = expected.modules.values().find_map(|m| m[0].as_ref()).map_or(0, |x| x.values.len() / x.width);
    let slots: Vec<i32> = [1, -1, 0].into_iter().flat_map(|slot| std::iter::repeat_n(slot, rows)).collect();
    compare(backend, &base, &[(1, &adapter)], 3, &slots, rows, &expected, op, act)
}

/// What an adapter does to tokens' rows and logits.
fn tokens(backend: &dyn GpuBackend, fixture: &Fixture, op: Op, act: DType) -> Result<Outcome> {
    let base = BaseModel::open(&fixture.base)?;
    let adapter = adapter::load(&fixture.dir, Some(&base))?;
    token_pool::fixture(backend, &base, adapter, &expectation(&fixture.expected)?, op, act)
}

/// Seven adapters in one batch of 33 rows, base rows and padding among them.
fn batch_mixed(backend: &dyn GpuBackend, folder: &Path, fixture: &Fixture, op: Op, act: DType) -> Result<Outcome> {
    let expected = expectation(&fixture.expected)?;
    let base = BaseModel::open(&fixture.base)?;
    let path = fixture.dir.join("meta.json");
    let text = std::fs::read_to_string(&path).map_err(|source| io(&path, source))?;
    let meta: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| Error::Input(format!("{}: {e}", path.display())))?;
    let names = meta["adapters_in_slot_order"].as_array().into_iter().flatten().filter_map(|name| name.as_str());
    let adapters: Vec<Adapter> =
        names.map(|name| adapter::load(folder.join(name), Some(&base))).collect::<Result<_>>()?;
    let placed: Vec<(u32, &Adapter)> = (0..).zip(&adapters).collect();
    let slots: Vec<i32> = expected.slots.iter().flatten().map(|slot| *slot as i32).collect();
    let count = adapters.len() as u32;
    let mut outcome = compare(backend, &base, &placed, count, &slots, slots.len(), &expected, op, act)?;
    if let Outcome::Checked(check) = &mut outcome {
        check.merge(parts(backend, &base, &placed, &slots, &expected, op, act)?);
    }
    Ok(outcome)
}

/// x and y of every site for rows that repeat the file's; made up where the file has none.
fn activations(
    spec: &PoolSpec,
    expected: &Expectation,
    rows: usize,
    file_rows: usize,
    act: DType,
) -> (Vec<Vec<f32>>, Vec<Vec<u8>>) {
    let mut dice = Dice::new(42);
    let mut part = |site: &SiteSpec, part: usize, width: u32| -> Vec<f32> {
        // Tables of tokens have trials of their own.
        if site.kind != SiteKind::Linear {
            return Vec::new();
        }
        let truth = expected.modules.get(&*site.id.path).and_then(|module| module[part].as_ref());
        let width = width as usize;
        let mut value = |row: usize, column: usize| match truth {
            Some(truth) => truth.values[row % file_rows * width + column] as f32,
            None => dice.unit(),
        };
        let values = (0..rows).flat_map(|row| (0..width).map(move |column| (row, column)));
        values.map(|(row, column)| act.round(value(row, column))).collect()
    };
    let x = spec.sites.iter().map(|site| part(site, 0, site.in_features)).collect();
    let y = spec.sites.iter().map(|site| {
        let mut bytes = Vec::new();
        act.encode(&part(site, 1, site.out_features), &mut bytes);
        bytes
    });
    let y = y.collect();
    (x, y)
}

/// Applies the adapters and compares every element of every site.
#[allow(clippy::too_many_arguments)]
fn compare(
    backend: &dyn GpuBackend,
    base: &BaseModel,
    adapters: &[(u32, &Adapter)],
    slot_count: u32,
    slots: &[i32],
    file_rows: usize,
    expected: &Expectation,
    op: Op,
    act: DType,
) -> Result<Outcome> {
    let max_rank = adapters.iter().map(|(_, adapter)| adapter.max_rank()).max().unwrap_or(1);
    let spec = spec(base, max_rank, slot_count, act);
    let (x, y) = activations(&spec, expected, slots.len(), file_rows, act);
    let rows: Vec<RowRef> = slots.iter().map(|slot| RowRef { slot: *slot, scale: 1.0 }).collect();
    let mut bench = Bench::new(backend, spec.clone(), act, Plan::new(rows.clone()).capacity(), None)?;
    for (slot, adapter) in adapters {
        bench.put(*slot, Some(adapter))?;
    }
    let io = bench.io(rows, x, y, Place::Apart)?;
    let outputs = bench.run(op, &io)?;
    let mut compared = std::cell::Cell::new(0u64);
    let check = bench.check_against(&io, &outputs, |site, row, oracle| {
        let module = expected.modules.get(&*spec.sites[site].id.path);
        let (Some([_, Some(y_base), Some(y), _]), DType::F32) = (module, act) else { return oracle };
        // PEFT's own value. Its y_base is f64: rounding it to f32 moves the result by as much.
        let at = row % file_rows * y.width..(row % file_rows + 1) * y.width;
        let moved = y_base.values[at.clone()].iter().map(|y| (y - f64::from(*y as f32)).abs());
        compared.set(compared.get() + at.len() as u64);
        Expected {
            bound: oracle.bound.iter().zip(moved).map(|(bound, moved)| bound + moved).collect(),
            want: y.values[at].to_vec(),
        }
    });
    if act == DType::F32 && *compared.get_mut() == 0 {
        return Err(Error::Input("no output of PEFT's was compared: the file and the adapter share no module".into()));
    }
    Ok(Outcome::Checked(check))
}

/// The batch in parts of 1, 2 and 7 rows, and shuffled: each row's bits are those of the whole batch.
fn parts(
    backend: &dyn GpuBackend,
    base: &BaseModel,
    adapters: &[(u32, &Adapter)],
    slots: &[i32],
    expected: &Expectation,
    op: Op,
    act: DType,
) -> Result<Check> {
    let max_rank = adapters.iter().map(|(_, adapter)| adapter.max_rank()).max().unwrap_or(1);
    // Only the sites with outputs: the others have been compared.
    let mut spec = spec(base, max_rank, adapters.len() as u32, act);
    spec.sites.retain(|site| expected.modules.contains_key(&*site.id.path));
    let sites = spec.sites.clone();
    let adapters: Vec<(u32, Adapter)> = adapters
        .iter()
        .map(|(slot, adapter)| {
            let pairs = adapter.pairs.iter().filter(|p| sites.iter().any(|s| s.id.path == p.site.path));
            (*slot, Adapter::from_pairs(pairs.cloned().collect()))
        })
        .collect();
    let count = slots.len();
    let (x, y) = activations(&spec, expected, count, count, act);
    let whole: Vec<RowRef> = slots.iter().map(|slot| RowRef { slot: *slot, scale: 1.0 }).collect();
    let mut bench = Bench::new(backend, spec, act, Plan::new(whole.clone()).capacity(), None)?;
    for (slot, adapter) in &adapters {
        bench.put(*slot, Some(adapter))?;
    }
    let pick = |order: &[usize]| -> Result<Vec<Vec<Vec<u8>>>> {
        let size = act.size() as usize;
        let wide = |width: u32| width as usize;
        let rows = order.iter().map(|row| whole[*row]).collect();
        let x = x.iter().zip(&sites).map(|(x, site)| {
            order.iter().flat_map(|r| x[r * wide(site.in_features)..][..wide(site.in_features)].to_vec()).collect()
        });
        let y = y.iter().zip(&sites).map(|(y, site)| {
            let width = wide(site.out_features) * size;
            order.iter().flat_map(|r| y[r * width..][..width].to_vec()).collect()
        });
        let io = bench.io(rows, x.collect(), y.collect(), Place::Apart)?;
        let memory = bench.run(op, &io)?;
        let row = |site: usize, row: usize| {
            memory[io.memory_of(site)][io.range(site, row, wide(sites[site].out_features))].to_vec()
        };
        Ok((0..sites.len()).map(|site| (0..order.len()).map(|i| row(site, i)).collect()).collect())
    };
    let all: Vec<usize> = (0..count).collect();
    let want = pick(&all)?;
    let mut orders: Vec<Vec<usize>> = [1, 2, 7].iter().flat_map(|n| all.chunks(*n)).map(<[usize]>::to_vec).collect();
    orders.push((0..count).map(|i| (i * 5 + 2) % count).collect());
    orders.push(all.iter().rev().copied().collect());
    let mut check = Check::default();
    for order in orders {
        for (site, got) in pick(&order)?.iter().enumerate() {
            for (row, got) in order.iter().zip(got) {
                let name = format!("{} in a batch of {}", sites[site].id.path, order.len());
                check.bits(&name, *row, act, &want[site][*row], got);
            }
        }
    }
    Ok(check)
}
