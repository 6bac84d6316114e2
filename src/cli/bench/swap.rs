//! What a swap costs: an adapter's way from host memory to a slot, and what a running step notices of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lorapool::adapter::{Adapter, HostMatrix, HostPair};
use lorapool::backend::{Caps, GpuBackend, Graph};
use lorapool::manager::{AdapterManager, LoraAdapterInput, LoraWeights, Options, Source};
use lorapool::ops::Applier;
use lorapool::pool::{Plan, PoolSpec, SiteSpec, SlotImage};
use lorapool::{DType, Result};
use serde::Serialize;

use super::super::console::{bytes, render, table};
use super::case::Case;
use super::rig;

/// Adapters that take turns in the one slot that no row of the step uses.
const GUESTS: [&str; 2] = ["guest 0", "guest 1"];
/// Longest wait for one figure's samples.
const PATIENCE: Duration = Duration::from_secs(20);

/// Microseconds of one kind of thing, sorted.
#[derive(Clone, Copy, Debug, Serialize)]
struct Spread {
    samples: usize,
    median_us: f64,
    p99_us: f64,
    max_us: f64,
}

impl Spread {
    fn new(mut micros: Vec<f64>) -> Self {
        micros.sort_unstable_by(f64::total_cmp);
        let times = rig::Times { micros, burst: 1 };
        let at = |share| times.quantile(share);
        Self { samples: times.micros.len(), median_us: at(0.5), p99_us: at(0.99), max_us: at(1.0) }
    }

    fn gigabytes(&self, bytes: u64) -> f64 {
        bytes as f64 / self.median_us / 1e3
    }
}

/// Swaps of one kind: with or without reading back what was sent.
#[derive(Debug, Serialize)]
struct Swaps {
    verify: bool,
    /// From the call to the published slot, no step running.
    swap: Spread,
    gigabytes_per_second: f64,
    /// Of the bandwidth of the copy alone.
    share_of_copy: f64,
    /// Steps while swaps follow each other without a pause.
    step_meanwhile: Spread,
    /// Swaps that were done meanwhile.
    swaps_meanwhile: usize,
    /// Its p99 over the quiet p99.
    step_p99_over_quiet: f64,
}

/// The document.
#[derive(Debug, Serialize)]
pub struct Report {
    backend: &'static str,
    device: String,
    driver: String,
    shapes: String,
    dtype: DType,
    step: Case,
    slot_bytes: u64,
    /// One copy of a slot's bytes from page-locked host memory to the device, nothing else running.
    copy: Spread,
    copy_gigabytes_per_second: f64,
    /// One step at a time, from its replay to its end, no swap.
    step_quiet: Spread,
    results: Vec<Swaps>,
}

/// A manager whose pinned adapters are the step's, with one slot more.
struct Bench {
    manager: Arc<AdapterManager>,
    graph: Box<dyn Graph>,
}

/// Times swaps beside the step of `case`.
pub fn run(
    gpu: &Arc<dyn GpuBackend>,
    sites: &[SiteSpec],
    shapes: String,
    case: &Case,
    dtype: DType,
    samples: usize,
    seed: u64,
) -> Result<Report> {
    let guests = [1, 2].map(|seed| Arc::new(adapter(sites, case.rank, dtype, seed)));
    let mut report: Option<Report> = None;
    for verify in [false, true] {
        let bench = Bench::new(gpu, sites, case, dtype, &guests, verify, seed)?;
        let report = match &mut report {
            Some(report) => report,
            none => none.insert(bench.quiet(gpu.caps(), shapes.clone(), case, dtype, &guests[0], samples)?),
        };
        report.results.push(bench.swaps(report, verify, samples)?);
    }
    report.ok_or_else(|| lorapool::Error::Input("nothing was measured".into()))
}

impl Bench {
    fn new(
        gpu: &Arc<dyn GpuBackend>,
        sites: &[SiteSpec],
        case: &Case,
        dtype: DType,
        guests: &[Arc<Adapter>; 2],
        verify: bool,
        seed: u64,
    ) -> Result<Self> {
        let spec = PoolSpec {
            sites: sites.to_vec(),
            max_rank: case.rank,
            max_loras: case.adapters + 1,
            dtype,
            vectors: false,
        };
        let names: Vec<String> = (0..case.adapters).map(|slot| format!("resident {slot}")).collect();
        let inputs: Vec<_> = names.iter().map(|name| LoraAdapterInput { name, adapter: &guests[0] }).collect();
        let weights = LoraWeights::load(gpu, spec, &inputs)?;
        let options = Options { verify, host_cache: u64::MAX, ..Options::default() };
        let manager = AdapterManager::new(weights, options)?;
        for (name, guest) in GUESTS.iter().zip(guests) {
            manager.register(name, Source::Memory(guest.clone()));
            manager.promote(name)?;
        }
        let plan = Plan::from_slots(case.slots(seed));
        let applier = Applier::new(&**gpu, manager.pool(), dtype, plan.capacity())?;
        let graph = rig::record(&**gpu, manager.pool(), &applier, case.op, &plan)?;
        gpu.submit(&mut |encoder| applier.write_batch(encoder, &plan, plan.capacity()))?;
        Ok(Self { manager, graph })
    }

    /// What there is to compare swaps with.
    fn quiet(
        &self,
        caps: &Caps,
        shapes: String,
        case: &Case,
        dtype: DType,
        guest: &Adapter,
        samples: usize,
    ) -> Result<Report> {
        let (gpu, pool) = (self.manager.gpu(), self.manager.pool());
        let slot_bytes = SlotImage::len_in(pool) as u64;
        let image = SlotImage::new_in(pool, guest, gpu.alloc_host(slot_bytes as usize)?)?;
        // Where a device can't hold a slot in one allocation, as much of it as it can.
        let len = slot_bytes.min(gpu.caps().max_alloc / 4096 * 4096);
        let target = gpu.alloc(len, "copy target")?;
        gpu.wait(gpu.submit(&mut |_| Ok(()))?)?;
        let copy = sample(samples, || gpu.upload(&target, &image.bytes()[..len as usize]))?;
        let step_quiet = sample(samples * 16, || self.step())?;
        Ok(Report {
            backend: caps.backend,
            device: caps.device.clone(),
            driver: caps.driver.clone(),
            shapes,
            dtype,
            step: case.clone(),
            slot_bytes,
            copy,
            copy_gigabytes_per_second: copy.gigabytes(len),
            step_quiet,
            results: Vec::new(),
        })
    }

    fn swaps(&self, report: &Report, verify: bool, samples: usize) -> Result<Swaps> {
        let manager = self.manager.clone();
        let mut turn = 0;
        let mut swap = move || {
            turn += 1;
            manager.promote(GUESTS[turn % GUESTS.len()]).map(|_| ())
        };
        let quiet = sample(samples, &mut swap)?;
        let stop = AtomicBool::new(false);
        let (steps, swaps) = std::thread::scope(|scope| {
            let stop = &stop;
            let swapper = scope.spawn(move || -> Result<usize> {
                let mut swaps = 0;
                while !stop.load(Ordering::Relaxed) {
                    swap()?;
                    swaps += 1;
                }
                Ok(swaps)
            });
            let steps = sample(samples * 16, || self.step());
            stop.store(true, Ordering::Relaxed);
            let swaps = swapper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            Ok::<_, lorapool::Error>((steps?, swaps?))
        })?;
        let rate = quiet.gigabytes(report.slot_bytes);
        Ok(Swaps {
            verify,
            swap: quiet,
            gigabytes_per_second: rate,
            share_of_copy: rate / report.copy_gigabytes_per_second,
            step_p99_over_quiet: steps.p99_us / report.step_quiet.p99_us,
            step_meanwhile: steps,
            swaps_meanwhile: swaps,
        })
    }

    /// One step as a server runs it: no swap is published between its start and its submission.
    fn step(&self) -> Result<()> {
        let step = self.manager.step();
        let ticket = self.graph.replay()?;
        drop(step);
        self.manager.gpu().wait(ticket)
    }
}

/// Times of `work`, after a warm-up.
fn sample(count: usize, mut work: impl FnMut() -> Result<()>) -> Result<Spread> {
    work()?;
    let start = Instant::now();
    let mut micros = Vec::with_capacity(count);
    while micros.len() < count && (micros.len() < 3 || start.elapsed() < PATIENCE) {
        let begun = Instant::now();
        work()?;
        micros.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    Ok(Spread::new(micros))
}

/// An adapter that covers every site.
fn adapter(sites: &[SiteSpec], rank: u32, dtype: DType, seed: u64) -> Adapter {
    let block = rig::random(dtype, 1 << 20, 0.05, seed);
    let matrix = |rows: u32, cols: u32| {
        let (rows, cols) = (rows as usize, cols as usize);
        let len = rows * cols * dtype.size() as usize;
        HostMatrix { dtype, rows, cols, bytes: block.iter().copied().cycle().take(len).collect() }
    };
    let pair = |site: &SiteSpec| {
        HostPair::new(site.id.clone(), matrix(rank, site.in_features), matrix(site.out_features, rank), 1e-3)
    };
    Adapter::from_pairs(sites.iter().map(pair).collect())
}

impl Report {
    /// For people.
    pub fn text(&self) -> String {
        let mut out = format!(
            "{} on {} ({})\n{}, {}: a slot is {}; one copy of it from page-locked memory {:.0} us, {:.1} GB/s\n\
             step {}: median {:.1} us, p99 {:.1} us\n\n",
            self.backend,
            self.device,
            self.driver,
            self.shapes,
            self.dtype,
            bytes(self.slot_bytes),
            self.copy.median_us,
            self.copy_gigabytes_per_second,
            self.step.name,
            self.step_quiet.median_us,
            self.step_quiet.p99_us,
        );
        let header = ["swap", "median us", "p99", "GB/s", "of copy", "step meanwhile", "p99", "x quiet p99", "swaps"];
        let mut table = table(&header, &[1, 2, 3, 4, 5, 6, 7, 8]);
        for line in &self.results {
            table.add_row([
                if line.verify { "read back and compared" } else { "not read back" }.to_owned(),
                format!("{:.0}", line.swap.median_us),
                format!("{:.0}", line.swap.p99_us),
                format!("{:.1}", line.gigabytes_per_second),
                format!("{:.0} %", line.share_of_copy * 100.0),
                format!("{:.1}", line.step_meanwhile.median_us),
                format!("{:.1}", line.step_meanwhile.p99_us),
                format!("{:.2}", line.step_p99_over_quiet),
                line.swaps_meanwhile.to_string(),
            ]);
        }
        out += &render(&table);
        out
    }
}
