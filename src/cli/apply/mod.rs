//! `lorapool apply`: anyone's activations in, activations with each row's delta out.

mod input;
mod output;
mod values;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use lorapool::adapter::Notice;
use lorapool::backend::GpuBackend;
use lorapool::manager::{LoraAdapterInput, LoraWeights};
use lorapool::ops::{Applier, ExpertApplier, ExpertInput, Experts, Matrix, Op, Output as SiteOutput, Routing};
use lorapool::pool::{Capacity, Plan, PoolSpec};
use lorapool::{DType, Region};
use serde::Serialize;

use super::adapters::{self, Named, NamedPath};
use super::args::{DeviceArgs, dtype};
use super::console::{Console, bold, dim, grouped, remark};
use super::failure::{Failure, Status};
use super::progress::Progress;
use input::{Input, Job};
use output::Output;

/// Device memory for the activations of one site at a time, in bytes.
const CHUNK_BYTES: u64 = 64 << 20;
/// Rows taken at a time, at most.
const CHUNK_ROWS: usize = 1 << 16;

/// Apply adapters to activations from a file: y = y_base + scale * B A x, row by row
///
/// The input is a safetensors file with, for each site (a module path of the base), `SITE|x` [.., in] and
/// `SITE|y_base` [.., out] of any float type, and optionally `slots` (integers): for each row the index of its
/// adapter in the order of the --adapter options, -1 for the base. Without slots every row uses the first
/// adapter. An embedding has `SITE|ids` [..] (integers, the tokens) in place of x, and its gathered rows as y_base; where
/// an adapter replaces tokens' rows, those are replaced, and so are their logits in y of the head. A site of routed
/// experts (`model.layers.0.mlp.experts.down_proj`) has `SITE|experts` [..] (integers) too: each row's expert, -1 for
/// none. Other tensors are passed over. The output has `SITE|y` [.., out] in f32.
#[derive(Debug, Args)]
#[command(after_help = format!("{}\n\nExamples:\n  \
    lorapool apply --base models/llama --adapter sql=adapters/sql -i in.safetensors -o out.safetensors\n  \
    lorapool apply --adapter a=one --adapter b=two --op sgmv -i in.safetensors -o out.safetensors\n  \
    lorapool apply --adapter both=one@0.7+two@0.3 -i in.safetensors -o out.safetensors", adapters::PATHS))]
pub struct Apply {
    #[command(flatten)]
    device: DeviceArgs,

    /// An adapter as PEFT saved it, or a sum of several (see below), and its name; repeat for more
    #[arg(long = "adapter", value_name = "NAME=PATH", required = true)]
    adapters: Vec<NamedPath>,

    /// Directory of the base model, with its config.json, its safetensors or both; of the latter only headers are read,
    /// unless DoRA needs weights. Without: the sites that the adapters cover, with the shapes that they have
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,

    /// Safetensors file to read
    #[arg(long, short, value_name = "FILE")]
    input: PathBuf,

    /// Safetensors file to write; it appears under this name when it is whole
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,

    /// Element type of activations and of the pool
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = dtype())]
    dtype: DType,

    /// Kernels to use: bgmv takes each row by itself (decode), sgmv takes runs of rows of one adapter (prefill)
    #[arg(long, value_enum, default_value_t = OpArg::Bgmv)]
    op: OpArg,
}

/// [`Op`] on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum OpArg {
    Bgmv,
    Sgmv,
}

/// The document.
#[derive(Debug, Serialize)]
struct Report {
    backend: &'static str,
    device: String,
    dtype: DType,
    op: &'static str,
    output: String,
    /// Sites written.
    sites: usize,
    /// Rows over all sites.
    rows: usize,
    /// Rows among them that have no adapter.
    base_rows: usize,
    adapters: Vec<AdapterLine>,
    /// Tensors of the input that mean nothing here.
    passed_over: Vec<String>,
}

#[derive(Debug, Serialize)]
struct AdapterLine {
    name: String,
    /// Its sites.
    sites: usize,
    /// Those that the input has.
    applied: usize,
    notices: Vec<Notice>,
}

impl Apply {
    /// Reads, applies, writes.
    pub fn run(self, console: &Console) -> Result<Status, Failure> {
        let op = match self.op {
            OpArg::Bgmv => Op::Bgmv,
            OpArg::Sgmv => Op::Sgmv,
        };
        let base = adapters::open_base(self.base.as_deref())?;
        let mut named = adapters::load(&self.adapters, base.as_ref())?;
        let spec = adapters::pool_spec(base.as_ref(), &named, named.len() as u32, self.dtype)?;
        let input = Input::open(&self.input)?;
        let mut experts = adapters::expert_spec(base.as_ref(), &named, self.dtype)?;
        let (mut jobs, passed_over) = input.jobs(&spec.sites, experts.as_ref().map_or(&[], |spec| &spec.sites))?;
        let slots = input.slots(named.len())?;
        if let Some(slots) = &slots {
            jobs.iter().try_for_each(|job| input.check_rows(job, slots))?;
        }
        let lines = narrow(&mut named, &jobs);
        if let Some(experts) = &mut experts {
            let mut used = Vec::new();
            for (site, _) in jobs.iter_mut().filter_map(|job| job.experts.as_mut()) {
                used.push(experts.sites[*site].clone());
                *site = used.len() - 1;
            }
            experts.sites = used;
            let bytes = named.iter().map(|named| experts.adapter_bytes(&named.adapter, self.dtype));
            experts.slot_bytes = bytes.max().unwrap_or(0);
        }
        let experts = experts.filter(|experts| !experts.sites.is_empty());
        let mut sites = Vec::new();
        for site in jobs.iter_mut().flat_map(|job| &mut job.sites).filter_map(Option::as_mut) {
            sites.push(spec.sites[*site].clone());
            *site = sites.len() - 1;
        }

        let gpu = self.device.open()?;
        let inputs: Vec<_> =
            named.iter().map(|named| LoraAdapterInput { name: &named.name, adapter: &named.adapter }).collect();
        let weights = LoraWeights::load_with_experts(&gpu, PoolSpec { sites, ..spec }, experts, &inputs)?;
        let worker = Worker::new(&gpu, &weights, op, self.dtype, &jobs)?;

        let names: Vec<String> = jobs.iter().map(|job| format!("{}|y", job.path)).collect();
        let shapes: Vec<Vec<usize>> = jobs.iter().map(Worker::shape).collect();
        let mut output =
            Output::create(&self.output, names.iter().map(String::as_str).zip(shapes.iter().map(Vec::as_slice)))?;
        let mut progress = Progress::new("sites", jobs.len());
        let mut base_rows = 0;
        for job in &jobs {
            progress.start(&job.path);
            let all_first;
            let slots = match &slots {
                Some(slots) => slots,
                None => {
                    all_first = vec![0; job.rows];
                    &all_first
                }
            };
            base_rows += slots.iter().filter(|slot| **slot < 0).count();
            worker.apply(&input, job, slots, &mut output)?;
            progress.done();
        }
        output.finish()?;
        drop(progress);

        let report = Report {
            backend: gpu.caps().backend,
            device: gpu.caps().device.clone(),
            dtype: self.dtype,
            op: op.name(),
            output: self.output.display().to_string(),
            sites: jobs.len(),
            rows: jobs.iter().map(|job| job.rows).sum(),
            base_rows,
            adapters: lines,
            passed_over,
        };
        console.result(&report, text);
        Ok(Status::Done)
    }
}

/// Leaves of each adapter what the input asks for: the rest takes no device memory.
fn narrow(named: &mut [Named], jobs: &[Job]) -> Vec<AdapterLine> {
    let wanted: HashSet<&str> = jobs.iter().map(|job| &*job.path).collect();
    let count = |named: &Named| {
        let routed: HashSet<&str> = named.adapter.experts.iter().map(|pair| &*pair.site.path).collect();
        named.adapter.pairs.len() + named.adapter.tokens.len() + routed.len()
    };
    let narrow = |named: &mut Named| {
        let sites = count(named);
        named.adapter.pairs.retain(|pair| wanted.contains(&*pair.site.path));
        named.adapter.tokens.retain(|tokens| wanted.contains(&*tokens.site.path));
        named.adapter.experts.retain(|pair| wanted.contains(&*pair.site.path));
        AdapterLine { name: named.name.clone(), sites, applied: count(named), notices: named.adapter.notices.clone() }
    };
    named.iter_mut().map(narrow).collect()
}

/// Applies sites one after the other, in the same memory.
struct Worker<'a> {
    gpu: &'a Arc<dyn GpuBackend>,
    weights: &'a LoraWeights,
    op: Op,
    act: DType,
    applier: Applier,
    /// What applies routed sites, and each row's expert; absent without any.
    experts: Option<(ExpertApplier, Region)>,
    x: Region,
    y: Region,
}

impl<'a> Worker<'a> {
    fn new(
        gpu: &'a Arc<dyn GpuBackend>,
        weights: &'a LoraWeights,
        op: Op,
        act: DType,
        jobs: &[Job],
    ) -> Result<Self, Failure> {
        let most = |of: &dyn Fn(&Job) -> u64| jobs.iter().map(of).max().unwrap_or(0);
        let bytes = |job: &Job, width: u32| {
            // Ids take 4 bytes whatever the type of the activations.
            let size = if job.ids { 4 } else { act.size() };
            (Self::chunk(act, job) as u64 * u64::from(width) * size).next_multiple_of(4).max(4)
        };
        let rows = most(&|job| Self::chunk(act, job) as u64) as u32;
        let experts = match weights.storage().experts() {
            Some(experts) => {
                let words = gpu.alloc(u64::from(rows.max(1)) * 4, "experts of rows")?;
                Some((ExpertApplier::new(&**gpu, experts, act, rows)?, words))
            }
            None => None,
        };
        Ok(Self {
            gpu,
            weights,
            op,
            act,
            applier: Applier::new(&**gpu, weights.storage(), act, Capacity::any(rows))?,
            experts,
            x: gpu.alloc(most(&|job| bytes(job, job.depth)), "x")?,
            y: gpu.alloc(most(&|job| bytes(job, job.width)), "y")?,
        })
    }

    /// Rows of a site taken at a time.
    fn chunk(act: DType, job: &Job) -> usize {
        let row = u64::from(job.depth.max(job.width)) * act.size();
        job.rows.min((CHUNK_BYTES / row.max(1)).max(1) as usize).min(CHUNK_ROWS)
    }

    /// Shape of a site's y.
    fn shape(job: &Job) -> Vec<usize> {
        job.lead.iter().copied().chain([job.width as usize]).collect()
    }

    /// Applies each row's adapter at one site and writes `SITE|y`.
    fn apply(&self, input: &Input, job: &Job, slots: &[i32], output: &mut Output) -> Result<(), Failure> {
        let pool = self.weights.storage();
        let (depth, width) = (job.depth as usize, job.width as usize);
        let chunk = Self::chunk(self.act, job).max(1);
        for first in (0..job.rows).step_by(chunk) {
            let rows = first..job.rows.min(first + chunk);
            let x = match job.ids {
                true => input.ids(job, rows.clone())?,
                false => input.rows(&job.x, rows.clone(), depth, self.act)?,
            };
            let y = input.rows(&job.y_base, rows.clone(), width, self.act)?;
            let experts = match (&job.experts, pool.experts()) {
                (Some((site, tensor)), Some(pool)) => {
                    Some((pool, *site, input.experts(tensor, rows.clone(), pool.sites()[*site].experts)?))
                }
                _ => None,
            };
            let plan = Plan::from_slots(slots[rows].iter().map(|slot| (*slot).max(-1)));
            let capacity = plan.capacity();
            let len = y.len() as u64;
            let (x, y) = (padded(x), padded(y));
            let (x_at, y_at) = (self.x.slice(0, x.len() as u64)?, self.y.slice(0, y.len() as u64)?);
            let (x_rows, y_rows) = (Matrix::new(x_at.clone(), job.depth), Matrix::new(y_at.clone(), job.width));
            let [lora, rows] = job.sites.map(|site| site.map(|site| SiteOutput { site, y: &y_rows }));
            self.gpu.submit(&mut |encoder| {
                encoder.write(&x_at, &x)?;
                encoder.write(&y_at, &y)?;
                self.applier.write_batch(encoder, &plan, capacity)?;
                if let (Some((pool, site, experts)), Some((applier, words))) = (&experts, &self.experts) {
                    encoder.write(words, bytemuck::cast_slice(experts))?;
                    // Each row is a token with one expert.
                    let (rows, count) = (capacity.rows, pool.sites()[*site].experts);
                    let expert = Experts::ByRow(words);
                    let routing = Routing { rows, experts: count, top_k: 1, expert, places: None };
                    applier.encode_rows(encoder, self.op, pool, &self.applier, capacity, &routing)?;
                    let outputs = [SiteOutput { site: *site, y: &y_rows }];
                    return applier.encode(encoder, pool, self.op, rows, rows, ExpertInput::Rows(&x_rows), &outputs);
                }
                let (applier, op) = (&self.applier, self.op);
                if let Some(output) = lora {
                    match job.ids {
                        true => applier.encode_embedding(encoder, pool, op, capacity, &x_at, output)?,
                        false => applier.encode(encoder, pool, op, capacity, &x_rows, &[output])?,
                    }
                }
                match (rows, job.ids) {
                    (None, _) => Ok(()),
                    (Some(output), true) => applier.encode_token_rows(encoder, pool, capacity, &x_at, output),
                    (Some(output), false) => applier.encode_logits(encoder, pool, capacity, &x_rows, output),
                }
            })?;
            let values = self.act.decode(&self.gpu.read(&y_at.slice(0, len)?)?);
            let mut bytes = Vec::new();
            DType::F32.encode(&values, &mut bytes);
            output.write(&bytes)?;
        }
        Ok(())
    }
}

/// Writes are whole words.
fn padded(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn text(report: &Report) -> String {
    let Report { backend, device, dtype, op, output, sites, rows, base_rows, .. } = report;
    let mut out = format!(
        "{} {sites} sites, {} rows ({} of the base), {op} in {dtype} on {backend} ({device})\n",
        bold(output),
        grouped(*rows as u64),
        grouped(*base_rows as u64),
    );
    for line in &report.adapters {
        out += &format!("{}: {} of its {} sites are in the input\n", line.name, line.applied, line.sites);
        for notice in &line.notices {
            out += &remark(&line.name, notice);
        }
    }
    match &report.passed_over[..] {
        [] => {}
        few if few.len() <= 4 => out += &format!("{}\n", dim(format!("passed over: {}", few.join(", ")))),
        many => {
            out += &format!(
                "{}\n",
                dim(format!("passed over: {} and {} more tensors", many[..3].join(", "), many.len() - 3))
            )
        }
    }
    out
}
