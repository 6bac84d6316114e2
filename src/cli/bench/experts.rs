//! A pool full of synthetic experts, and a step over all routed layers.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use lorapool::adapter::{Adapter, ExpertLinear, ExpertPair, HostMatrix};
use lorapool::backend::{Encoder, GpuBackend};
use lorapool::ops::{Applier, ExpertApplier, ExpertInput, Experts, Matrix, Op, Output, Routing};
use lorapool::pool::{ExpertPool, ExpertSpec, Plan, Pool, PoolSpec, SlotImage};
use lorapool::{DType, Error, Region, Result};

use super::case::Case;
use super::rig::{self, Step, Times};
use super::routed::{Layer, Load, Routed, Routes};

/// Bytes of the block that the pool is filled with, over and over.
const BLOCK: usize = 16 << 20;

/// A pool whose slots all hold adapters of every expert of every routed layer.
#[derive(Debug)]
pub struct ExpertRig {
    gpu: Arc<dyn GpuBackend>,
    pool: Pool,
    routed: Routed,
    act: DType,
}

/// Activations by what they are to a layer: whether they are of a linear that reads rows, 0 for its input or the number of
/// its output counted from 1, and width.
type Activations = BTreeMap<(bool, usize, u32), Matrix>;

/// A layer's routing in device memory.
struct Route {
    rows: u32,
    experts: Region,
    places: Option<Region>,
}

impl ExpertRig {
    /// Allocates and fills.
    pub fn new(gpu: &Arc<dyn GpuBackend>, routed: &Routed, rank: u32, slots: u32, dtype: DType) -> Result<Self> {
        let adapter = adapter(routed, rank, dtype);
        let spec = ExpertSpec::for_adapters([&adapter], dtype)?;
        let none = PoolSpec { sites: Vec::new(), max_rank: 1, max_loras: slots, dtype, vectors: false };
        let pool = Pool::with_experts(&**gpu, none, spec)?;
        let image = SlotImage::new(&pool, &adapter)?;
        drop(adapter);
        let block = rig::random(dtype, BLOCK / dtype.size() as usize, 0.05, 11);
        pool.experts().into_iter().flat_map(ExpertPool::blocks).try_for_each(|all| rig::fill(&**gpu, all, &block))?;
        // What a slot holds is there already, so that only the tables are left to write.
        for slot in 0..slots {
            pool.publish_image(&**gpu, slot, &image, &mut |_| Ok(()))?;
        }
        Ok(Self { gpu: gpu.clone(), pool, routed: routed.clone(), act: dtype })
    }

    /// Bytes of the pool.
    pub fn pool_bytes(&self) -> u64 {
        self.experts().map_or(0, ExpertPool::bytes)
    }

    fn experts(&self) -> Result<&ExpertPool> {
        self.pool.experts().ok_or_else(|| Error::Input("the pool has no experts".into()))
    }

    /// Times one step of `case`.
    pub fn run(&self, case: &Case, samples: usize, seed: u64) -> Result<(Times, Step)> {
        let step = self.prepare(case, seed)?;
        let times = rig::time(&*self.gpu, &|| step.graph.replay(), samples)?;
        Ok((times, step))
    }

    /// Rows of each layer.
    fn rows(&self, case: &Case) -> Result<u32> {
        let (found, limit) = (u64::from(case.rows) * u64::from(self.routed.top_k), u64::from(u32::MAX / 8));
        let few = u32::try_from(found).ok().filter(|_| found <= limit);
        few.ok_or(Error::Limit { what: "tokens times experts a token", found, limit, hint: "" })
    }

    /// Captures one step of `case`: each routed layer's batch of rows, then its linears, all in one graph.
    pub fn prepare(&self, case: &Case, seed: u64) -> Result<Step> {
        let slots = case.slots(seed);
        let rows = self.rows(case)?;
        let drawn = self.routed.draw(case.rows, seed);
        let plan = Plan::from_slots(slots.iter().copied());
        let tokens = Applier::new(&*self.gpu, &self.pool, self.act, plan.capacity())?;
        let applier = ExpertApplier::new(&*self.gpu, self.experts()?, self.act, rows)?;
        let routes: Vec<Route> = drawn.iter().map(|routes| self.route(case.op, routes)).collect::<Result<_>>()?;
        let activations = self.activations(case.rows, rows)?;
        self.gpu.submit(&mut |encoder| tokens.write_batch(encoder, &plan, plan.capacity()))?;
        let graph = self.gpu.capture(&mut |encoder| {
            self.routed.layers.iter().zip(&routes).try_for_each(|(layer, route)| {
                self.encode(encoder, (&tokens, &plan), &applier, case.op, (layer, route), &activations)
            })
        })?;
        let mut used = slots.clone();
        used.sort_unstable();
        used.dedup();
        let (mut floor_bytes, mut expert_pairs) = (0, 0);
        for (layer, routes) in self.routed.layers.iter().zip(&drawn) {
            let pairs = routes.pairs(&slots);
            let load = Load { tokens: case.rows.into(), rows: rows.into(), pairs, rank: case.rank.into() };
            floor_bytes += layer.floor_bytes(load, self.act.size());
            expert_pairs += pairs;
        }
        Ok(Step { graph, floor_bytes, adapters: used.len() as u32, expert_pairs: Some(expert_pairs) })
    }

    /// Writes a layer's routing as the op's kernels are given it: in the order of tokens, or sorted by expert.
    fn route(&self, op: Op, routes: &Routes) -> Result<Route> {
        let send = |words: &[u32]| -> Result<Region> {
            let region = self.gpu.alloc(words.len() as u64 * 4, "routing")?;
            self.gpu.submit(&mut |encoder| encoder.write(&region, bytemuck::cast_slice(words)))?;
            Ok(region)
        };
        let rows = routes.experts.len() as u32;
        Ok(match op {
            Op::Bgmv => Route { rows, experts: send(&routes.experts)?, places: None },
            Op::Sgmv => {
                let (first, places) = routes.sorted();
                Route { rows, experts: send(&first)?, places: Some(send(&places)?) }
            }
        })
    }

    /// Inputs and outputs. Layers share them: a model's are no larger than one layer's either.
    fn activations(&self, tokens: u32, rows: u32) -> Result<Activations> {
        let mut all = Activations::new();
        for layer in &self.routed.layers {
            for (of_rows, linears) in [(false, &layer.of_tokens), (true, &layer.of_rows)] {
                let Some(first) = linears.first() else { continue };
                let outputs = linears.iter().enumerate().map(|(i, linear)| (i + 1, linear.out_features));
                for (i, width) in [(0, first.in_features)].into_iter().chain(outputs) {
                    let (count, width) = (if of_rows || i > 0 { rows } else { tokens }, width as u32);
                    if let Entry::Vacant(vacant) = all.entry((of_rows, i, width)) {
                        vacant.insert(rig::activations(&*self.gpu, count, width, self.act)?);
                    }
                }
            }
        }
        Ok(all)
    }

    /// Records one layer.
    fn encode(
        &self,
        encoder: &mut dyn Encoder,
        (tokens, plan): (&Applier, &Plan),
        applier: &ExpertApplier,
        op: Op,
        (layer, route): (&Layer, &Route),
        activations: &Activations,
    ) -> Result<()> {
        let (pool, capacity) = (self.experts()?, plan.capacity());
        let expert = match op {
            Op::Bgmv => Experts::ByRow(&route.experts),
            Op::Sgmv => Experts::Offsets(&route.experts),
        };
        let (experts, top_k, places) = (layer.experts, self.routed.top_k, route.places.as_ref());
        let routing = Routing { rows: route.rows, experts, top_k, expert, places };
        applier.encode_rows(encoder, op, pool, tokens, capacity, &routing)?;
        for (of_rows, linears) in [(false, &layer.of_tokens), (true, &layer.of_rows)] {
            let Some(first) = linears.first() else { continue };
            let matrix = |i: usize, width: usize| &activations[&(of_rows, i, width as u32)];
            let output = |(i, linear): (usize, &ExpertLinear)| {
                let site = pool.site_at(&linear.site.path)?;
                Some(Output { site, y: matrix(i + 1, linear.out_features) })
            };
            let outputs: Vec<Output<'_>> = linears.iter().enumerate().filter_map(output).collect();
            let x = matrix(0, first.in_features);
            let x = if of_rows { ExpertInput::Rows(x) } else { ExpertInput::Tokens(x) };
            applier.encode(encoder, pool, op, route.rows, capacity.rows, x, &outputs)?;
        }
        Ok(())
    }
}

/// An adapter with a pair for every expert of every linear, all zeros: its shapes are what matters.
fn adapter(routed: &Routed, rank: u32, dtype: DType) -> Adapter {
    let matrix = |rows: usize, cols: usize| {
        let bytes = vec![0; rows * cols * dtype.size() as usize];
        HostMatrix { dtype, rows, cols, bytes }
    };
    let pair = |linear: &ExpertLinear, expert: u32| ExpertPair {
        site: linear.site.clone(),
        expert,
        experts: linear.experts as u32,
        a: matrix(rank as usize, linear.in_features),
        b: matrix(linear.out_features, rank as usize),
        scale: 1e-3,
    };
    let pairs =
        |linear: &ExpertLinear| (0..linear.experts as u32).map(|expert| pair(linear, expert)).collect::<Vec<_>>();
    let mut adapter = Adapter::from_pairs(Vec::new());
    // No digest of gigabytes: nothing here asks for it.
    adapter.experts = routed.linears().flat_map(pairs).collect();
    adapter
}
