//! The type a server holds: adapters by name, leases on them, and swaps between steps.
//!
//! A new adapter goes through four stages, and only the last one touches what serves:
//!
//! ```text
//! read and check (host)  ->  stage (device, beside the pool)  ->  claim a slot  ->  publish between two steps
//! ```
//!
//! Loads pass one at a time, in the order in which they came; each waits at most for the leases of the
//! one slot that drains for it. So the k-th in line is served after at most k slots have turned over, and
//! every wait has a deadline. Loads of one name at one time are one load.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::cache::HostCache;
use super::flight::{Flight, Landed};
use super::lane::Lane;
use super::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, lock, read, wait, wait_until, write};
use super::{Lease, LoraWeights, Options, Source, Step};
use crate::adapter::ServedTables;
use crate::backend::GpuBackend;
use crate::error::{Error, Holder, Result};
use crate::pool::{Pool, Slots, Staging};
#[derive(Debug)]
pub(super) struct State {
    pub(super) slots: Slots,
    pub(super) sources: BTreeMap<Arc<str>, Source>,
    pub(super) flights: BTreeMap<Arc<str>, Flight>,
    pub(super) landed: BTreeMap<u64, Landed>,
    pub(super) next_flight: u64,
    /// Steps under way.
    pub(super) steps: usize,
    /// Someone changes tables or waits to: no new step begins.
    pub(super) publishing: bool,
    /// What was pinned before it became active, too.
    pub(super) pinned: Vec<Arc<str>>,
}

/// Adapters of one pool, by name. Methods may be called from any thread; no lock is held while bytes move.
#[derive(Debug)]
pub struct AdapterManager {
    pub(super) weights: RwLock<LoraWeights>,
    pub(super) pool: Arc<Pool>,
    pub(super) gpu: Arc<dyn GpuBackend>,
    pub(super) staging: Staging,
    pub(super) cache: HostCache,
    pub(super) lane: Lane,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
    pub(super) options: Options,
}

impl AdapterManager {
    /// Takes over a loaded set. Its adapters stay pinned; the other slots are the cache.
    ///
    /// # Errors
    /// The backend's, when it has no room to stage a slot.
    pub fn new(weights: LoraWeights, options: Options) -> Result<Arc<Self>> {
        let (pool, gpu) = (weights.storage().clone(), weights.gpu().clone());
        let staging = Staging::new(&*gpu, &pool)?;
        let mut slots = Slots::new(weights.max_loras as u32);
        let mut pinned = Vec::new();
        for (index, slot) in weights.slots.iter().enumerate().filter(|(_, slot)| !slot.is_vacant()) {
            let name: Arc<str> = slot.name.as_str().into();
            slots.seat(index as u32, &name, slot.generation, index < weights.pinned);
            if index < weights.pinned {
                pinned.push(name);
            }
        }
        let state = State {
            slots,
            sources: BTreeMap::new(),
            flights: BTreeMap::new(),
            landed: BTreeMap::new(),
            next_flight: 0,
            steps: 0,
            publishing: false,
            pinned,
        };
        Ok(Arc::new(Self {
            weights: RwLock::new(weights),
            pool,
            gpu,
            staging,
            cache: HostCache::new(options.host_cache),
            lane: Lane::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            options,
        }))
    }

    /// The pool that all slots are in.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The device.
    pub fn gpu(&self) -> &Arc<dyn GpuBackend> {
        &self.gpu
    }

    /// The set of loaded adapters, for reading. Publications wait for the guard: don't hold it across
    /// another call of the manager.
    pub fn weights(&self) -> RwLockReadGuard<'_, LoraWeights> {
        read(&self.weights)
    }

    /// Says where `name` comes from when it is first wanted. Nothing is read yet. A resident adapter of
    /// that name serves on until [`AdapterManager::load`].
    pub fn register(&self, name: &str, source: Source) {
        lock(&self.state).sources.insert(name.into(), source);
    }

    /// A lease on `name`, which is loaded first where it is registered but not resident.
    ///
    /// # Errors
    /// [`Error::UnknownAdapter`] for a name that is neither, never the base's output; [`Error::Escape`] for
    /// one that leads out of [`Options::root`];
    /// [`Error::Load`] with what the load failed of; [`Error::TimedOut`] with those who hold the slots.
    pub fn acquire(self: &Arc<Self>, name: &str) -> Result<Lease> {
        let started = Instant::now();
        let slot = self.bring(name, None, 1, started + self.options.wait)?;
        metrics::histogram!("lorapool_acquire_seconds").record(started.elapsed());
        Ok(Lease::new(self.clone(), slot, name))
    }

    /// A lease on `name` if it is resident now; `None` where it would have to be loaded.
    pub fn try_acquire(self: &Arc<Self>, name: &str) -> Option<Lease> {
        let slot = self.enter(&mut lock(&self.state), name)?;
        Some(Lease::new(self.clone(), slot, name))
    }

    /// A lease on the active adapter, whichever it is now.
    ///
    /// # Errors
    /// [`Error::NoActive`].
    pub fn acquire_active(self: &Arc<Self>) -> Result<Lease> {
        let active = || read(&self.weights).name.clone();
        let mut name = active();
        loop {
            if let Some(lease) = self.try_acquire(&name) {
                return Ok(lease);
            }
            // Another may have become active since.
            match active() {
                now if now == name => return Err(Error::NoActive { resident: read(&self.weights).adapter_names() }),
                now => name = now,
            }
        }
    }

    /// Makes `name` resident without a lease, and returns its slot. It does not become active.
    ///
    /// # Errors
    /// As [`AdapterManager::acquire`].
    pub fn promote(&self, name: &str) -> Result<u32> {
        self.bring(name, None, 0, Instant::now() + self.options.wait)
    }

    /// Loads `name` from `source`, now and whenever it is wanted again, and returns its identity
    /// ([`AdapterSlot::id`](super::AdapterSlot::id)). While it loads, a resident adapter of that name serves on; those who hold
    /// it keep it, and new leases get the new one. The same bytes again change nothing.
    ///
    /// # Errors
    /// As [`AdapterManager::acquire`]; an adapter that was resident still serves then.
    pub fn load(&self, name: &str, source: Source) -> Result<u64> {
        if name.is_empty() {
            return Err(Error::Input("an adapter's name can't be empty".into()));
        }
        let slot = self.bring(name, Some(source), 0, Instant::now() + self.options.wait)?;
        Ok(read(&self.weights).slots[slot as usize].id())
    }

    /// Forgets `name`: no new lease from now on; returns when its last user has left and its slot is free.
    ///
    /// # Errors
    /// [`Error::UnknownAdapter`]; [`Error::TimedOut`] when users stay past the wait: the slot is then
    /// freed when they leave.
    pub fn unload(&self, name: &str) -> Result<()> {
        let deadline = Instant::now() + self.options.wait;
        let mut state = lock(&self.state);
        while state.flights.contains_key(name) {
            state =
                wait_until(&self.changed, state, deadline).map_err(|state| self.timed_out("a load to end", &state))?;
        }
        let registered = state.sources.remove(name).is_some();
        state.pinned.retain(|pinned| **pinned != *name);
        self.cache.remove(name);
        let Some(slot) = state.slots.unload(name) else {
            drop(state);
            return if registered { Ok(()) } else { Err(read(&self.weights).unknown(name)) };
        };
        self.note_vacant(&state, slot);
        let generation = state.slots.slots()[slot as usize].generation;
        let gone = |state: &State| {
            let now = &state.slots.slots()[slot as usize];
            now.name.is_none() || now.generation != generation
        };
        while !gone(&state) {
            state =
                wait_until(&self.changed, state, deadline).map_err(|state| self.timed_out("users to leave", &state))?;
        }
        drop(state);
        metrics::counter!("lorapool_unloads_total").increment(1);
        self.wipe(slot, generation, deadline)
    }

    /// Makes a resident adapter the one that unnamed requests get; it is not evicted while it is.
    ///
    /// # Errors
    /// [`Error::UnknownAdapter`] when it is not resident.
    pub fn activate(&self, name: &str) -> Result<()> {
        let mut state = lock(&self.state);
        let mut weights = write(&self.weights);
        if state.slots.ready(name).is_none() {
            return Err(weights.unknown(name));
        }
        let old = weights.name.clone();
        weights.activate(name)?;
        if !state.pinned.iter().any(|pinned| **pinned == *old) {
            state.slots.pin(&old, false);
        }
        state.slots.pin(name, true);
        Ok(())
    }

    /// Says what embedding and head are served, between two steps: see [`LoraWeights::set_served_tables`]. Needed for
    /// adapters that replace token rows, unless the base's own files tell which ([`Options::base`]).
    ///
    /// # Errors
    /// As there; [`Error::TimedOut`] when a step does not end.
    pub fn set_served_tables(&self, tables: Arc<dyn ServedTables + Send + Sync>) -> Result<()> {
        self.begin_change(Instant::now() + self.options.wait)?;
        let set = write(&self.weights).set_served_tables(tables);
        // What was packed beside other tables may replace other rows.
        self.cache.clear();
        self.end_change(lock(&self.state));
        set
    }

    /// Begins a step. Slots and tables stay as they are until it is dropped; publications wait for that,
    /// and the next step waits for them. Hold it from the plan to the submission of the step's last work.
    pub fn step(&self) -> Step<'_> {
        let mut state = lock(&self.state);
        while state.publishing {
            state = wait(&self.changed, state);
        }
        state.steps += 1;
        Step::new(self)
    }

    pub(super) fn end_step(&self) {
        lock(&self.state).steps -= 1;
        self.changed.notify_all();
    }

    /// Ends a lease.
    pub(super) fn leave(&self, slot: u32) {
        let mut state = lock(&self.state);
        state.slots.release(slot);
        read(&self.weights).release_slot(slot as i32);
        self.note_vacant(&state, slot);
        drop(state);
        self.changed.notify_all();
    }

    /// Forgets in the loaded set who was in `slot`, if no one is any more.
    pub(super) fn note_vacant(&self, state: &State, slot: u32) {
        if state.slots.slots()[slot as usize].name.is_none() {
            write(&self.weights).vacate(slot as usize);
        }
    }

    /// A user more on `name`, if a slot takes new users of it.
    pub(super) fn enter(&self, state: &mut State, name: &str) -> Option<u32> {
        let slot = state.slots.acquire(name)?;
        read(&self.weights).acquire_slot(slot as i32);
        Some(slot)
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) fn in_line(&self) -> usize {
        self.lane.len()
    }

    pub(super) fn timed_out(&self, what: &'static str, state: &State) -> Error {
        let holds = state.slots.slots().iter().enumerate().filter(|(_, slot)| slot.refs > 0);
        let holders = holds.map(|(index, slot)| Holder {
            slot: index as u32,
            name: slot.name.as_deref().unwrap_or_default().to_owned(),
            refs: slot.refs,
        });
        metrics::counter!("lorapool_timeouts_total").increment(1);
        Error::TimedOut { what, waited: self.options.wait, holders: holders.collect() }
    }
}
