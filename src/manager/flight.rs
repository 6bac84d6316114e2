//! A load under way: from a name to a slot that serves it, for all who wait for it.

use std::sync::Arc;
use std::time::Instant;

use super::Source;
use super::cache::Ready;
use super::manager::{AdapterManager, State};
use super::sync::{MutexGuard, lock, read, wait_until};
use crate::adapter::{self, Adapter};
use crate::error::{Error, Result};
use crate::pool::{Claim, SlotImage};

/// A load under way.
#[derive(Debug)]
pub(super) struct Flight {
    id: u64,
    /// Those who wait for its end.
    waiting: usize,
    /// Leases to be taken at the moment of publication.
    leases: u32,
}

/// A load that ended, kept until all who waited for it have heard.
#[derive(Debug)]
pub(super) struct Landed {
    waiting: usize,
    result: Result<u32, Arc<Error>>,
}

impl AdapterManager {
    /// Makes `name` resident, takes `leases` (0 or 1) on it, and returns its slot. With a source, loads
    /// it even where the name is resident; takes no lease then.
    pub(super) fn bring(&self, name: &str, source: Option<Source>, leases: u32, deadline: Instant) -> Result<u32> {
        loop {
            let mut state = lock(&self.state);
            if source.is_none() {
                let resident = match leases {
                    0 => state.slots.ready(name),
                    _ => self.enter(&mut state, name),
                };
                if let Some(slot) = resident {
                    return Ok(slot);
                }
            }
            let joined = state.flights.get_mut(name).map(|flight| {
                flight.waiting += 1;
                flight.leases += leases;
                flight.id
            });
            let flight = match joined {
                Some(id) => id,
                None => {
                    let from = source.clone().or_else(|| state.sources.get(name).cloned());
                    let from = from.map_or_else(|| self.look_up(name), Ok)?;
                    let id = self.take_off(&mut state, name, leases);
                    drop(state);
                    match self.fly(name, &from, source.is_some(), deadline) {
                        Ok(_) if source.is_some() => drop(lock(&self.state).sources.insert(name.into(), from)),
                        Ok(_) => {}
                        Err(error) => self.crash(name, error),
                    }
                    state = lock(&self.state);
                    id
                }
            };
            let leads = joined.is_none();
            match self.hear(state, flight, leases, deadline)? {
                // Another one's source landed, or another one's time ran out: ours hasn't.
                _ if !leads && source.is_some() => {}
                Err(error) if !leads && matches!(*error, Error::TimedOut { .. }) && Instant::now() < deadline => {}
                Ok(slot) => return Ok(slot),
                Err(error) => return Err(Error::Load { name: name.to_owned(), source: error }),
            }
        }
    }

    /// Where a name that no one registered comes from: the root, if there is one.
    fn look_up(&self, name: &str) -> Result<Source> {
        let unknown = || read(&self.weights).unknown(name);
        match adapter::confine(self.options.root.as_deref().ok_or_else(unknown)?, name) {
            Ok(dir) => Ok(Source::Dir(dir)),
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Err(unknown()),
            Err(error) => Err(error),
        }
    }

    fn take_off(&self, state: &mut State, name: &str, leases: u32) -> u64 {
        let id = state.next_flight;
        state.next_flight += 1;
        state.flights.insert(name.into(), Flight { id, waiting: 1, leases });
        id
    }

    /// Waits for a flight's end and leaves it. The inner result is the flight's.
    fn hear(
        &self,
        mut state: MutexGuard<'_, State>,
        id: u64,
        leases: u32,
        deadline: Instant,
    ) -> Result<Result<u32, Arc<Error>>> {
        loop {
            if let Some(landed) = state.landed.get_mut(&id) {
                let result = landed.result.clone();
                landed.waiting -= 1;
                if landed.waiting == 0 {
                    state.landed.remove(&id);
                }
                return Ok(result);
            }
            state = match wait_until(&self.changed, state, deadline) {
                Ok(state) => state,
                Err(mut state) => {
                    let error = self.timed_out("a load", &state);
                    if let Some(flight) = state.flights.values_mut().find(|flight| flight.id == id) {
                        flight.waiting -= 1;
                        flight.leases -= leases;
                    }
                    return Err(error);
                }
            };
        }
    }

    /// Ends a flight that failed: tells those who wait. One that succeeded has ended already ([`Self::seat`]).
    fn crash(&self, name: &str, error: Error) {
        let mut state = lock(&self.state);
        if let Some(flight) = state.flights.remove(name) {
            state.landed.insert(flight.id, Landed { waiting: flight.waiting, result: Err(Arc::new(error)) });
        }
        drop(state);
        self.changed.notify_all();
    }

    /// All stages of one load. `anew`: whatever the host cache has.
    fn fly(&self, name: &str, source: &Source, anew: bool, deadline: Instant) -> Result<u32> {
        let span = tracing::info_span!("load", adapter = name);
        let _entered = span.enter();
        let started = Instant::now();
        let result = self.stages(name, source, anew, deadline);
        metrics::histogram!("lorapool_load_seconds").record(started.elapsed());
        match &result {
            Ok(slot) => {
                metrics::counter!("lorapool_loads_total").increment(1);
                tracing::info!(slot, seconds = started.elapsed().as_secs_f64(), "loaded");
            }
            Err(error) => {
                metrics::counter!("lorapool_refusals_total", "code" => error.code()).increment(1);
                tracing::warn!(code = error.code(), %error, "refused");
            }
        }
        result
    }

    fn stages(&self, name: &str, source: &Source, anew: bool, deadline: Instant) -> Result<u32> {
        let ready = self.prepare(name, source, anew)?;
        let Some(_inside) = self.lane.enter(deadline) else {
            return Err(self.timed_out("its turn to load", &lock(&self.state)));
        };
        if let Some(slot) = self.same_bytes(name, &ready.adapter) {
            return Ok(slot);
        }
        self.staging.fill(&*self.gpu, &ready.image)?;
        if self.options.verify {
            self.staging.verify(&*self.gpu, &ready.image)?;
        }
        let slot = self.claim(name, deadline)?;
        let published = self.publish(slot, name, &ready, deadline);
        if published.is_err() {
            lock(&self.state).slots.abandon(slot);
            self.changed.notify_all();
        }
        published.map(|()| slot)
    }

    /// The slot image of an adapter whose elements are of no use beside it.
    fn pack(&self, adapter: Adapter) -> Result<(Arc<Adapter>, SlotImage)> {
        let mut adapter = read(&self.weights).compared(adapter)?;
        let image = self.cache.pack(&*self.gpu, &self.pool, &adapter)?;
        adapter.forget_elements();
        Ok((Arc::new(adapter), image))
    }

    /// The slot image of `name`: from the host cache, or read, checked and packed.
    fn prepare(&self, name: &str, source: &Source, anew: bool) -> Result<Arc<Ready>> {
        // Before the bytes are read: a change while they are must not look like what was read.
        let stamp = self.cache.stamp(&self.pool, source);
        if !anew && let Some(ready) = stamp.as_ref().and_then(|stamp| self.cache.get(name, stamp)) {
            metrics::counter!("lorapool_host_cache_hits_total").increment(1);
            return Ok(ready);
        }
        let (adapter, image) = match source {
            Source::Memory(adapter) if adapter.raw_tokens.is_empty() => {
                (adapter.clone(), self.cache.pack(&*self.gpu, &self.pool, adapter)?)
            }
            Source::Memory(adapter) => self.pack(adapter.as_ref().clone())?,
            Source::Dir(dir) => self.pack(adapter::load(dir, self.options.base.as_deref())?)?,
            Source::Merged(parts) => self.pack(adapter::load_merged(parts, self.options.base.as_deref())?)?,
        };
        let ready = Arc::new(Ready { adapter, image });
        if let Some(stamp) = stamp {
            self.cache.put(name, stamp, &ready);
            metrics::gauge!("lorapool_host_cache_bytes").set(self.cache.bytes() as f64);
        }
        Ok(ready)
    }

    /// The slot that serves these very bytes under this name already; takes the waiting leases on it.
    fn same_bytes(&self, name: &str, adapter: &Adapter) -> Option<u32> {
        let mut state = lock(&self.state);
        let slot = state.slots.ready(name)?;
        if read(&self.weights).slots[slot as usize].digest != adapter.digest {
            return None;
        }
        state.slots.touch(slot);
        self.seat(&mut state, name, slot);
        Some(slot)
    }

    /// Ends `name`'s load in `slot`: takes the leases that wait for it, in the same breath as it becomes
    /// visible, so that no one who waited can lose the slot again before using it.
    pub(super) fn seat(&self, state: &mut State, name: &str, slot: u32) {
        let Some(flight) = state.flights.remove(name) else { return };
        (0..flight.leases).for_each(|_| {
            self.enter(state, name);
        });
        state.landed.insert(flight.id, Landed { waiting: flight.waiting, result: Ok(slot) });
        self.changed.notify_all();
    }

    /// Waits for a slot.
    fn claim(&self, name: &str, deadline: Instant) -> Result<u32> {
        let name: Arc<str> = name.into();
        let mut state = lock(&self.state);
        loop {
            match state.slots.claim(&name) {
                Claim::Granted(slot) => return Ok(slot),
                Claim::Never => {
                    let pinned = state.slots.slots().iter().filter(|slot| slot.pinned).count();
                    return Err(Error::PoolFull { slots: state.slots.slots().len(), pinned });
                }
                Claim::Wait => {
                    state = wait_until(&self.changed, state, deadline).map_err(|mut state| {
                        state.slots.give_up();
                        self.timed_out("a free slot", &state)
                    })?;
                }
            }
        }
    }
}
