//! The kernels on the CPU, in safe Rust, on any machine: what runs where there is no GPU.
//!
//! It keeps to the contract as a device would: memory has opaque addresses, kernels check what tables
//! say, work runs in the order of submission. A submission runs to its end in [`GpuBackend::submit`],
//! on the caller's thread when it is small and on the backend's own threads when it is not. Each
//! output's sum is taken in one order whatever the number of threads, and the same on every processor.

mod bgmv;
mod encoder;
mod expand;
mod expert_rows;
mod graph;
mod host;
mod job;
mod logits;
mod memory;
mod module;
mod sgmv;
mod shrink;
mod simd;
mod tokens;

use std::fmt::{self, Debug};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use self::encoder::Recording;
use self::graph::CpuGraph;
use self::memory::{Want, borrow};
use super::{Caps, DeviceClass, GpuBackend, Graph, Pipeline, Record, Ticket, WeightLayout};
use crate::contract::{Kernel, Spec};
use crate::error::{Error, Result};
use crate::memory::Region;

/// Multiply-adds that a thread takes at a time: some 10 microseconds, a few times what handing them over costs.
const GRAIN: u64 = 1 << 16;

/// Submissions of less work than this stay on the caller's thread.
const SERIAL: u64 = 4 * GRAIN;

/// The one device: this machine's processor.
pub fn devices() -> Result<Vec<Caps>> {
    Ok(vec![caps(threads_of_machine())])
}

/// Opens device `index` of [`devices`].
pub fn open(index: usize) -> Result<Arc<dyn GpuBackend>> {
    if index != 0 {
        return Err(Error::Unavailable { backend: "cpu", reason: format!("no device {index}; there is one, 0") });
    }
    Ok(Arc::new(CpuBackend::new()))
}

/// The CPU backend.
///
/// Each has its own threads, started with the first work that is worth them.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
/// use lorapool::backend::{GpuBackend, cpu::CpuBackend};
///
/// let backend = CpuBackend::with_threads(NonZeroUsize::MIN);
/// let memory = backend.alloc(8, "two words")?;
/// backend.submit(&mut |encoder| encoder.write(&memory.slice(4, 4)?, &[1, 2, 3, 4]))?;
/// assert_eq!(backend.read(&memory)?, [0, 0, 0, 0, 1, 2, 3, 4]);
/// # Ok::<(), lorapool::Error>(())
/// ```
#[derive(Debug)]
pub struct CpuBackend {
    device: Arc<Device>,
}

impl CpuBackend {
    /// A backend with a thread for each processor that the system gives to this process.
    pub fn new() -> Self {
        Self::with_threads(threads_of_machine())
    }

    /// A backend with `threads` threads; with one, all work stays on the thread that submits it.
    pub fn with_threads(threads: NonZeroUsize) -> Self {
        let device = Device {
            caps: caps(threads),
            threads,
            pool: OnceLock::new(),
            queue: Mutex::new(()),
            completed: AtomicU64::new(0),
        };
        Self { device: Arc::new(device) }
    }

    /// Calls `f` with the bytes of `region` where they lie, after all work submitted so far, and keeps
    /// other work away from them until it returns. An engine on the CPU can thus read outputs, and with
    /// [`CpuBackend::with_bytes_mut`] leave inputs, without a copy.
    ///
    /// `f` must not use this backend: it would wait for itself.
    ///
    /// # Errors
    /// [`Error::Shape`] when the region is another backend's.
    pub fn with_bytes<R>(&self, region: &Region, f: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let _turn = self.device.turn();
        borrow(&[Want { region, write: false }], |bytes| f(bytes[0].get()))
    }

    /// The same, to write.
    ///
    /// # Errors
    /// [`Error::Shape`] when the region is another backend's.
    pub fn with_bytes_mut<R>(&self, region: &Region, f: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        let _turn = self.device.turn();
        borrow(&[Want { region, write: true }], |bytes| f(bytes[0].get_mut()))
    }
}

impl Default for CpuBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl GpuBackend for CpuBackend {
    fn caps(&self) -> &Caps {
        &self.device.caps
    }

    fn alloc(&self, len: u64, label: &str) -> Result<Region> {
        let limit = self.device.caps.max_alloc;
        if len > limit {
            return Err(Error::Limit { what: "size of an allocation in bytes", found: len, limit, hint: "" });
        }
        memory::alloc(len, label)
    }

    fn load(&self, kernel: Kernel, spec: Spec) -> Result<Pipeline> {
        Ok(Pipeline::new(kernel, spec, Arc::new(module::CpuKernel { kernel, spec })))
    }

    fn submit(&self, record: Record<'_>) -> Result<Ticket> {
        let mut recording = Recording::default();
        record(&mut recording)?;
        self.device.run(&recording)
    }

    fn capture(&self, record: Record<'_>) -> Result<Box<dyn Graph>> {
        let mut recording = Recording::default();
        record(&mut recording)?;
        Ok(Box::new(CpuGraph { device: self.device.clone(), recording }))
    }

    fn completed(&self) -> Result<Ticket> {
        Ok(Ticket(self.device.completed.load(Ordering::Acquire)))
    }

    fn wait(&self, ticket: Ticket) -> Result<()> {
        // A ticket is only ever given out for finished work: there is nothing to wait for.
        let last = self.device.completed.load(Ordering::Acquire);
        if ticket.0 > last {
            return Err(Error::shape("ticket", ticket.0, format!("one that was given out, up to {last}")));
        }
        Ok(())
    }

    fn read(&self, src: &Region) -> Result<Vec<u8>> {
        self.with_bytes(src, <[u8]>::to_vec)
    }
}

/// The queue and the threads behind it.
struct Device {
    caps: Caps,
    threads: NonZeroUsize,
    /// Only submissions run here, one at a time, and only the threads outside it hold the queue:
    /// a thread that waits in here can never pick up work that waits for the queue.
    pool: OnceLock<Option<ThreadPool>>,
    queue: Mutex<()>,
    completed: AtomicU64,
}

impl Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cpu with {} threads", self.threads)
    }
}

impl Device {
    /// Waits until the work of all earlier submissions is done, and keeps later ones waiting.
    fn turn(&self) -> impl Drop + '_ {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, recording: &Recording) -> Result<Ticket> {
        // A caller that is itself a thread of some rayon pool must not pick up its pool's other work
        // while it holds the queue, since that may submit too. A plain thread just waits.
        let pool = (recording.work() >= SERIAL).then(|| self.pool()).flatten();
        match pool {
            Some(pool) if rayon::current_thread_index().is_some() => std::thread::scope(|scope| {
                let work = scope.spawn(|| self.run_on(Some(pool), recording));
                work.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            }),
            _ => self.run_on(pool, recording),
        }
    }

    fn run_on(&self, pool: Option<&ThreadPool>, recording: &Recording) -> Result<Ticket> {
        let _turn = self.turn();
        match pool {
            Some(pool) => pool.install(|| recording.run(GRAIN))?,
            None => recording.run(u64::MAX)?,
        }
        Ok(Ticket(self.completed.fetch_add(1, Ordering::AcqRel) + 1))
    }

    /// The threads, if there are to be any and the system lets us have them.
    fn pool(&self) -> Option<&ThreadPool> {
        let start = || {
            if self.threads.get() == 1 {
                return None;
            }
            let name = |i| format!("lorapool-cpu-{i}");
            match ThreadPoolBuilder::new().num_threads(self.threads.get()).thread_name(name).build() {
                Ok(pool) => Some(pool),
                Err(error) => {
                    tracing::warn!(%error, "no threads for the cpu backend: working on the caller's");
                    None
                }
            }
        };
        self.pool.get_or_init(start).as_ref()
    }
}

fn threads_of_machine() -> NonZeroUsize {
    std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
}

fn caps(threads: NonZeroUsize) -> Caps {
    let memory = host::memory().map_or(0, |m| m.total);
    // `Avx2(Avx2 { .. })`: only the first word is for people.
    let level = format!("{:?}", simd::level());
    let level = level.split('(').next().unwrap_or_default();
    Caps {
        backend: "cpu",
        device: format!("{} ({threads} threads)", host::processor()),
        driver: format!("lorapool {}", env!("CARGO_PKG_VERSION")),
        api: format!("{} {level}", std::env::consts::ARCH).to_lowercase(),
        class: DeviceClass::Cpu,
        memory,
        layout: WeightLayout::SlotMajor,
        max_alloc: if memory == 0 { isize::MAX as u64 } else { memory.min(isize::MAX as u64) },
        max_binding: u64::MAX,
        binding_align: 1,
        max_groups: [u32::MAX; 2],
        subgroup: [1; 2],
        z_parts: 0,
    }
}
