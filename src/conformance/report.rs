//! What a run of the suite found, for people and as JSON.

use serde::Serialize;

use super::oracle::{Check, Mismatch};
use crate::backend::Caps;

/// How one trial ended.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It ran; the check says whether every element was right.
    Checked(Check),
    /// This device can't run it.
    Ignored(String),
}

/// A trial that did not pass.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    /// The trial's name, with its parameters.
    pub trial: String,
    /// The device's or the library's error, where that ended the trial.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Elements out of bounds, or bits that changed.
    pub mismatches: u64,
    /// The first few of them.
    pub first: Vec<Mismatch>,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: ", self.trial)?;
        match &self.error {
            Some(error) => f.write_str(error)?,
            None => write!(f, "{} mismatches", self.mismatches)?,
        }
        self.first.iter().try_for_each(|mismatch| write!(f, "\n    {mismatch}"))
    }
}

/// What the suite found on one device.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `cpu`, `cuda`, `vulkan` or `webgpu`.
    pub backend: String,
    /// The device's own name.
    pub device: String,
    /// Driver name and version.
    pub driver: String,
    /// Trials that ran.
    pub cases: usize,
    /// Trials among them that did not pass.
    pub failed: usize,
    /// Trials that the device can't run, with the reason.
    pub ignored: Vec<(String, String)>,
    /// Output elements compared.
    pub elements_checked: u64,
    /// Largest error as a part of its bound; 1 is the most that passes.
    pub worst_error_over_bound: f64,
    /// The failures.
    pub failures: Vec<Failure>,
}

impl Report {
    /// A report on the device of `caps`, with no trials yet.
    pub fn new(caps: &Caps) -> Self {
        Self {
            backend: caps.backend.to_owned(),
            device: caps.device.clone(),
            driver: caps.driver.clone(),
            cases: 0,
            failed: 0,
            ignored: Vec::new(),
            elements_checked: 0,
            worst_error_over_bound: 0.0,
            failures: Vec::new(),
        }
    }

    /// Whether no trial failed.
    pub fn passed(&self) -> bool {
        self.failed == 0
    }

    /// Adds a trial's outcome; gives the failure back if it was one.
    pub fn add(&mut self, trial: &str, outcome: crate::Result<Outcome>) -> Option<&Failure> {
        let failure = match outcome {
            Ok(Outcome::Ignored(reason)) => {
                self.ignored.push((trial.to_owned(), reason));
                return None;
            }
            Ok(Outcome::Checked(check)) => {
                self.elements_checked += check.elements;
                self.worst_error_over_bound = self.worst_error_over_bound.max(check.worst);
                let (mismatches, first) = (check.mismatches, check.first);
                (mismatches > 0).then(|| Failure { trial: trial.to_owned(), error: None, mismatches, first })
            }
            Err(error) => {
                let error = Some(error.to_string());
                Some(Failure { trial: trial.to_owned(), error, mismatches: 0, first: Vec::new() })
            }
        };
        self.cases += 1;
        self.failed += usize::from(failure.is_some());
        let failed = failure.is_some();
        self.failures.extend(failure);
        if failed { self.failures.last() } else { None }
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{} on {} ({})", self.backend, self.device, self.driver)?;
        for failure in &self.failures {
            writeln!(f, "  FAILED {failure}")?;
        }
        for (trial, reason) in &self.ignored {
            writeln!(f, "  ignored {trial}: {reason}")?;
        }
        write!(
            f,
            "  {} cases, {} failed, {} ignored, {} elements checked, worst error over bound {:.3}",
            self.cases,
            self.failed,
            self.ignored.len(),
            self.elements_checked,
            self.worst_error_over_bound
        )
    }
}
