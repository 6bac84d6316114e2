//! `lorapool run`: the main job on real adapters, every element of it checked.

mod bench;
mod mix;
mod report;
mod samples;
mod step;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use lorapool::adapter::{Adapter, BaseModel, SiteId};
use lorapool::conformance::oracle::Check;
use lorapool::conformance::{Dice, check_experts, check_tables};
use lorapool::manager::{LoraAdapterInput, LoraWeights};
use lorapool::ops::Op;
use lorapool::pool::Plan;

use super::adapters::{self, Named, NamedPath};
use super::args::{DeviceArgs, dtype};
use super::console::Console;
use super::failure::{Failure, Status};
use super::progress::Progress;
use bench::Bench;
use mix::Mix;
use report::{AdapterLine, Pass, Report, Swap};
use step::Step;

/// Load adapters, apply a different one to every row of a batch, check every element
///
/// Every site of the model gets a synthetic input and base output, routed experts a synthetic routing. Both ops run from
/// captured graphs: bgmv, as for decode, and sgmv, as for prefill, with the rows in segments. Each element is held against
/// a naive f64 computation; rows of the base must keep their bits. Then one adapter is swapped for another in its slot, and
/// all is run and checked again.
#[derive(Debug, Args)]
#[command(after_help = format!("{}\n\nExamples:\n  \
    lorapool run                                    adapters that ship with the command, best device\n  \
    lorapool run --backend vulkan --rows 256 --mix zipf --json\n  \
    lorapool run --base models/llama --adapter sql=adapters/sql --adapter chat=adapters/chat\n  \
    lorapool run --adapter both=adapters/sql@0.7+adapters/chat@0.3", adapters::PATHS))]
pub struct Run {
    #[command(flatten)]
    device: DeviceArgs,

    /// An adapter as PEFT saved it, or a sum of several (see below), and its name; repeat for more. Without any: samples that ship with the command
    #[arg(long = "adapter", value_name = "NAME=PATH")]
    adapters: Vec<NamedPath>,

    /// Directory of the base model, with its config.json, its safetensors or both; of the latter only headers are read,
    /// unless DoRA needs weights. Without: the sites that the adapters cover, with the shapes that they have
    #[arg(long, value_name = "DIR", requires = "adapters")]
    base: Option<PathBuf>,

    /// Rows of the batch
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    rows: u32,

    /// How adapters are spread over the rows
    #[arg(long, value_enum, default_value_t = Mix::Distinct)]
    mix: Mix,

    /// Element type of activations and of the pool
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = dtype())]
    dtype: lorapool::DType,

    /// Steps that the median time is taken of, at most
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    steps: u32,

    /// Seed of the synthetic activations and of the mix
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

/// Adapters for the slots, and one to swap in.
struct Cast {
    base: Option<BaseModel>,
    resident: Vec<Named>,
    next: Named,
}

impl Run {
    /// Runs the job.
    pub fn run(self, console: &Console) -> Result<Status, Failure> {
        let Cast { base, resident, next } = self.cast()?;
        let gpu = self.device.open()?;
        let max_loras = resident.len() as u32;
        let all = resident.iter().chain([&next]);
        let mut spec = adapters::pool_spec(base.as_ref(), all.clone(), max_loras, self.dtype)?;
        // Tables of tokens are large: only what some adapter has.
        if !all.clone().any(|named| named.adapter.pairs.iter().any(|pair| pair.embedding)) {
            spec = spec.without_embeddings();
        }
        if !all.clone().any(|named| !named.adapter.tokens.is_empty()) {
            spec = spec.without_token_rows();
        }
        let start = Instant::now();
        let inputs: Vec<_> =
            resident.iter().map(|named| LoraAdapterInput { name: &named.name, adapter: &named.adapter }).collect();
        let experts = adapters::expert_spec(None, resident.iter().chain([&next]), self.dtype)?;
        let mut weights = LoraWeights::load_with_experts(&gpu, spec, experts, &inputs)?;
        let load_time = start.elapsed();

        let mut slots = self.mix.slots(self.rows, max_loras, &mut Dice::new(self.seed));
        let decode = Plan::from_slots(slots.iter().copied());
        slots.sort_unstable();
        let prefill = Plan::from_slots(slots);
        let plans = [(Op::Bgmv, decode), (Op::Sgmv, prefill)];
        let step = Step::new(&gpu, weights.storage(), self.dtype, &plans)?;

        let (routed, experts_rank) =
            weights.storage().experts().map_or((0, 0), |experts| (experts.sites().len(), experts.spec().max_rank));
        let mut progress = Progress::new("checking", 2 * plans.len() * (weights.storage().sites().len() + routed));
        let mut passes = Vec::new();
        let mut first = Check::default();
        let mut check_all = |weights: &LoraWeights, resident: Vec<&Adapter>, swapped: bool| -> Result<(), Failure> {
            let bench = Bench::new(&gpu, weights.storage(), &step, resident.clone(), self.seed);
            for (op, plan) in &plans {
                let mut check = bench.check(*op, plan, &mut progress)?;
                let batch = (*op, plan);
                check.merge(check_tables(&*gpu, weights.storage(), &resident, batch, self.dtype, self.seed)?);
                check.merge(check_experts(&*gpu, weights.storage(), &resident, batch, self.dtype, |site| {
                    progress.start(site);
                    progress.done();
                })?);
                let time = step.time(*op, self.steps as usize)?;
                passes.push(Pass::new(*op, swapped, &check, time));
                first.merge(check);
            }
            Ok(())
        };
        let mut in_slot: Vec<&Adapter> = resident.iter().map(|named| &named.adapter).collect();
        check_all(&weights, in_slot.clone(), false)?;
        let start = Instant::now();
        weights.swap(0, LoraAdapterInput { name: &next.name, adapter: &next.adapter })?;
        let swap_time = start.elapsed();
        in_slot[0] = &next.adapter;
        check_all(&weights, in_slot, true)?;
        drop(progress);

        let report = Report {
            backend: gpu.caps().backend,
            device: gpu.caps().device.clone(),
            driver: gpu.caps().driver.clone(),
            api: gpu.caps().api.clone(),
            dtype: self.dtype,
            mix: self.mix,
            adapters: resident.iter().map(AdapterLine::new).collect(),
            rows: self.rows,
            base_rows: plans[0].1.rows().iter().filter(|row| row.slot < 0).count(),
            sites: weights.storage().sites().len() + routed,
            expert_sites: routed,
            pool_bytes: (weights.pool_bytes + weights.expert_pool_bytes) as u64,
            slots: max_loras,
            max_rank: (weights.max_rank as u32).max(experts_rank),
            elements_checked: first.elements,
            mismatches: first.mismatches,
            worst_error_over_bound: first.worst,
            step_us: passes.first().map_or(0.0, |pass| pass.step_us),
            load_us: report::micros(load_time),
            swapped: true,
            swap: Swap {
                slot: 0,
                out: resident[0].name.clone(),
                into: AdapterLine::new(&next),
                swap_us: report::micros(swap_time),
            },
            passes,
            first_mismatches: first.first,
        };
        console.result(&report, Report::text);
        Ok(if report.mismatches == 0 { Status::Done } else { Status::Failed })
    }

    /// Loads the adapters, or the samples.
    fn cast(&self) -> Result<Cast, Failure> {
        if self.adapters.is_empty() {
            let (base, mut resident) = samples::load()?;
            let next = resident.pop().ok_or_else(|| Failure::usage("no samples in this build"))?;
            return Ok(Cast { base: Some(base), resident, next });
        }
        let base = adapters::open_base(self.base.as_deref())?;
        let resident = adapters::load(&self.adapters, base.as_ref())?;
        let next = understudy(&resident);
        Ok(Cast { base, resident, next })
    }
}

/// The adapter that takes slot 0: of the others, the one whose pairs are at the most other places than its adapter's. A
/// lone adapter is followed by a variant of itself with half of its pairs and another scale.
fn understudy(resident: &[Named]) -> Named {
    let first = &resident[0].adapter;
    let places = |adapter: &Adapter| -> BTreeSet<(SiteId, Option<u32>)> {
        let linears = adapter.pairs.iter().map(|pair| (pair.site.clone(), None));
        linears.chain(adapter.experts.iter().map(|pair| (pair.site.clone(), Some(pair.expert)))).collect()
    };
    let covered = places(first);
    let differs = |other: &Adapter| covered.symmetric_difference(&places(other)).count();
    if let Some(other) = resident[1..].iter().max_by_key(|named| differs(&named.adapter)) {
        return Named { name: format!("{} (again)", other.name), adapter: other.adapter.clone() };
    }
    let mut adapter = first.clone();
    adapter.pairs = adapter.pairs.into_iter().step_by(2).collect();
    adapter.experts = adapter.experts.into_iter().step_by(2).collect();
    adapter.scale *= -0.5;
    adapter.pairs.iter_mut().for_each(|pair| pair.scale *= -0.5);
    adapter.experts.iter_mut().for_each(|pair| pair.scale *= -0.5);
    Named { name: format!("{} (every other pair, times -0.5)", resident[0].name), adapter }
}
