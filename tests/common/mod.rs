//! A small model, adapters for it, and a manager on a backend: what the lifecycle tests share.

#![allow(dead_code)] // Each test file uses its own part.

use std::sync::Arc;

use lorapool::DType;
use lorapool::adapter::{Adapter, HostMatrix, HostPair, LoraModule, SiteId};
use lorapool::backend::{GpuBackend, open};
use lorapool::manager::{AdapterManager, LoraAdapterInput, LoraWeights, Options, SlotRef};
use lorapool::ops::{Applier, Matrix, Op, Output};
use lorapool::pool::{Plan, PoolSpec, SiteSpec};

/// Width of every input and output.
pub const WIDTH: u32 = 40;

/// q, k and v of one layer.
pub fn sites() -> Vec<SiteId> {
    let modules = [LoraModule::QProj, LoraModule::KProj, LoraModule::VProj];
    let path = |module: &LoraModule| format!("model.layers.0.self_attn.{module}").into();
    modules.into_iter().map(|module| SiteId { layer: 0, path: path(&module), module }).collect()
}

/// A pool for that model.
pub fn spec(max_loras: u32) -> PoolSpec {
    let sites = sites().into_iter().map(|id| SiteSpec::linear(id, WIDTH, WIDTH)).collect();
    PoolSpec { sites, max_rank: 8, max_loras, dtype: DType::F32, vectors: true }
}

fn matrix(rows: usize, cols: usize, seed: u64) -> HostMatrix {
    let value = |i: usize| ((i as u64 * 37 + seed * 101 + (seed * i as u64) % 13) % 61) as f32 / 64.0 - 0.5;
    let bytes = (0..rows * cols).flat_map(|i| value(i).to_le_bytes()).collect();
    HostMatrix { dtype: DType::F32, rows, cols, bytes }
}

/// An adapter over `sites`, told apart by `seed`.
pub fn adapter(sites: &[SiteId], rank: usize, seed: u64) -> Adapter {
    let pair = |site: &SiteId| {
        HostPair::new(
            site.clone(),
            matrix(rank, WIDTH as usize, seed),
            matrix(WIDTH as usize, rank, seed + 7),
            1.0 + seed as f32,
        )
    };
    Adapter::from_pairs(sites.iter().map(pair).collect())
}

/// A manager over a small pool.
#[derive(Debug)]
pub struct Rig {
    pub manager: Arc<AdapterManager>,
}

impl Rig {
    /// `slots` vacant slots on the CPU.
    pub fn new(slots: u32, options: Options) -> Self {
        Self::with_pinned(&[], slots, options)
    }

    /// The same with adapters, by name and seed, of the start.
    pub fn with_pinned(adapters: &[(&str, u64)], slots: u32, options: Options) -> Self {
        Self::on(open("cpu", 0).unwrap(), adapters, slots, options)
    }

    /// The same on any backend.
    pub fn on(gpu: Arc<dyn GpuBackend>, adapters: &[(&str, u64)], slots: u32, options: Options) -> Self {
        let loaded: Vec<_> = adapters.iter().map(|(name, seed)| (*name, adapter(&sites(), 4, *seed))).collect();
        let inputs: Vec<_> = loaded.iter().map(|(name, adapter)| LoraAdapterInput { name, adapter }).collect();
        let weights = LoraWeights::load(&gpu, spec(slots), &inputs).unwrap();
        Self { manager: AdapterManager::new(weights, options).unwrap() }
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        WIDTH as usize
    }

    /// What each row of `plan` gets added at q_proj, for inputs of ones and outputs of zeros.
    pub fn run(&self, plan: &Plan) -> Vec<Vec<f32>> {
        let (gpu, pool) = (self.manager.gpu(), self.manager.pool());
        let applier = Applier::new(&**gpu, pool, DType::F32, plan.capacity()).unwrap();
        let bytes = plan.rows().len() as u64 * u64::from(WIDTH) * 4;
        let x = Matrix::new(gpu.alloc(bytes, "x").unwrap(), WIDTH);
        let y = Matrix::new(gpu.alloc(bytes, "y").unwrap(), WIDTH);
        let ones: Vec<u8> = std::iter::repeat_n(1f32.to_le_bytes(), bytes as usize / 4).flatten().collect();
        gpu.submit(&mut |encoder| {
            encoder.write(x.region(), &ones)?;
            applier.write_batch(encoder, plan, plan.capacity())?;
            applier.encode(encoder, pool, Op::Bgmv, plan.capacity(), &x, &[Output { site: 0, y: &y }])
        })
        .unwrap();
        let values = DType::F32.decode(&gpu.read(y.region()).unwrap());
        values.chunks(WIDTH as usize).map(<[f32]>::to_vec).collect()
    }

    /// What one row gets added.
    pub fn row(&self, slot: SlotRef) -> Vec<f32> {
        let step = self.manager.step();
        let plan = step.plan([(slot, 1.0)]).unwrap();
        self.run(&plan).remove(0)
    }

    /// What a row gets from the adapter of this seed alone in a pool of one slot.
    pub fn alone(&self, seed: u64) -> Vec<f32> {
        let rig = Rig::on(self.manager.gpu().clone(), &[("alone", seed)], 1, Options::default());
        rig.row(SlotRef::Active)
    }

    /// Identity of the adapter of this seed.
    pub fn id(&self, seed: u64) -> u64 {
        let digest = adapter(&sites(), 4, seed).digest;
        u64::from_le_bytes(digest[..8].try_into().unwrap()).max(1)
    }
}

/// Every backend that opens here. One that `REQUIRE_BACKENDS` names must.
pub fn backends() -> Vec<Arc<dyn GpuBackend>> {
    let required = std::env::var("REQUIRE_BACKENDS").unwrap_or_default();
    let required: Vec<&str> = required.split(',').collect();
    let open_one = |name: &'static str| match open(name, 0) {
        Ok(gpu) => Some(gpu),
        Err(error) if required.contains(&name) => panic!("{name} is required: {error}"),
        Err(error) => {
            eprintln!("skipped {name}: {error}");
            None
        }
    };
    lorapool::backend::names().into_iter().filter_map(open_one).collect()
}
