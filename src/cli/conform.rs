//! `lorapool conform`: the conformance suite on one device, to be pasted.

use std::time::Instant;

use clap::Args;
use lorapool::conformance::{Report, Trial, run_trials, trials};
use serde::Serialize;

use super::args::DeviceArgs;
use super::console::{Console, bad, dim, good, grouped};
use super::failure::{Failure, Status};
use super::progress::Progress;

/// Run the conformance suite on a device
///
/// Every kernel, type and odd shape is held against an f64 oracle. The cases are the same for every backend, and so are the bounds. Paste the output into a report about
/// a device: it names the driver.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    lorapool conform                                the best device\n  \
    lorapool conform --backend vulkan --device 1\n  \
    lorapool conform --filter 'sgmv[bf16' --json\n  \
    lorapool conform --list")]
pub struct Conform {
    #[command(flatten)]
    device: DeviceArgs,

    /// Run only the cases whose names contain this
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,

    /// Print the names of the cases and run none
    #[arg(long)]
    list: bool,
}

/// The document.
#[derive(Debug, Serialize)]
struct Document {
    version: &'static str,
    platform: String,
    api: String,
    seconds: f64,
    #[serde(flatten)]
    report: Report,
}

impl Conform {
    /// Runs the suite.
    pub fn run(self, console: &Console) -> Result<Status, Failure> {
        let wanted = |trial: &Trial| self.filter.as_deref().is_none_or(|text| trial.name().contains(text));
        let trials: Vec<Trial> = trials().into_iter().filter(wanted).collect();
        if self.list {
            let names: Vec<&str> = trials.iter().map(Trial::name).collect();
            console.result(&names, |names| names.join("\n"));
            return Ok(Status::Done);
        }
        if trials.is_empty() {
            let filter = self.filter.as_deref().unwrap_or_default();
            return Err(Failure::usage(format!("no case's name contains {filter:?}; see lorapool conform --list")));
        }
        let gpu = self.device.open()?;
        let start = Instant::now();
        let mut progress = Progress::new("cases", trials.len());
        let report = run_trials(&*gpu, &trials, |place, _, name| {
            if place > 0 {
                progress.done();
            }
            progress.start(name);
        });
        drop(progress);
        let document = Document {
            version: env!("CARGO_PKG_VERSION"),
            platform: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            api: gpu.caps().api.clone(),
            seconds: start.elapsed().as_secs_f64(),
            report,
        };
        console.result(&document, text);
        Ok(if document.report.passed() { Status::Done } else { Status::Failed })
    }
}

fn text(document: &Document) -> String {
    let Document { version, platform, api, seconds, report } = document;
    let mut out = format!("lorapool {version} conformance, {platform}\n");
    out += &format!(
        "backend  {}\ndevice   {}\ndriver   {}\napi      {api}\n\n",
        report.backend, report.device, report.driver
    );
    for failure in &report.failures {
        out += &format!("{} {failure}\n", bad("FAILED"));
    }
    for (trial, reason) in &report.ignored {
        out += &format!("{}\n", dim(format!("ignored {trial}: {reason}")));
    }
    if !report.failures.is_empty() || !report.ignored.is_empty() {
        out.push('\n');
    }
    let verdict = if report.passed() { good("ok") } else { bad("failed") };
    out += &format!(
        "{verdict} {} cases, {} failed, {} ignored, {} elements checked, worst error/bound {:.3}, {seconds:.1} s",
        report.cases,
        report.failed,
        report.ignored.len(),
        grouped(report.elements_checked),
        report.worst_error_over_bound,
    );
    out
}
