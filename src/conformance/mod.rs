//! The conformance suite: the same cases, held against the same f64 oracle, on every backend.
//!
//! Cases are data ([`Case`]), runners are code ([`raw`]), the oracle is naive ([`oracle`]) and shares
//! nothing with the CPU backend, which is tested like the others. [`conform`] runs everything on one
//! device, `lorapool conform` prints its [`Report`], and `tests/conformance` gives each [`Trial`] a name
//! in the test harness.

mod bench;
mod big;
mod case;
mod cases;
mod data;
mod exact;
mod expert_check;
mod expert_layers;
mod experts;
pub mod fixtures;
#[cfg(test)]
mod loops;
#[cfg(test)]
mod naive;
mod operand;
pub mod oracle;
mod pooled;
pub mod raw;
mod report;
mod routed;
mod synthetic;
mod tables;
mod token_bench;
mod token_case;
mod token_pool;
mod token_rig;
mod tokens;
mod window;

pub use case::{Case, Mix, Ranks, Values};
pub use data::{Absent, Data, Dice, HostPair};
pub use expert_check::check_experts;
pub use report::{Failure, Outcome, Report};
pub use tables::check_tables;

pub use crate::ops::Op;

use crate::backend::GpuBackend;
use crate::error::Result;

/// What a trial runs on a device.
type Runner = Box<dyn Fn(&dyn GpuBackend) -> Result<Outcome> + Send + Sync>;

/// One named test of the suite.
pub struct Trial {
    name: String,
    run: Runner,
}

impl std::fmt::Debug for Trial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Trial").field(&self.name).finish()
    }
}

impl Trial {
    /// A trial that runs `run`.
    pub fn new(
        name: impl Into<String>,
        run: impl Fn(&dyn GpuBackend) -> Result<Outcome> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), run: Box::new(run) }
    }

    /// A trial of one case against the oracle.
    fn of_case(case: Case) -> Self {
        Self::new(case.to_string(), move |backend| run(backend, &case))
    }

    /// Its name, parameters included: `bgmv[bf16xbf16,r=6,in=131,out=37,rows=33,zipf]`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs it.
    ///
    /// # Errors
    /// The device's or library's error, where that ended the trial.
    pub fn run(&self, backend: &dyn GpuBackend) -> Result<Outcome> {
        (self.run)(backend)
    }
}

/// Runs one case once and compares it with the oracle.
///
/// # Errors
/// Those of the device.
pub fn run(backend: &dyn GpuBackend, case: &Case) -> Result<Outcome> {
    if let Some(reason) = case.too_large(backend.caps()) {
        return Ok(Outcome::Ignored(reason));
    }
    let rig = raw::Rig::new(backend, case)?;
    Ok(Outcome::Checked(rig.check(&rig.run()?)?))
}

/// Every trial of the suite, in order.
pub fn trials() -> Vec<Trial> {
    cases::all()
        .into_iter()
        .map(Trial::of_case)
        .chain(exact::trials())
        .chain(big::trials())
        .chain(tokens::trials())
        .chain(routed::trials())
        .chain(pooled::trials())
        .chain(token_pool::trials())
        .chain(experts::trials())
        .chain(fixtures::trials())
        .collect()
}

/// Runs `trials` on a device; `progress` hears of each before it starts: its place, how many there
/// are, and its name.
pub fn run_trials(backend: &dyn GpuBackend, trials: &[Trial], mut progress: impl FnMut(usize, usize, &str)) -> Report {
    let mut report = Report::new(backend.caps());
    for (i, trial) in trials.iter().enumerate() {
        progress(i, trials.len(), trial.name());
        if let Some(failure) = report.add(trial.name(), trial.run(backend)) {
            tracing::warn!(%failure, "conformance");
        }
    }
    report
}

/// A handful of cases that touch every kernel, type and odd shape: seconds on any device.
pub fn smoke(backend: &dyn GpuBackend) -> Report {
    let trials: Vec<_> = cases::smoke().into_iter().map(Trial::of_case).collect();
    run_trials(backend, &trials, |_, _, _| ())
}

/// The whole suite on one device.
pub fn conform(backend: &dyn GpuBackend, progress: impl FnMut(usize, usize, &str)) -> Report {
    run_trials(backend, &trials(), progress)
}
