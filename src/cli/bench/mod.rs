//! `lorapool bench`: what adapters cost on a device, beside the least that they could cost there.

mod case;
mod experts;
mod plot;
mod products;
mod report;
mod rig;
mod routed;
mod shapes;
mod swap;
mod tune;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use lorapool::Error;
use lorapool::ops::Op;

use super::adapters;
use super::args::{DeviceArgs, dtype};
use super::console::Console;
use super::failure::{Failure, Status};
use super::progress::Progress;
use case::{Case, Mix};
use report::{Line, Report};
use routed::Routed;
use shapes::{Shapes, Work};

/// Time a step's whole LoRA work beside the least that it could take
///
/// A step is one graph, captured for just as many tiles and packs as its batch has: every site of every layer, each
/// with its own weights. Each time is the mean of a burst of replays, and what is printed is the median of many
/// bursts. Beside it stands the floor: the fewest bytes that the step can move (the weights of the adapters in the
/// batch and the activations read, the outputs read and written) over the bandwidth of the device's own copies,
/// measured in the same run. Where the vendor's matrix library is found (cuBLAS), the base model's own products for
/// the same rows are timed too, and what the adapters add to them is shown. Weights are synthetic; results are checked
/// by `run`, not here. A base's routed experts are timed by `--experts` alone; without it the report
/// says how many linears that leaves out.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    lorapool bench                                       the usual cases at the shapes of Llama-3.1-8B\n  \
    lorapool bench --case 64x64-r16 --case 2048x1-r16 --json\n  \
    lorapool bench --rows 8 --adapters 8 --rank 32 --mix zipf\n  \
    lorapool bench --base models/qwen --layers 4 --backend vulkan\n  \
    lorapool bench --swap --case 16x16-r16               what swaps cost, and cost a step\n  \
    lorapool bench --sweep --plot decode.svg\n  \
    lorapool bench --experts                             the routed experts of Qwen3-30B-A3B\n  \
    lorapool bench --list")]
pub struct Bench {
    #[command(flatten)]
    device: DeviceArgs,

    /// Run only the case of this name (see --list); repeat for more
    #[arg(long = "case", value_name = "NAME", conflicts_with = "rows")]
    cases: Vec<String>,

    /// Time routed experts instead of linears: the usual cases at the shapes of Qwen3-30B-A3B, or those of --base
    ///
    /// Rows of a case are tokens, each with as many experts of every layer as the model sends it to, drawn by --seed. A
    /// step makes each layer's batch of rows on the device, then applies gate and up, then down.
    #[arg(long, conflicts_with_all = ["sweep", "plot", "swap"])]
    experts: bool,

    /// Experts that each token is sent to, instead of what the model's config.json says
    #[arg(long, value_name = "N", requires = "experts", value_parser = clap::value_parser!(u32).range(1..=4096))]
    top_k: Option<u32>,

    /// The cases of a picture: decode of 1 to 256 rows, with one adapter and with one a row, and 64 rows with 1 to 64
    #[arg(long, conflicts_with_all = ["cases", "rows"])]
    sweep: bool,

    /// Draw the times against rows and adapters, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,

    /// Print the names of the usual cases and run none
    #[arg(long)]
    list: bool,

    /// A case of your own: rows of its batch, or with --experts its tokens
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    rows: Option<u32>,

    /// A case of your own: adapters that its rows are spread over
    #[arg(long, value_name = "N", default_value_t = 1, requires = "rows", value_parser = clap::value_parser!(u32).range(1..=4096))]
    adapters: u32,

    /// A case of your own: rank of its adapters
    #[arg(long, value_name = "R", default_value_t = 16, requires = "rows", value_parser = clap::value_parser!(u32).range(1..=512))]
    rank: u32,

    /// A case of your own: how adapters are spread over the rows
    #[arg(long, value_enum, default_value_t = Mix::Distinct, requires = "rows")]
    mix: Mix,

    /// A case of your own: prefill kernels, with the rows in segments, instead of decode kernels
    #[arg(long, requires = "rows")]
    prefill: bool,

    /// Time swaps instead: an adapter's way from host memory to a published slot, beside a bare copy of its bytes,
    /// and the step of the first case while swaps follow each other without a pause
    #[arg(long)]
    swap: bool,

    /// Time the cases in every way in which the device can run its kernels, beside the one that is chosen for it
    #[arg(long, conflicts_with_all = ["swap", "plot"])]
    tune: bool,

    /// Shapes of this base (a directory with config.json and/or safetensors) instead of Llama-3.1-8B's, or of
    /// Qwen3-30B-A3B's experts
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,

    /// Only the first so many layers
    #[arg(long, value_name = "N")]
    layers: Option<usize>,

    /// Element type of activations and of the pool
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = dtype())]
    dtype: lorapool::DType,

    /// Bursts that a median is taken of, at most
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    replays: u32,

    /// Seed of the drawn mixes
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

impl Bench {
    /// Runs the cases.
    pub fn run(self, console: &Console) -> Result<Status, Failure> {
        if self.list {
            let names: Vec<String> = self.usual().into_iter().map(|case| case.name).collect();
            console.result(&names, |names| names.join("\n"));
            return Ok(Status::Done);
        }
        let mut cases = self.cases()?;
        // Cases of one rank share a pool; the order within a rank stays.
        cases.sort_by_key(|case| case.rank);
        let shapes = self.shapes()?;
        // Before anything is timed: hours of cases must not end at a path that can't be written.
        let plot = match &self.plot {
            Some(path) => Some((path, File::create(path).map_err(|error| Failure::io(path.display(), error))?)),
            None => None,
        };
        let gpu = self.device.open()?;
        if let (true, Work::Linears(sites)) = (self.swap, &shapes.work) {
            let mut progress = Progress::new("swaps", 1);
            progress.start("swaps");
            let case = if self.cases.is_empty() && self.rows.is_none() { Case::usual_step() } else { cases.remove(0) };
            let samples = self.replays as usize;
            let report = swap::run(&gpu, sites, shapes.name.clone(), &case, self.dtype, samples, self.seed)?;
            drop(progress);
            console.result(&report, swap::Report::text);
            return Ok(Status::Done);
        }
        let samples = self.replays as usize;
        if self.tune {
            let report = tune::run(&gpu, &shapes, &cases, self.dtype, samples, self.seed);
            let report = report.map_err(|error| shapes.room(error))?;
            console.result(&report, tune::Report::text);
            return Ok(Status::Done);
        }
        let (bandwidth, copied) = rig::copy_bandwidth(&*gpu, samples)?;
        let mut progress = Progress::new("cases", cases.len());
        let mut report = Report::new(gpu.caps(), &shapes, self.dtype, bandwidth, copied);
        let mut bases: BTreeMap<u32, f64> = BTreeMap::new();
        for cases in cases.chunk_by(|a, b| a.rank == b.rank) {
            let slots = cases.iter().map(|case| case.adapters).max().unwrap_or(1);
            progress.start("filling the pool");
            let filled = shapes.fill(&gpu, cases[0].rank, slots, self.dtype).map_err(|error| shapes.room(error))?;
            for case in cases {
                progress.start(&case.name);
                let (times, step) = filled.run(case, samples, self.seed)?;
                if report.no_base.is_none() && !bases.contains_key(&case.rows) {
                    match shapes.base(&*gpu, case.rows, self.seed, self.dtype, samples) {
                        Ok(times) => drop(bases.insert(case.rows, times.quantile(0.5))),
                        Err(Error::Unavailable { reason, .. }) => report.no_base = Some(reason),
                        Err(error) => return Err(error.into()),
                    }
                }
                let base = bases.get(&case.rows).copied();
                report.lines.push(Line::new(case, &step, filled.pool_bytes(), &times, bandwidth, base));
                progress.done();
            }
        }
        drop(progress);
        if let Some((path, mut file)) = plot {
            let drawn = plot::svg(&report).map_err(|error| std::io::Error::other(error.to_string()));
            let written = drawn.and_then(|drawing| file.write_all(drawing.as_bytes()));
            written.map_err(|error| Failure::io(path.display(), error))?;
        }
        console.result(&report, Report::text);
        Ok(Status::Done)
    }

    fn cases(&self) -> Result<Vec<Case>, Failure> {
        if let Some(rows) = self.rows {
            let op = if self.prefill { Op::Sgmv } else { Op::Bgmv };
            let case = if self.experts { Case::of_experts } else { Case::new };
            return Ok(vec![case(op, rows, self.adapters, self.rank, self.mix)]);
        }
        if self.sweep {
            return Ok(Case::sweep());
        }
        let usual = self.usual();
        if self.cases.is_empty() {
            return Ok(usual);
        }
        let find = |name: &String| {
            let case = usual.iter().find(|case| case.name == *name).cloned();
            let list = if self.experts { "--experts --list" } else { "--list" };
            case.ok_or_else(|| Failure::usage(format!("no case is called {name:?}; see lorapool bench {list}")))
        };
        self.cases.iter().map(find).collect()
    }

    fn usual(&self) -> Vec<Case> {
        if self.experts { Case::usual_experts() } else { Case::usual() }
    }

    fn shapes(&self) -> Result<Shapes, Failure> {
        let layers = self.layers.unwrap_or(usize::MAX);
        let base = adapters::open_base(self.base.as_deref())?;
        let (model, most) = if self.experts { ("Qwen3-30B-A3B", 48) } else { ("Llama-3.1-8B", 32) };
        let layers = if base.is_some() { layers } else { layers.min(most) };
        let name = match (&self.base, layers) {
            (Some(dir), _) => dir.display().to_string(),
            (None, 1) => format!("{model}, 1 layer"),
            (None, more) => format!("{model}, {more} layers"),
        };
        let (work, experts_left_out) = match (&base, self.experts) {
            (None, false) => (Work::Linears(rig::llama(layers)), 0),
            (None, true) => (Work::Experts(Routed::qwen3(layers, self.top_k).map_err(Failure::usage)?), 0),
            (Some(base), true) => {
                (Work::Experts(Routed::of_base(base, layers, self.top_k).map_err(Failure::usage)?), 0)
            }
            (Some(base), false) => {
                let mut sites = adapters::pool_spec(Some(base), [], 1, self.dtype)?.sites;
                sites.retain(|site| site.id.layer < layers);
                let experts = base.experts().iter().filter(|linear| linear.site.layer < layers);
                (Work::Linears(sites), experts.count())
            }
        };
        Ok(Shapes { name, work, experts_left_out })
    }
}
