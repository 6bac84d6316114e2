//! What is timed: a model's linears, or its routed experts.

use std::sync::Arc;

use lorapool::backend::GpuBackend;
use lorapool::pool::SiteSpec;
use lorapool::{DType, Error, Result};

use super::super::failure::Failure;
use super::case::Case;
use super::experts::ExpertRig;
use super::products;
use super::rig::{self, Rig, Step, Times};
use super::routed::Routed;

/// What is timed.
#[derive(Clone, Debug)]
pub struct Shapes {
    /// What the shapes are called.
    pub name: String,
    /// The modules.
    pub work: Work,
    /// Linears of routed experts that aren't timed.
    pub experts_left_out: usize,
}

/// Modules that a step goes through.
#[derive(Clone, Debug)]
pub enum Work {
    /// Linears.
    Linears(Vec<SiteSpec>),
    /// Routed layers.
    Experts(Routed),
}

/// A pool full of adapters for them.
#[derive(Debug)]
pub enum Filled {
    /// Of linears.
    Linears(Rig),
    /// Of routed layers.
    Experts(ExpertRig),
}

impl Shapes {
    /// Number of linears.
    pub fn sites(&self) -> usize {
        match &self.work {
            Work::Linears(sites) => sites.len(),
            Work::Experts(routed) => routed.linears().count(),
        }
    }

    /// Experts that each token is sent to, where experts are timed.
    pub fn top_k(&self) -> Option<u32> {
        match &self.work {
            Work::Linears(_) => None,
            Work::Experts(routed) => Some(routed.top_k),
        }
    }

    /// Allocates and fills a pool of `slots` adapters of `rank`.
    pub fn fill(&self, gpu: &Arc<dyn GpuBackend>, rank: u32, slots: u32, dtype: DType) -> Result<Filled> {
        match &self.work {
            Work::Linears(sites) => Rig::new(gpu, sites.clone(), rank, slots, dtype).map(Filled::Linears),
            Work::Experts(routed) => ExpertRig::new(gpu, routed, rank, slots, dtype).map(Filled::Experts),
        }
    }

    /// What to do about an error, where it is that the device has no room.
    pub fn room(&self, error: Error) -> Failure {
        let hint = format!("{} (fewer --layers need less memory)", self.name);
        let full = matches!(error, Error::OutOfMemory { .. });
        let failure = Failure::from(error);
        if full { failure.about(hint) } else { failure }
    }

    /// Times the base model's own products for the rows of a case.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where they can't be timed.
    pub fn base(&self, gpu: &dyn GpuBackend, rows: u32, seed: u64, dtype: DType, samples: usize) -> Result<Times> {
        match &self.work {
            Work::Linears(sites) => rig::base(gpu, sites, rows, dtype, samples),
            Work::Experts(routed) => products::time(gpu, routed, rows, seed, dtype, samples)
                .map_err(|error| products::unavailable(gpu, error)),
        }
    }
}

impl Filled {
    /// Bytes of the pool.
    pub fn pool_bytes(&self) -> u64 {
        match self {
            Self::Linears(rig) => rig.pool_bytes(),
            Self::Experts(rig) => rig.pool_bytes(),
        }
    }

    /// Times one step of `case`.
    pub fn run(&self, case: &Case, samples: usize, seed: u64) -> Result<(Times, Step)> {
        match self {
            Self::Linears(rig) => rig.run(case, samples, seed),
            Self::Experts(rig) => rig.run(case, samples, seed),
        }
    }
}
