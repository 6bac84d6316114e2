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
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cache::{HostCache, Ready, Stamp};
use super::lane::Lane;
use super::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, lock, read, wait, wait_until, write};
use super::{AdapterSlot, Lease, LoraWeights, Step};
use crate::adapter::{self, Adapter, BaseModel, ServedTables};
use crate::backend::GpuBackend;
use crate::error::{Error, Holder, Result};
use crate::pool::{Claim, Pool, SlotImage, Slots, Staging};

/// Where an adapter's bytes come from when it is needed.
#[derive(Clone, Debug)]
pub enum Source {
    /// A PEFT directory, read anew on each load but where [`Options::host_cache`] has what its files, by length
    /// and time of change, still hold.
    Dir(PathBuf),
    /// PEFT directories, read as one is, and weights: the sum of their deltas, as
    /// [`adapter::load_merged`] makes it.
    Merged(Vec<(PathBuf, f32)>),
    /// Host memory.
    Memory(Arc<Adapter>),
}

/// How a manager waits and checks.
#[derive(Clone, Debug)]
pub struct Options {
    /// Longest wait of a call: for its turn, for a slot, for a step to end, for users to leave.
    pub wait: Duration,
    /// Whether staged bytes are read back and compared before they are published.
    pub verify: bool,
    /// Bytes of page-locked host memory for adapters that were resident: they come back to a slot at the speed of
    /// the device's link. 0: none are kept.
    pub host_cache: u64,
    /// The base model that adapters from disk are checked against.
    pub base: Option<Arc<BaseModel>>,
    /// A folder of adapters: a name that is not registered is looked for there, and nowhere else.
    pub root: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self { wait: Duration::from_secs(30), verify: true, host_cache: 0, base: None, root: None }
    }
}

/// A load under way.
#[derive(Debug)]
struct Flight {
    id: u64,
    /// Those who wait for its end.
    waiting: usize,
    /// Leases to be taken at the moment of publication.
    leases: u32,
}

/// A load that ended, kept until all who waited for it have heard.
#[derive(Debug)]
struct Landed {
    waiting: usize,
    result: Result<u32, Arc<Error>>,
}

#[derive(Debug)]
pub(super) struct State {
    pub slots: Slots,
    sources: BTreeMap<Arc<str>, Source>,
    flights: BTreeMap<Arc<str>, Flight>,
    landed: BTreeMap<u64, Landed>,
    next_flight: u64,
    /// Steps under way.
    steps: usize,
    /// Someone changes tables or waits to: no new step begins.
    publishing: bool,
    /// What was pinned before it became active, too.
    pinned: Vec<Arc<str>>,
}

/// Adapters of one pool, by name. Methods may be called from any thread; no lock is held while bytes move.
#[derive(Debug)]
pub struct AdapterManager {
    weights: RwLock<LoraWeights>,
    pool: Arc<Pool>,
    gpu: Arc<dyn GpuBackend>,
    staging: Staging,
    cache: HostCache,
    lane: Lane,
    state: Mutex<State>,
    changed: Condvar,
    options: Options,
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
    /// ([`AdapterSlot::id`]). While it loads, a resident adapter of that name serves on; those who hold
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
    fn note_vacant(&self, state: &State, slot: u32) {
        if state.slots.slots()[slot as usize].name.is_none() {
            write(&self.weights).vacate(slot as usize);
        }
    }

    /// A user more on `name`, if a slot takes new users of it.
    fn enter(&self, state: &mut State, name: &str) -> Option<u32> {
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

    /// Makes `name` resident, takes `leases` (0 or 1) on it, and returns its slot. With a source, loads
    /// it even where the name is resident; takes no lease then.
    fn bring(&self, name: &str, source: Option<Source>, leases: u32, deadline: Instant) -> Result<u32> {
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
        let stamp = Stamp::of(source);
        if !anew && let Some(ready) = self.cache.get(name, &stamp) {
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
        self.cache.put(name, stamp, &ready);
        metrics::gauge!("lorapool_host_cache_bytes").set(self.cache.bytes() as f64);
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
    fn seat(&self, state: &mut State, name: &str, slot: u32) {
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

    /// Copies the staged bytes into a claimed slot and publishes its tables, between two steps.
    fn publish(&self, slot: u32, name: &str, ready: &Ready, deadline: Instant) -> Result<()> {
        let Ready { adapter, image } = ready;
        let layers = super::layers::layers_of(&self.pool, slot, adapter)?;
        self.begin_change(deadline)?;
        let mut stage =
            |encoder: &mut dyn crate::backend::Encoder| self.staging.copy_to(&self.pool, slot, image, encoder);
        let sent = self.pool.publish_image(&*self.gpu, slot, image, &mut stage);
        let sent = sent.map(|ticket| self.staging.busy_until(ticket));
        let mut state = lock(&self.state);
        if sent.is_ok() {
            let mut weights = write(&self.weights);
            let evicted = std::mem::take(&mut weights.slots[slot as usize].name);
            if !evicted.is_empty() && evicted != name {
                metrics::counter!("lorapool_evictions_total").increment(1);
                tracing::info!(slot, evicted, "evicted");
            }
            let generation = weights.slots[slot as usize].generation + 1;
            // An older adapter of the name that still drains keeps its slot, but not the name.
            let older = weights.slot_of(name).filter(|older| *older != slot as usize);
            if let Some(older) = older {
                weights.slots[older].name = format!("{name} (generation {})", weights.slots[older].generation);
                if weights.active == older {
                    weights.active = slot as usize;
                }
            }
            weights.slots[slot as usize] = AdapterSlot {
                name: name.to_owned(),
                adapter_config: adapter.config.clone(),
                layers,
                generation,
                digest: adapter.digest,
            };
            weights.overlay_raw[slot as usize] = None;
            weights.mirror();
            let pinned = state.pinned.iter().any(|pinned| **pinned == *name) || weights.active == slot as usize;
            drop(weights);
            state.slots.publish(slot, &name.into(), pinned);
            if let Some(older) = older {
                self.note_vacant(&state, older as u32);
            }
            self.seat(&mut state, name, slot);
        }
        self.end_change(state);
        sent
    }

    /// Waits until no step is under way, and keeps new ones from beginning.
    fn begin_change(&self, deadline: Instant) -> Result<()> {
        let mut state = lock(&self.state);
        while state.publishing {
            state =
                wait_until(&self.changed, state, deadline).map_err(|state| self.timed_out("another change", &state))?;
        }
        state.publishing = true;
        while state.steps > 0 {
            state = match wait_until(&self.changed, state, deadline) {
                Ok(state) => state,
                Err(state) => {
                    let error = self.timed_out("a step to end", &state);
                    self.end_change(state);
                    return Err(error);
                }
            };
        }
        Ok(())
    }

    /// Lets steps begin again.
    fn end_change(&self, mut state: MutexGuard<'_, State>) {
        state.publishing = false;
        drop(state);
        self.changed.notify_all();
    }

    /// Empties the tables of a slot that an unload has freed, unless it has been filled again.
    fn wipe(&self, slot: u32, generation: u64, deadline: Instant) -> Result<()> {
        self.begin_change(deadline)?;
        let still = {
            let state = lock(&self.state);
            let now = &state.slots.slots()[slot as usize];
            now.name.is_none() && now.generation == generation
        };
        let sent = match still {
            true => self.pool.clear(&*self.gpu, slot).map(|_| ()),
            false => Ok(()),
        };
        self.end_change(lock(&self.state));
        sent
    }

    fn timed_out(&self, what: &'static str, state: &State) -> Error {
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
