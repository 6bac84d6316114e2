//! One step of a host engine: every site of the model, recorded once for each op, replayed at will.
//!
//! Each group of sites that share an input has an x of its own, each site a y of its own, so that every
//! element can be checked after one replay. Where that is more memory than a check should take, the step
//! is cut into waves that use the same memory one after the other.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lorapool::backend::{GpuBackend, Graph};
use lorapool::ops::{Applier, Matrix, Op, Output};
use lorapool::pool::{Capacity, Plan, Pool};
use lorapool::{DType, Error, Region, Result};

/// Activations that one wave may take, in bytes.
const WAVE_BYTES: u64 = 512 << 20;
/// Steps before the clock starts.
const WARM_UP: usize = 3;
/// No step is started after this much time, once the least number is done.
const PATIENCE: Duration = Duration::from_secs(2);
/// The least number of steps that a median is taken of.
const LEAST: usize = 5;

/// Sites that read one input.
#[derive(Debug)]
pub struct Group {
    /// Input rows.
    pub x: Matrix,
    /// Pool index and output rows of each site.
    pub sites: Vec<(usize, Matrix)>,
}

/// Groups whose activations are in memory at once.
#[derive(Debug)]
struct Wave {
    groups: Vec<Group>,
    graphs: Vec<(Op, Box<dyn Graph>)>,
}

/// A recorded step.
#[derive(Debug)]
pub struct Step {
    gpu: Arc<dyn GpuBackend>,
    applier: Applier,
    waves: Vec<Wave>,
}

impl Step {
    /// Allocates activations and records all sites of `pool` with each op, for batches as large as that
    /// op's plan. What pool and batch hold is not recorded.
    pub fn new(gpu: &Arc<dyn GpuBackend>, pool: &Pool, act: DType, plans: &[(Op, Plan)]) -> Result<Self> {
        let most = |of: fn(Capacity) -> u32| plans.iter().map(|(_, plan)| of(plan.capacity())).max().unwrap_or(0);
        let capacity = Capacity { rows: most(|c| c.rows), tiles: most(|c| c.tiles), packs: most(|c| c.packs) };
        let applier = Applier::new(&**gpu, pool, act, capacity)?;
        let bytes = |width: u32| (u64::from(capacity.rows) * u64::from(width) * act.size()).next_multiple_of(4);
        let site = |index: usize| &pool.sites()[index];
        let need = |group: &[usize]| {
            let outputs: u64 = group.iter().map(|s| bytes(site(*s).out_features)).sum();
            bytes(site(group[0]).in_features) + outputs
        };
        let mut cut: Vec<Vec<Vec<usize>>> = Vec::new();
        let mut used = 0;
        for group in pool.spec().groups() {
            let need = need(&group);
            match cut.last_mut() {
                Some(wave) if used + need <= WAVE_BYTES => {
                    used += need;
                    wave.push(group);
                }
                _ => {
                    used = need;
                    cut.push(vec![group]);
                }
            }
        }
        let mut memory = Memory { gpu, free: HashMap::new() };
        let mut waves = Vec::new();
        for groups in cut {
            let mut taken = Vec::new();
            let mut matrix = |width: u32, label: &str| -> Result<Matrix> {
                let region = memory.take(bytes(width), label)?;
                taken.push(region.clone());
                Ok(Matrix::new(region, width))
            };
            let groups: Vec<Group> = groups
                .into_iter()
                .map(|group| {
                    let x = matrix(site(group[0]).in_features, "x")?;
                    let sites: Result<_> =
                        group.into_iter().map(|s| Ok((s, matrix(site(s).out_features, "y")?))).collect();
                    Ok(Group { x, sites: sites? })
                })
                .collect::<Result<_>>()?;
            let record = |(op, plan): &(Op, Plan)| {
                let graph = record(&**gpu, &applier, pool, *op, plan.capacity(), &groups)?;
                Ok((*op, graph))
            };
            let graphs = plans.iter().map(record).collect::<Result<_>>()?;
            waves.push(Wave { groups, graphs });
            memory.give_back(taken);
        }
        Ok(Self { gpu: gpu.clone(), applier, waves })
    }

    /// Type of x and y.
    pub fn act(&self) -> DType {
        self.applier.act()
    }

    /// Makes `plan`, the one that an op's step was recorded for, the batch that its replays serve.
    pub fn set_batch(&self, plan: &Plan) -> Result<()> {
        self.gpu.submit(&mut |encoder| self.applier.write_batch(encoder, plan, plan.capacity()))?;
        Ok(())
    }

    /// Runs the step once, a wave at a time: `before` fills a wave's groups, `after` looks at them.
    pub fn run(
        &self,
        op: Op,
        mut before: impl FnMut(&Group) -> Result<()>,
        mut after: impl FnMut(&Group) -> Result<()>,
    ) -> Result<()> {
        for wave in &self.waves {
            wave.groups.iter().try_for_each(&mut before)?;
            wave.graph(op)?.replay()?;
            wave.groups.iter().try_for_each(&mut after)?;
        }
        Ok(())
    }

    /// Median time of a whole step, from its first replay to the device's word that all is done.
    pub fn time(&self, op: Op, steps: usize) -> Result<Duration> {
        let graphs: Vec<&dyn Graph> = self.waves.iter().map(|w| w.graph(op)).collect::<Result<_>>()?;
        let step = || -> Result<Duration> {
            let start = Instant::now();
            let mut last = None;
            for graph in &graphs {
                last = Some(graph.replay()?);
            }
            last.map_or(Ok(()), |ticket| self.gpu.wait(ticket))?;
            Ok(start.elapsed())
        };
        let start = Instant::now();
        for _ in 0..WARM_UP {
            step()?;
        }
        let mut times = Vec::with_capacity(steps);
        while times.len() < steps && (times.len() < LEAST || start.elapsed() < PATIENCE) {
            times.push(step()?);
        }
        times.sort_unstable();
        Ok(times.get(times.len() / 2).copied().unwrap_or_default())
    }
}

impl Wave {
    fn graph(&self, op: Op) -> Result<&dyn Graph> {
        let graph = self.graphs.iter().find(|(recorded, _)| *recorded == op);
        graph.map(|(_, graph)| &**graph).ok_or_else(|| Error::Input(format!("no graph for {}", op.name())))
    }
}

fn record(
    gpu: &dyn GpuBackend,
    applier: &Applier,
    pool: &Pool,
    op: Op,
    capacity: Capacity,
    groups: &[Group],
) -> Result<Box<dyn Graph>> {
    gpu.capture(&mut |encoder| {
        groups.iter().try_for_each(|group| {
            let outputs: Vec<Output<'_>> = group.sites.iter().map(|(site, y)| Output { site: *site, y }).collect();
            applier.encode(encoder, pool, op, capacity, &group.x, &outputs)
        })
    })
}

/// Activation memory, used again by later waves.
struct Memory<'a> {
    gpu: &'a Arc<dyn GpuBackend>,
    free: HashMap<u64, Vec<Region>>,
}

impl Memory<'_> {
    fn take(&mut self, len: u64, label: &str) -> Result<Region> {
        match self.free.get_mut(&len).and_then(Vec::pop) {
            Some(region) => Ok(region),
            None => self.gpu.alloc(len, label),
        }
    }

    fn give_back(&mut self, regions: Vec<Region>) {
        for region in regions {
            self.free.entry(region.len()).or_default().push(region);
        }
    }
}
