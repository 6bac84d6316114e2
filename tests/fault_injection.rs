//! A device that fails at its n-th call, for every n through a start, a load, a replacement, a promotion
//! with eviction and an unload: whatever fails, everyone else's output stays, to the bit, and the next try works.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use common::{Rig, adapter, sites, spec};
use lorapool::backend::{Caps, Encoder, GpuBackend, Graph, Launch, Pipeline, Record, Ticket, open};
use lorapool::contract::{Kernel, Spec};
use lorapool::manager::{AdapterManager, LoraWeights, Options, SlotRef, Source};
use lorapool::{Error, Region, Result};

/// The CPU backend, until `left` calls have been made; every call after that fails.
#[derive(Debug)]
struct Faulty {
    inner: Arc<dyn GpuBackend>,
    left: Arc<AtomicI64>,
    allocations: Arc<AtomicI64>,
}

fn call(left: &AtomicI64, what: &'static str) -> Result<()> {
    match left.fetch_sub(1, Ordering::SeqCst) {
        n if n > 0 => Ok(()),
        _ => Err(Error::Driver { call: what, message: "injected".into() }),
    }
}

/// An encoder whose calls count too: a recording can fail half way.
struct Recorder<'a> {
    inner: &'a mut dyn Encoder,
    left: &'a AtomicI64,
}

impl Encoder for Recorder<'_> {
    fn launch(&mut self, batch: &[Launch<'_>]) -> Result<()> {
        call(self.left, "launch")?;
        self.inner.launch(batch)
    }

    fn write(&mut self, dst: &Region, bytes: &[u8]) -> Result<()> {
        call(self.left, "write")?;
        self.inner.write(dst, bytes)
    }

    fn copy(&mut self, dst: &Region, src: &Region) -> Result<()> {
        call(self.left, "copy")?;
        self.inner.copy(dst, src)
    }
}

impl GpuBackend for Faulty {
    fn caps(&self) -> &Caps {
        self.inner.caps()
    }

    fn alloc(&self, len: u64, label: &str) -> Result<Region> {
        call(&self.left, "alloc")?;
        self.allocations.fetch_add(1, Ordering::SeqCst);
        self.inner.alloc(len, label)
    }

    fn load(&self, kernel: Kernel, spec: Spec) -> Result<Pipeline> {
        call(&self.left, "load")?;
        self.inner.load(kernel, spec)
    }

    fn submit(&self, record: Record<'_>) -> Result<Ticket> {
        call(&self.left, "submit")?;
        self.inner.submit(&mut |inner| record(&mut Recorder { inner, left: &self.left }))
    }

    fn capture(&self, record: Record<'_>) -> Result<Box<dyn Graph>> {
        call(&self.left, "capture")?;
        self.inner.capture(record)
    }

    fn completed(&self) -> Result<Ticket> {
        self.inner.completed()
    }

    fn wait(&self, ticket: Ticket) -> Result<()> {
        call(&self.left, "wait")?;
        self.inner.wait(ticket)
    }

    fn read(&self, src: &Region) -> Result<Vec<u8>> {
        call(&self.left, "read")?;
        self.inner.read(src)
    }
}

const NEVER: i64 = i64::MAX;

fn faulty() -> (Arc<dyn GpuBackend>, Arc<AtomicI64>) {
    let left = Arc::new(AtomicI64::new(NEVER));
    let inner = open("cpu", 0).unwrap();
    (Arc::new(Faulty { inner, left: left.clone(), allocations: Arc::default() }), left)
}

fn memory(seed: u64) -> Source {
    Source::Memory(Arc::new(adapter(&sites(), 4, seed)))
}

/// Runs `attempt` on a fresh rig with the n-th call failing, for n = 0, 1, ... until it succeeds; after
/// each failure `intact` must hold and the same attempt must work.
fn at_every_call(attempt: impl Fn(&Rig) -> Result<()>, intact: impl Fn(&Rig), done: impl Fn(&Rig)) {
    for n in 0.. {
        let (gpu, left) = faulty();
        let rig = Rig::on(gpu, &[("kept", 1), ("old", 2)], 3, Options::default());
        rig.manager.load("cached", memory(3)).unwrap();
        left.store(n, Ordering::SeqCst);
        let result = attempt(&rig);
        left.store(NEVER, Ordering::SeqCst);
        if result.is_ok() {
            assert!(n > 1, "the device was asked at all");
            done(&rig);
            return;
        }
        assert_eq!(result.unwrap_err().code(), "E_DRIVER");
        intact(&rig);
        assert_eq!(rig.row(rig.manager.acquire("kept").unwrap().slot_ref()), rig.alone(1), "call {n}");
        attempt(&rig).unwrap();
        done(&rig);
        assert_eq!(rig.manager.status().residents.iter().map(|r| r.refs).sum::<u32>(), 0);
    }
}

fn row(rig: &Rig, name: &str) -> Option<Vec<f32>> {
    let lease = rig.manager.try_acquire(name)?;
    Some(rig.row(lease.slot_ref()))
}

#[test]
fn a_replacement_that_fails_leaves_the_old_adapter_serving() {
    at_every_call(
        |rig| rig.manager.load("old", memory(5)).map(|_| ()),
        |rig| assert_eq!(row(rig, "old"), Some(rig.alone(2))),
        |rig| assert_eq!(row(rig, "old"), Some(rig.alone(5))),
    );
}

#[test]
fn a_promotion_that_fails_evicts_no_one() {
    at_every_call(
        |rig| {
            rig.manager.register("new", memory(6));
            rig.manager.promote("new").map(|_| ())
        },
        |rig| {
            assert_eq!(row(rig, "cached"), Some(rig.alone(3)));
            assert_eq!(row(rig, "new"), None);
        },
        |rig| {
            assert_eq!(row(rig, "new"), Some(rig.alone(6)));
            assert_eq!(row(rig, "cached"), None);
        },
    );
}

#[test]
fn an_unload_that_fails_to_wipe_leaves_the_slot_free_and_serves_no_one() {
    for n in 0.. {
        let (gpu, left) = faulty();
        let rig = Rig::on(gpu, &[("kept", 1)], 2, Options::default());
        rig.manager.load("gone", memory(3)).unwrap();
        left.store(n, Ordering::SeqCst);
        let result = rig.manager.unload("gone");
        left.store(NEVER, Ordering::SeqCst);
        assert_eq!(row(&rig, "gone"), None);
        assert_eq!(row(&rig, "kept"), Some(rig.alone(1)));
        rig.manager.load("next", memory(4)).unwrap();
        assert_eq!(row(&rig, "next"), Some(rig.alone(4)));
        if result.is_ok() {
            break;
        }
    }
}

#[test]
fn a_swap_by_index_that_fails_leaves_bytes_tables_and_names() {
    for n in 0.. {
        let (gpu, left) = faulty();
        let (p, q) = (adapter(&sites(), 4, 1), adapter(&sites()[..1], 2, 2));
        let input = |name, adapter| lorapool::manager::LoraAdapterInput { name, adapter };
        let mut weights = LoraWeights::load(&gpu, spec(2), &[input("p", &p)]).unwrap();
        let read = |w: &LoraWeights| {
            let blocks = w.storage().blocks().iter().map(|block| gpu.read(block).unwrap());
            (blocks.collect::<Vec<_>>(), gpu.read(w.storage().tables().region()).unwrap(), w.adapter_names())
        };
        let before = read(&weights);
        left.store(n, Ordering::SeqCst);
        let result = weights.swap(0, input("q", &q));
        left.store(NEVER, Ordering::SeqCst);
        if result.is_ok() {
            assert_ne!(read(&weights), before);
            break;
        }
        assert_eq!(read(&weights), before, "call {n}");
        // The host's copy of the tables is as it was, too: a later swap of another slot publishes the old entries.
        weights.swap(1, input("r", &q)).unwrap();
        let manager = AdapterManager::new(weights, Options::default()).unwrap();
        let rig = Rig { manager };
        assert_eq!(rig.row(SlotRef::Slot(0)), rig.alone(1));
    }
}

#[test]
fn a_start_that_fails_is_an_error() {
    for n in 0.. {
        let (gpu, left) = faulty();
        left.store(n, Ordering::SeqCst);
        let p = adapter(&sites(), 4, 1);
        let input = lorapool::manager::LoraAdapterInput { name: "p", adapter: &p };
        let result =
            LoraWeights::load(&gpu, spec(2), &[input]).and_then(|w| AdapterManager::new(w, Options::default()));
        match result {
            Ok(_) => break,
            Err(error) => assert_eq!(error.code(), "E_DRIVER"),
        }
    }
}

#[test]
fn loads_replacements_and_unloads_take_no_device_memory_after_the_start() {
    let allocations = Arc::new(AtomicI64::new(0));
    let left = Arc::new(AtomicI64::new(NEVER));
    let inner = open("cpu", 0).unwrap();
    let gpu: Arc<dyn GpuBackend> = Arc::new(Faulty { inner, left, allocations: allocations.clone() });
    let rig = Rig::on(gpu, &[("kept", 1)], 3, Options::default());
    let at_start = allocations.load(Ordering::SeqCst);
    for cycle in 0..500 {
        rig.manager.load("p", memory(cycle % 5)).unwrap();
        rig.manager.load("q", memory(5 + cycle % 3)).unwrap();
        drop(rig.manager.acquire("p").unwrap());
        rig.manager.unload("q").unwrap();
    }
    assert_eq!(allocations.load(Ordering::SeqCst), at_start);
}
