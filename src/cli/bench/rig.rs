//! A pool full of synthetic adapters, activations, and the clock.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lorapool::adapter::{LoraModule, SiteId};
use lorapool::backend::{DeviceClass, GpuBackend, Graph, Product, Ticket};
use lorapool::conformance::Dice;
use lorapool::ops::{Applier, Matrix, Op, Output};
use lorapool::pool::{Cell, Part, Plan, Pool, PoolSpec, SiteSpec};
use lorapool::{DType, Region, Result};

use super::case::Case;

/// Bytes of each side of the copy that bandwidth is measured with, at most.
const COPY: u64 = 4 << 30;
/// Bytes of synthetic weights that are made on the host; matrices begin anywhere in them.
const WEIGHTS: usize = 16 << 20;
/// A burst of replays lasts about this long, so that waiting for its end is no part of the time.
const BURST: Duration = Duration::from_millis(8);
/// Bursts end after this much time, once there are a few.
const PATIENCE: Duration = Duration::from_secs(20);
/// The least number of bursts.
const LEAST: usize = 3;
/// Rank of the small adapter.
const SMALL_RANK: u32 = 8;

/// Width of a group's input, and widths of its outputs.
type Widths = (u32, Vec<u32>);

/// Sites of Llama-3.1-8B, all layers.
pub fn llama(layers: usize) -> Vec<SiteSpec> {
    let shapes = [
        ("self_attn.q_proj", 4096, 4096),
        ("self_attn.k_proj", 4096, 1024),
        ("self_attn.v_proj", 4096, 1024),
        ("self_attn.o_proj", 4096, 4096),
        ("mlp.gate_proj", 4096, 14336),
        ("mlp.up_proj", 4096, 14336),
        ("mlp.down_proj", 14336, 4096),
    ];
    let site = |layer: usize| {
        move |(path, in_features, out_features)| {
            SiteSpec::linear(SiteId::from_path(&format!("model.layers.{layer}.{path}")), in_features, out_features)
        }
    };
    (0..layers).flat_map(|layer| shapes.map(site(layer))).collect()
}

/// Times of one piece of work, sorted.
#[derive(Clone, Debug)]
pub struct Times {
    /// Microseconds.
    pub micros: Vec<f64>,
    /// Replays that each of them is the mean of.
    pub burst: usize,
}

impl Times {
    /// The time that a part `share` of all lies below.
    pub fn quantile(&self, share: f64) -> f64 {
        let last = self.micros.len().saturating_sub(1);
        self.micros.get((last as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
    }
}

/// Times `samples` bursts of what `send` submits, after a warm-up.
pub fn time(gpu: &dyn GpuBackend, send: &dyn Fn() -> Result<Ticket>, samples: usize) -> Result<Times> {
    let burst = |count: usize| -> Result<Duration> {
        let start = Instant::now();
        let mut last = None;
        for _ in 0..count {
            last = Some(send()?);
        }
        last.map_or(Ok(()), |ticket| gpu.wait(ticket))?;
        Ok(start.elapsed())
    };
    burst(1)?;
    let once = burst(2)?.div_f64(2.0).max(Duration::from_nanos(1));
    let count = (BURST.as_secs_f64() / once.as_secs_f64()).ceil().clamp(1.0, 64.0) as usize;
    burst(count)?;
    let start = Instant::now();
    let mut micros = Vec::with_capacity(samples);
    while micros.len() < samples && (micros.len() < LEAST || start.elapsed() < PATIENCE) {
        micros.push(burst(count)?.as_secs_f64() * 1e6 / count as f64);
    }
    micros.sort_unstable_by(f64::total_cmp);
    Ok(Times { micros, burst: count })
}

/// Bytes read and written per second by the device's own copy of a large region: the most that any kernel
/// that moves bytes can hope for. And the bytes of the region.
pub fn copy_bandwidth(gpu: &dyn GpuBackend, samples: usize) -> Result<(f64, u64)> {
    let caps = gpu.caps();
    // A host's memory is not ours to fill.
    let share = match caps.class {
        DeviceClass::Discrete | DeviceClass::Other => caps.memory / 8,
        _ => 256 << 20,
    };
    let len = COPY.min(caps.max_alloc / 4096 * 4096).min(share.max(64 << 20));
    let (from, to) = (gpu.alloc(len, "copy source")?, gpu.alloc(len, "copy target")?);
    let block = random(DType::F32, (len.min(WEIGHTS as u64) / 4) as usize, 1.0, 7);
    fill(gpu, &from, &block)?;
    // Not from a graph: a driver may give a graph's copies to a slower engine.
    let copy = || gpu.submit(&mut |encoder| encoder.copy(&to, &from));
    let times = time(gpu, &copy, samples.clamp(3, 10))?;
    Ok((2.0 * len as f64 / times.quantile(0.5) * 1e6, len))
}

/// `count` values up to `scale`, encoded.
pub fn random(dtype: DType, count: usize, scale: f32, seed: u64) -> Vec<u8> {
    let mut dice = Dice::new(seed);
    let values: Vec<f32> = (0..count).map(|_| dice.unit() * scale).collect();
    let mut bytes = Vec::with_capacity(count * dtype.size() as usize);
    dtype.encode(&values, &mut bytes);
    bytes
}

/// Fills a region with a block, over and over: one write, then copies of what is there.
pub fn fill(gpu: &dyn GpuBackend, region: &Region, block: &[u8]) -> Result<()> {
    let first = (block.len() as u64).min(region.len()) / 4 * 4;
    gpu.submit(&mut |encoder| {
        encoder.write(&region.slice(0, first)?, &block[..first as usize])?;
        let mut done = first;
        while done < region.len() && first > 0 {
            let len = done.min(region.len() - done) / 4 * 4;
            if len == 0 {
                break;
            }
            encoder.copy(&region.slice(done, len)?, &region.slice(0, len)?)?;
            done += len;
        }
        Ok(())
    })?;
    Ok(())
}

/// Memory of `rows` rows of `width` elements without padding, filled.
pub fn matrix(gpu: &dyn GpuBackend, rows: u64, width: u32, act: DType, label: &str) -> Result<Region> {
    let region = gpu.alloc((rows * u64::from(width) * act.size()).next_multiple_of(4), label)?;
    fill(gpu, &region, &random(act, 1 << 20, 1.0, width.into()))?;
    Ok(region)
}

/// Activations of `rows` rows, filled.
pub fn activations(gpu: &dyn GpuBackend, rows: u32, width: u32, act: DType) -> Result<Matrix> {
    Ok(Matrix::new(matrix(gpu, rows.into(), width, act, "activations")?, width))
}

/// A pool whose slots all hold synthetic adapters of its largest rank.
#[derive(Debug)]
pub struct Rig {
    gpu: Arc<dyn GpuBackend>,
    pool: Pool,
    act: DType,
}

impl Rig {
    /// Allocates and fills.
    pub fn new(gpu: &Arc<dyn GpuBackend>, sites: Vec<SiteSpec>, rank: u32, slots: u32, dtype: DType) -> Result<Self> {
        let pool = Pool::new(&**gpu, PoolSpec { sites, max_rank: rank, max_loras: slots, dtype, vectors: false })?;
        let block = random(dtype, WEIGHTS / dtype.size() as usize, 0.05, 11);
        let mut at = 0;
        let sites = pool.sites().len();
        let parts = || (0..sites).flat_map(|site| [(site, Part::A), (site, Part::B)]);
        for (site, part) in parts() {
            let region = pool.part(0, site, part)?;
            let len = region.len() as usize;
            if len <= block.len() {
                // Another begin for each matrix; 16-byte steps keep whole elements.
                at = (at + 48_271 * 16) % (block.len() - len + 1) / 16 * 16;
                gpu.submit(&mut |encoder| encoder.write(&region, &block[at..at + len]))?;
            } else {
                fill(&**gpu, &region, &block)?;
            }
        }
        for slot in 1..slots {
            gpu.submit(&mut |encoder| {
                parts().try_for_each(|(site, part)| {
                    encoder.copy(&pool.part(slot, site, part)?, &pool.part(0, site, part)?)
                })
            })?;
        }
        let rig = Self { gpu: gpu.clone(), pool, act: dtype };
        for slot in 0..slots {
            rig.publish(slot, false)?;
        }
        Ok(rig)
    }

    /// Bytes of the pool.
    pub fn pool_bytes(&self) -> u64 {
        self.pool.bytes()
    }

    /// Makes `slot` hold its full adapter, or the small one.
    fn publish(&self, slot: u32, small: bool) -> Result<()> {
        let full = self.pool.spec().max_rank;
        let cells: Vec<Cell> = self
            .pool
            .sites()
            .iter()
            .enumerate()
            .map(|(site, spec)| match small && spec.id.module != LoraModule::OProj {
                true => Ok(Cell::EMPTY),
                false => Ok(Cell {
                    a: self.pool.part(slot, site, Part::A)?.ptr(),
                    b: self.pool.part(slot, site, Part::B)?.ptr(),
                    rank: if small { SMALL_RANK.min(full) } else { full },
                    scale: 1e-3,
                    vectors: false,
                }),
            })
            .collect::<Result<_>>()?;
        self.pool.publish(&*self.gpu, slot, &cells, 1e-3, &mut |_| Ok(()))?;
        Ok(())
    }

    /// Fewest bytes that the case's step moves: weights of the adapters used and activations read, outputs
    /// read and written, each once.
    fn floor_bytes(&self, case: &Case, slots: &[i32]) -> (u64, u32) {
        let mut used = slots.to_vec();
        used.sort_unstable();
        used.dedup();
        let last = case.adapters as i32 - 1;
        let small = u64::from(case.small_last && used.contains(&last));
        let full = used.len() as u64 - small;
        let element = self.act.size();
        let mut bytes = 0;
        let rows = u64::from(case.rows);
        for group in self.pool.spec().groups() {
            bytes += rows * u64::from(self.pool.sites()[group[0]].in_features) * element;
        }
        for site in self.pool.sites() {
            let both = u64::from(site.in_features) + u64::from(site.out_features);
            let o = site.id.module == LoraModule::OProj;
            let ranks = full * u64::from(case.rank) + if o { small * u64::from(SMALL_RANK) } else { 0 };
            bytes += ranks * both * element;
            let untouched = if o { 0 } else { slots.iter().filter(|s| small > 0 && **s == last).count() as u64 };
            bytes += 2 * (rows - untouched) * u64::from(site.out_features) * element;
        }
        (bytes, used.len() as u32)
    }

    /// Captures one step of `case`, every site in one graph. Its small adapter, if it has one, is in its slot from
    /// then on, until [`Rig::run`] has timed the step.
    pub fn prepare(&self, case: &Case, seed: u64) -> Result<Step> {
        let slots = case.slots(seed);
        let plan = Plan::from_slots(slots.iter().copied());
        let applier = Applier::new(&*self.gpu, &self.pool, self.act, plan.capacity())?;
        if case.small_last {
            self.publish(case.adapters - 1, true)?;
        }
        let graph = record(&*self.gpu, &self.pool, &applier, case.op, &plan)?;
        self.gpu.submit(&mut |encoder| applier.write_batch(encoder, &plan, plan.capacity()))?;
        let (floor_bytes, adapters) = self.floor_bytes(case, &slots);
        Ok(Step { graph, floor_bytes, adapters, expert_pairs: None })
    }

    /// Times one step of `case`.
    pub fn run(&self, case: &Case, samples: usize, seed: u64) -> Result<(Times, Step)> {
        let step = self.prepare(case, seed)?;
        let times = time(&*self.gpu, &|| step.graph.replay(), samples)?;
        if case.small_last {
            self.publish(case.adapters - 1, false)?;
        }
        Ok((times, step))
    }
}

/// A captured step.
#[derive(Debug)]
pub struct Step {
    /// Its work.
    pub graph: Box<dyn Graph>,
    /// The fewest bytes that it can move.
    pub floor_bytes: u64,
    /// Adapters that its batch has.
    pub adapters: u32,
    /// Different pairs of an adapter and an expert that its rows have, over all routed layers.
    pub expert_pairs: Option<u64>,
}

/// Times the base model's own products at `sites` for `rows` rows by the vendor's matrix library, in one captured graph.
/// All layers share one layer's weights: more than a cache keeps until the next layer.
///
/// # Errors
/// [`Error::Unavailable`](lorapool::Error::Unavailable) where there is no such library.
pub fn base(gpu: &dyn GpuBackend, sites: &[SiteSpec], rows: u32, act: DType, samples: usize) -> Result<Times> {
    let matrix = |rows: u32, width: u32| matrix(gpu, rows.into(), width, act, "base model");
    let mut weights: BTreeMap<&LoraModule, Region> = BTreeMap::new();
    let mut activations: BTreeMap<(bool, u32), Region> = BTreeMap::new();
    for site in sites {
        if !weights.contains_key(&site.id.module) {
            weights.insert(&site.id.module, matrix(site.out_features, site.in_features)?);
        }
        for key in [(false, site.in_features), (true, site.out_features)] {
            if let Entry::Vacant(vacant) = activations.entry(key) {
                vacant.insert(matrix(rows, key.1)?);
            }
        }
    }
    let count = [rows];
    let product = |site: &SiteSpec| {
        let (in_features, out_features) = (site.in_features, site.out_features);
        let (x, y) = (activations.get(&(false, in_features))?, activations.get(&(true, out_features))?);
        Some(Product { rows: &count, in_features, out_features, x, w: weights.get(&site.id.module)?, y })
    };
    let products: Vec<Product<'_>> = sites.iter().filter_map(product).collect();
    let graph = gpu.capture_products(act, &products)?;
    time(gpu, &|| graph.replay(), samples)
}

/// Records a step over all sites of a pool. Layers share activations: a model's are no larger than one layer's either.
pub fn record(gpu: &dyn GpuBackend, pool: &Pool, applier: &Applier, op: Op, plan: &Plan) -> Result<Box<dyn Graph>> {
    let act = applier.act();
    let rows = plan.capacity().rows;
    let mut kept: Vec<(Widths, Vec<Matrix>)> = Vec::new();
    let mut groups = Vec::new();
    for group in pool.spec().groups() {
        let sites = pool.sites();
        let shape: (u32, Vec<u32>) =
            (sites[group[0]].in_features, group.iter().map(|s| sites[*s].out_features).collect());
        let at = match kept.iter().position(|(known, _)| *known == shape) {
            Some(at) => at,
            None => {
                let widths = [shape.0].into_iter().chain(shape.1.iter().copied());
                let matrices = widths.map(|width| activations(gpu, rows, width, act)).collect::<Result<_>>()?;
                kept.push((shape, matrices));
                kept.len() - 1
            }
        };
        groups.push((group, at));
    }
    gpu.capture(&mut |encoder| {
        groups.iter().try_for_each(|(group, at)| {
            let matrices = &kept[*at].1;
            let outputs: Vec<Output<'_>> =
                group.iter().zip(&matrices[1..]).map(|(site, y)| Output { site: *site, y }).collect();
            applier.encode(encoder, pool, op, plan.capacity(), &matrices[0], &outputs)
        })
    })
}
