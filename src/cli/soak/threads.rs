//! What the threads of a soak do until time is up.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lorapool::Error;
use lorapool::manager::{AdapterManager, Lease, SlotRef, Source};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus as Rng;

use super::lane::{Lane, ROWS};
use super::model::{VERSIONS, adapter};

/// What one thread saw.
#[derive(Debug, Default)]
pub struct Tally {
    pub rows: u64,
    pub steps: u64,
    pub mismatches: u64,
    pub loads: u64,
    pub promotions: u64,
    pub unloads: u64,
    pub activations: u64,
    pub refusals: BTreeMap<&'static str, u64>,
    pub worst_wait: Duration,
}

impl Tally {
    /// Adds what another thread saw.
    pub fn add(&mut self, other: Tally) {
        self.rows += other.rows;
        self.steps += other.steps;
        self.mismatches += other.mismatches;
        self.loads += other.loads;
        self.promotions += other.promotions;
        self.unloads += other.unloads;
        self.activations += other.activations;
        self.worst_wait = self.worst_wait.max(other.worst_wait);
        for (code, count) in other.refusals {
            *self.refusals.entry(code).or_default() += count;
        }
    }

    /// Counts what a caller has to expect under load; anything else ends the soak.
    fn refused(&mut self, error: Error) -> Result<(), Error> {
        let code = error.code();
        if !matches!(code, "E_UNKNOWN_ADAPTER" | "E_TIMED_OUT" | "E_POOL_FULL") {
            return Err(error);
        }
        *self.refusals.entry(code).or_default() += 1;
        Ok(())
    }
}

/// What all threads share.
pub struct Stage {
    pub manager: Arc<AdapterManager>,
    pub names: Vec<String>,
    /// Identity of an adapter to the bytes of a row that has it.
    pub answers: BTreeMap<u64, Vec<u8>>,
    pub stop: AtomicBool,
}

impl Stage {
    fn source(&self, name: u32, rng: &mut Rng) -> Source {
        Source::Memory(adapter(self.manager.pool().spec(), name, rng.random_range(0..VERSIONS)))
    }

    fn name(&self, rng: &mut Rng) -> u32 {
        rng.random_range(0..self.names.len() as u32)
    }

    /// Dispatches batches of random adapters and base rows, and compares every row to the bit.
    pub fn dispatch(&self, lane: &Lane, seed: u64) -> Result<Tally, Error> {
        let mut rng = Rng::seed_from_u64(seed);
        let mut tally = Tally::default();
        let base = lane.base();
        while !self.stop.load(Ordering::Relaxed) {
            let leases = self.leases(&mut rng, &mut tally)?;
            let rows: Vec<Option<&Lease>> = (0..ROWS).map(|_| pick(&leases, &mut rng)).collect();
            {
                let step = self.manager.step();
                let slot = |lease: &Option<&Lease>| lease.map_or(SlotRef::Base, Lease::slot_ref);
                let plan = step.plan(rows.iter().map(|lease| (slot(lease), 1.0)))?;
                lane.replay(&plan)?;
            }
            for (row, lease) in lane.rows()?.iter().zip(&rows) {
                let expected = lease.map_or(Some(&base), |lease| self.answers.get(&lease.id()));
                tally.mismatches += u64::from(expected != Some(row));
                tally.rows += 1;
            }
            tally.steps += 1;
        }
        Ok(tally)
    }

    /// One lease that may have to wait, and a few of adapters that are resident anyway: who waits while
    /// holding a slot that another one waits for would wait for ever.
    fn leases(&self, rng: &mut Rng, tally: &mut Tally) -> Result<Vec<Lease>, Error> {
        let mut leases = Vec::new();
        let started = Instant::now();
        match self.manager.acquire(&self.names[self.name(rng) as usize]) {
            Ok(lease) => leases.push(lease),
            Err(error) => tally.refused(error)?,
        }
        tally.worst_wait = tally.worst_wait.max(started.elapsed());
        for _ in 0..rng.random_range(0..4) {
            leases.extend(self.manager.try_acquire(&self.names[self.name(rng) as usize]));
        }
        Ok(leases)
    }

    /// Loads, replaces, promotes, activates and unloads in random order.
    pub fn churn(&self, seed: u64) -> Result<Tally, Error> {
        let mut rng = Rng::seed_from_u64(seed);
        let mut tally = Tally::default();
        while !self.stop.load(Ordering::Relaxed) {
            let index = self.name(&mut rng);
            let name = &self.names[index as usize];
            let (count, done) = match rng.random_range(0..10) {
                0 => {
                    let done = self.manager.unload(name);
                    // It may come back, as other bytes perhaps.
                    self.manager.register(name, self.source(index, &mut rng));
                    (&mut tally.unloads, done)
                }
                1 => (&mut tally.activations, self.manager.activate(name)),
                2..5 => (&mut tally.promotions, self.manager.promote(name).map(|_| ())),
                _ => (&mut tally.loads, self.manager.load(name, self.source(index, &mut rng)).map(|_| ())),
            };
            match done {
                Ok(()) => *count += 1,
                Err(error) => tally.refused(error)?,
            }
        }
        Ok(tally)
    }
}

/// A row's lease, or none for a row of the base.
fn pick<'a>(leases: &'a [Lease], rng: &mut Rng) -> Option<&'a Lease> {
    leases.get(rng.random_range(0..leases.len() + 1))
}
