//! The conformance suite in the test harness: one trial for each case and backend of this build.
//!
//! A backend without driver or device is ignored with the reason, unless `REQUIRE_BACKENDS` (names,
//! separated by commas) asks for it: then its trials fail.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Completion, Failed};
use lorapool::backend::{self, GpuBackend};
use lorapool::conformance::{self, Report};

/// A backend, opened when its first trial runs.
struct Device {
    name: &'static str,
    required: bool,
    opened: OnceLock<Result<Arc<dyn GpuBackend>, String>>,
}

impl Device {
    fn run(&self, trial: &conformance::Trial) -> Result<Completion, Failed> {
        let opened = self.opened.get_or_init(|| backend::open(self.name, 0).map_err(|e| e.to_string()));
        let backend = match opened {
            Ok(backend) => backend,
            Err(reason) if self.required => return Err(format!("required, but {reason}").into()),
            Err(reason) => return Ok(Completion::ignored_with(reason)),
        };
        let mut report = Report::new(backend.caps());
        if let Some(failure) = report.add(trial.name(), trial.run(&**backend)) {
            return Err(format!("on {}: {failure}", backend.caps().device).into());
        }
        Ok(report.ignored.pop().map_or(Completion::Completed, |(_, reason)| Completion::ignored_with(reason)))
    }
}

fn main() {
    let arguments = Arguments::from_args();
    let fixtures = std::env::var(conformance::fixtures::FOLDER).unwrap_or_else(|_| "tests/fixtures".to_owned());
    assert!(std::path::Path::new(&fixtures).join("INDEX.json").exists(), "no fixtures in {fixtures}");
    let required = std::env::var("REQUIRE_BACKENDS").unwrap_or_default();
    let mut required: BTreeMap<_, _> =
        required.split(',').map(str::trim).filter(|name| !name.is_empty()).map(|name| (name, false)).collect();
    let mut trials = Vec::new();
    for name in backend::names() {
        let asked = required.get_mut(name).map(|known| *known = true).is_some();
        let device = Arc::new(Device { name, required: asked, opened: OnceLock::new() });
        for trial in conformance::trials() {
            let (device, full) = (device.clone(), format!("{name}::{}", trial.name()));
            trials.push(libtest_mimic::Trial::ignorable_test(full, move || device.run(&trial)));
        }
    }
    for (name, _) in required.into_iter().filter(|(_, known)| !known) {
        let reason = format!("REQUIRE_BACKENDS names {name:?}; this build has {}", backend::names().join(", "));
        trials.push(libtest_mimic::Trial::test(format!("{name}::required"), move || Err(reason.into())));
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    let messages = validation_messages();
    if messages > 0 {
        eprintln!("{messages} messages of the Vulkan validation layer");
        std::process::exit(1);
    }
    conclusion.exit();
}

/// What Vulkan's validation layer had to say, while `LORAPOOL_VULKAN_VALIDATION=1`.
#[cfg(feature = "vulkan")]
fn validation_messages() -> u64 {
    backend::vulkan::validation_messages()
}

#[cfg(not(feature = "vulkan"))]
fn validation_messages() -> u64 {
    0
}
