//! `lorapool soak`: adapters come and go while rows are served, and every row is compared to the bit.

mod lane;
mod model;
mod threads;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use lorapool::backend::GpuBackend;
use lorapool::manager::{AdapterManager, LoraAdapterInput, LoraWeights, Options};
use lorapool::ops::Op;
use lorapool::pool::{Plan, PoolSpec};
use lorapool::{Error, Result};
use serde::Serialize;

use self::lane::{Lane, ROWS};
use self::model::{VERSIONS, adapter, spec};
use self::threads::{Stage, Tally};
use super::args::DeviceArgs;
use super::console::{Console, bad, bold, good, grouped};
use super::failure::{Failure, Status};
use super::progress::Progress;

/// Serve rows while adapters come and go, and compare every row to the bit
///
/// Two threads dispatch batches through captured graphs, one by each op; two more load, replace, promote,
/// activate and unload. Every row must equal, to the bit, what its own adapter gives alone in a pool of one
/// slot; base rows must keep the base's output.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    lorapool soak --seconds 60\n  \
    lorapool soak --backend vulkan --slots 3 --adapters 12 --json")]
pub struct Soak {
    #[command(flatten)]
    device: DeviceArgs,

    /// How long
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,

    /// Slots of the pool
    #[arg(long, value_name = "S", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    slots: u32,

    /// Adapters by name, each in several versions
    #[arg(long, value_name = "A", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=4096))]
    adapters: u32,

    /// Where the random order begins
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
}

/// The document.
#[derive(Debug, Serialize)]
struct Document {
    backend: &'static str,
    device: String,
    driver: String,
    seconds: f64,
    slots: u32,
    adapters: u32,
    rows_checked: u64,
    mismatches: u64,
    steps: u64,
    /// Loads of given bytes, replacements among them.
    loads: u64,
    promotions: u64,
    unloads: u64,
    activations: u64,
    /// Calls that ended in an error which callers have to expect, by code.
    refusals: BTreeMap<&'static str, u64>,
    /// Longest wait for a lease.
    worst_wait_ms: f64,
    /// Leases that are still counted at the end; 0 when every count came back.
    leases_left: u32,
    /// Bytes of host memory in use after a tenth of the time, and at the end.
    host_bytes_start: Option<u64>,
    host_bytes_end: Option<u64>,
    /// Bytes of device memory, which are allocated before the first step and never again.
    pool_bytes: u64,
}

impl Soak {
    /// Runs the soak.
    pub fn run(self, console: &Console) -> std::result::Result<Status, Failure> {
        let gpu = self.device.open()?;
        let document = self.soak(&gpu)?;
        let clean = document.mismatches == 0 && document.rows_checked > 0 && document.leases_left == 0;
        console.result(&document, |d| text(d, clean));
        Ok(if clean { Status::Done } else { Status::Failed })
    }

    fn soak(&self, gpu: &Arc<dyn GpuBackend>) -> Result<Document> {
        let weights = LoraWeights::load(gpu, spec(self.slots), &[])?;
        let options = Options { wait: Duration::from_secs(20), ..Options::default() };
        let manager = AdapterManager::new(weights, options)?;
        let pool = manager.pool();
        let pool_bytes = pool.bytes();
        let lanes: Vec<Lane> = Op::ALL.iter().map(|op| Lane::new(gpu, pool, *op)).collect::<Result<_>>()?;
        let stages: Vec<Stage> = Op::ALL
            .iter()
            .map(|op| {
                Ok(Stage {
                    manager: manager.clone(),
                    names: (0..self.adapters).map(|name| format!("adapter {name}")).collect(),
                    answers: self.answers(gpu, *op)?,
                    stop: AtomicBool::new(false),
                })
            })
            .collect::<Result<_>>()?;
        for (index, name) in stages[0].names.iter().enumerate() {
            let first = adapter(pool.spec(), index as u32, 0);
            manager.register(name, lorapool::manager::Source::Memory(first));
        }
        let started = Instant::now();
        let mut start_bytes = None;
        let tally = thread::scope(|scope| -> Result<Tally> {
            let mut threads = Vec::new();
            for (i, (stage, lane)) in stages.iter().zip(lanes).enumerate() {
                let seed = self.seed.wrapping_mul(1000) + i as u64;
                threads.push(scope.spawn(move || stage.dispatch(&lane, seed)));
                threads.push(scope.spawn(move || stage.churn(seed + 100)));
            }
            let mut progress = Progress::new("soaking", self.seconds as usize * 10);
            for tick in 0..self.seconds * 10 {
                progress.start(manager.status().to_string().lines().next().unwrap_or_default());
                thread::sleep(Duration::from_millis(100));
                progress.done();
                if tick == self.seconds {
                    start_bytes = host_bytes();
                }
                if threads.iter().any(|thread| thread.is_finished()) {
                    break; // an error: no need to wait for the rest of the time
                }
            }
            stages.iter().for_each(|stage| stage.stop.store(true, Ordering::Relaxed));
            let mut tally = Tally::default();
            for thread in threads {
                let seen = thread.join().map_err(|_| Error::Input("a thread of the soak panicked".into()))?;
                tally.add(seen?);
            }
            Ok(tally)
        })?;
        let caps = gpu.caps();
        Ok(Document {
            backend: caps.backend,
            device: caps.device.clone(),
            driver: caps.driver.clone(),
            seconds: started.elapsed().as_secs_f64(),
            slots: self.slots,
            adapters: self.adapters,
            rows_checked: tally.rows,
            mismatches: tally.mismatches,
            steps: tally.steps,
            loads: tally.loads,
            promotions: tally.promotions,
            unloads: tally.unloads,
            activations: tally.activations,
            refusals: tally.refusals,
            worst_wait_ms: tally.worst_wait.as_secs_f64() * 1e3,
            leases_left: manager.status().residents.iter().map(|r| r.refs).sum(),
            host_bytes_start: start_bytes,
            host_bytes_end: host_bytes(),
            pool_bytes,
        })
    }

    /// What a row gets from each version of each adapter, alone in a pool of one slot with just its rank.
    fn answers(&self, gpu: &Arc<dyn GpuBackend>, op: Op) -> Result<BTreeMap<u64, Vec<u8>>> {
        let mut answers = BTreeMap::new();
        let mut progress = Progress::new("answers", (self.adapters * VERSIONS) as usize);
        let mut lanes: BTreeMap<u32, (LoraWeights, Lane)> = BTreeMap::new();
        for (name, version) in (0..self.adapters).flat_map(|name| (0..VERSIONS).map(move |version| (name, version))) {
            progress.start("");
            let spec = spec(1);
            let adapter = adapter(&spec, name, version);
            let max_rank = adapter.max_rank() as u32;
            let (weights, lane) = match lanes.remove(&max_rank) {
                Some(used) => used,
                None => {
                    let weights = LoraWeights::load(gpu, PoolSpec { max_rank, ..spec }, &[])?;
                    let lane = Lane::new(gpu, weights.storage(), op)?;
                    (weights, lane)
                }
            };
            let mut weights = weights;
            weights.swap(0, LoraAdapterInput { name: "alone", adapter: &adapter })?;
            lane.replay(&Plan::from_slots([0]))?;
            answers.insert(weights.slots[0].id(), lane.rows()?.swap_remove(0));
            lanes.insert(max_rank, (weights, lane));
            progress.done();
        }
        Ok(answers)
    }
}

/// Resident memory of this process, where the system says.
fn host_bytes() -> Option<u64> {
    memory_stats::memory_stats().map(|stats| stats.physical_mem as u64)
}

fn text(d: &Document, clean: bool) -> String {
    let verdict = if clean {
        format!("{} every row equals its own adapter's answer to the bit", good("ok"))
    } else {
        format!(
            "{} {} rows of {} are wrong, {} leases left over",
            bad("failed"),
            d.mismatches,
            d.rows_checked,
            d.leases_left
        )
    };
    let refusals: Vec<String> = d.refusals.iter().map(|(code, count)| format!("{count} {code}")).collect();
    let megabytes = |bytes: Option<u64>| bytes.map_or("?".to_owned(), |b| format!("{:.1} MB", b as f64 / 1e6));
    format!(
        "{} {} {}\n\
         {:.1} s, {} slots, {} adapters in {VERSIONS} versions, {ROWS} rows a batch\n\n\
         rows checked  {}\nmismatches    {}\nsteps         {}\nloads         {}\npromotions    {}\nunloads       {}\n\
         activations   {}\nrefusals      {}\nworst wait    {:.1} ms\nhost memory   {} -> {}\n\n{verdict}",
        bold(d.backend),
        d.device,
        d.driver,
        d.seconds,
        d.slots,
        d.adapters,
        grouped(d.rows_checked),
        d.mismatches,
        grouped(d.steps),
        grouped(d.loads),
        grouped(d.promotions),
        grouped(d.unloads),
        grouped(d.activations),
        if refusals.is_empty() { "none".to_owned() } else { refusals.join(", ") },
        d.worst_wait_ms,
        megabytes(d.host_bytes_start),
        megabytes(d.host_bytes_end),
    )
}
