//! Which slot holds what, and who uses it: a pure state machine, no device and no lock.
//!
//! A slot is vacant, serves an adapter, or drains: it still serves those who hold it, takes no one new,
//! and goes to the claim that waits for it when the last one leaves. At most one claim is open at a
//! time; it takes a vacant slot, else an idle one, and only where all are in use does it make one drain.
//! So a claim waits for the leases of one slot, whatever the others do.

use std::sync::Arc;

/// Whether new users are let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Nothing is in it.
    Vacant,
    /// It serves its adapter.
    Ready,
    /// It serves those who hold it already; then it is free.
    Draining,
    /// A claim has it: its adapter is still in place, and no one may use it.
    Claimed,
}

/// One slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The adapter's name; `None` in a vacant slot.
    pub name: Option<Arc<str>>,
    /// Whether new users are let in.
    pub phase: Phase,
    /// Leases.
    pub refs: u32,
    /// Tick of the last use.
    pub last_used: u64,
    /// Adapters it has held so far.
    pub generation: u64,
    /// Never given to another name.
    pub pinned: bool,
}

/// What became of a request for a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// This slot is the claim's: fill it, then [`Slots::publish`] or [`Slots::abandon`].
    Granted(u32),
    /// All slots are in use; one drains. Ask again after a release.
    Wait,
    /// All slots are pinned by other adapters: no wait can help.
    Never,
}

/// The slots of a pool.
#[derive(Clone, Debug)]
pub struct Slots {
    slots: Vec<Slot>,
    tick: u64,
    /// The slot that drains for the open claim.
    drain: Option<u32>,
    /// The name that the open claim is for.
    open: Option<Arc<str>>,
}

impl Slots {
    /// `count` vacant slots.
    pub fn new(count: u32) -> Self {
        let slot = Slot { name: None, phase: Phase::Vacant, refs: 0, last_used: 0, generation: 0, pinned: false };
        Self { slots: vec![slot; count as usize], tick: 0, drain: None, open: None }
    }

    /// Puts an adapter that was loaded before into a vacant slot.
    pub fn seat(&mut self, slot: u32, name: &Arc<str>, generation: u64, pinned: bool) {
        let entry = &mut self.slots[slot as usize];
        *entry = Slot { name: Some(name.clone()), phase: Phase::Ready, generation, pinned, ..*entry };
    }

    /// All slots, by index.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The slot that takes new users of `name`.
    pub fn ready(&self, name: &str) -> Option<u32> {
        self.find(name, |phase| phase == Phase::Ready)
    }

    /// The slot that holds `name` in any phase but vacant, the newest where an older one still drains.
    pub fn holding(&self, name: &str) -> Option<u32> {
        self.ready(name).or_else(|| self.find(name, |phase| phase != Phase::Vacant))
    }

    fn find(&self, name: &str, phase: impl Fn(Phase) -> bool) -> Option<u32> {
        let found = self.slots.iter().position(|s| s.name.as_deref() == Some(name) && phase(s.phase));
        found.map(|slot| slot as u32)
    }

    /// Counts a user of `name` and returns its slot; `None` where no slot takes new users of that name.
    pub fn acquire(&mut self, name: &str) -> Option<u32> {
        let slot = self.ready(name)?;
        self.touch(slot);
        self.slots[slot as usize].refs += 1;
        Some(slot)
    }

    /// One user less. Returns whether the slot is now idle, so that a claim may be asked again.
    ///
    /// # Panics
    /// On a release without an acquire: a lost count would let a slot in use be overwritten.
    pub fn release(&mut self, slot: u32) -> bool {
        let entry = &mut self.slots[slot as usize];
        assert!(entry.refs > 0, "slot {slot} released more often than acquired");
        entry.refs -= 1;
        if entry.refs == 0 && entry.phase == Phase::Draining && self.drain != Some(slot) {
            self.vacate(slot);
        }
        self.slots[slot as usize].refs == 0
    }

    /// Marks a slot as used just now.
    pub fn touch(&mut self, slot: u32) {
        self.tick += 1;
        self.slots[slot as usize].last_used = self.tick;
    }

    /// Keeps `name`'s slot from being given to another name, or ends that.
    pub fn pin(&mut self, name: &str, pinned: bool) -> bool {
        let slot = self.ready(name);
        if let Some(slot) = slot {
            self.slots[slot as usize].pinned = pinned;
        }
        slot.is_some()
    }

    /// A slot for a new adapter called `name`. In this order: a vacant one; the idle one of an older
    /// adapter of that name; the idle one used longest ago; else one is made to drain, an older adapter's
    /// of that name before the one used longest ago. Pinned slots are only ever taken by their own name.
    ///
    /// The claim stays open until it is published, abandoned or given up; another one must not start
    /// before ([`Claim::Wait`] is asked again with the same name).
    pub fn claim(&mut self, name: &Arc<str>) -> Claim {
        debug_assert!(self.open.as_ref().is_none_or(|open| open == name), "one claim at a time");
        self.open = Some(name.clone());
        let own = |s: &Slot| s.name.as_ref() == Some(name);
        let usable = |s: &Slot| own(s) || !s.pinned;
        // A claim that made a slot drain takes that one first: others may have become idle, but they still serve.
        let drained = self.drain.filter(|d| self.slots[*d as usize].refs == 0);
        let idle = |slots: &[Slot]| {
            let free = |s: &&Slot| s.refs == 0 && s.phase == Phase::Ready && usable(s);
            let indexed = || slots.iter().enumerate().filter(|(_, s)| free(s));
            let first_own = indexed().find(|(_, s)| own(s));
            first_own.or_else(|| indexed().min_by_key(|(_, s)| s.last_used)).map(|(i, _)| i as u32)
        };
        let vacant = self.slots.iter().position(|s| s.phase == Phase::Vacant).map(|i| i as u32);
        if let Some(slot) = drained.or(vacant).or_else(|| idle(&self.slots)) {
            self.undrain(Some(slot));
            self.slots[slot as usize].phase = Phase::Claimed;
            return Claim::Granted(slot);
        }
        if self.drain.is_none() {
            let busy = |s: &&Slot| s.phase == Phase::Ready && usable(s);
            let indexed = || self.slots.iter().enumerate().filter(|(_, s)| busy(s));
            let victim = indexed().find(|(_, s)| own(s)).or_else(|| indexed().min_by_key(|(_, s)| s.last_used));
            let Some(victim) = victim.map(|(i, _)| i as u32) else {
                // A slot that drains by itself (an older generation, an unload) will become vacant.
                let leaving = self.slots.iter().any(|s| s.phase == Phase::Draining);
                return if leaving { Claim::Wait } else { self.give_up_and(Claim::Never) };
            };
            self.slots[victim as usize].phase = Phase::Draining;
            self.drain = Some(victim);
        }
        Claim::Wait
    }

    fn give_up_and(&mut self, claim: Claim) -> Claim {
        self.give_up();
        claim
    }

    /// Ends a claim that waits: the slot that drained for it serves on.
    pub fn give_up(&mut self) {
        self.undrain(None);
        self.open = None;
    }

    /// Lets the slot that drains for the open claim serve on, unless it is `taken`.
    fn undrain(&mut self, taken: Option<u32>) {
        if let Some(slot) = self.drain.take().filter(|slot| Some(*slot) != taken) {
            self.slots[slot as usize].phase = Phase::Ready;
        }
    }

    /// Ends a granted claim: the slot serves `name` from now on. An older adapter of that name in
    /// another slot takes no one new and goes when its last user has left.
    ///
    /// # Panics
    /// When `slot` wasn't granted to a claim.
    pub fn publish(&mut self, slot: u32, name: &Arc<str>, pinned: bool) {
        assert_eq!(self.slots[slot as usize].phase, Phase::Claimed, "slot {slot} is published without a claim");
        if let Some(older) = self.ready(name) {
            self.retire(older);
        }
        self.open = None;
        let entry = &mut self.slots[slot as usize];
        entry.name = Some(name.clone());
        entry.phase = Phase::Ready;
        entry.generation += 1;
        entry.pinned = pinned;
        self.touch(slot);
    }

    /// Ends a granted claim without a new adapter: what the slot held serves on.
    ///
    /// # Panics
    /// When `slot` wasn't granted to a claim.
    pub fn abandon(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        assert_eq!(entry.phase, Phase::Claimed, "slot {slot} is abandoned without a claim");
        entry.phase = if entry.name.is_some() { Phase::Ready } else { Phase::Vacant };
        self.open = None;
    }

    /// Takes no one new for `name`: its slot becomes vacant now or when its last user leaves.
    /// `None` where no slot takes users of that name.
    pub fn unload(&mut self, name: &str) -> Option<u32> {
        let slot = self
            .ready(name)
            .or_else(|| self.drain.filter(|d| self.slots[*d as usize].name.as_deref() == Some(name)))?;
        self.drain = self.drain.filter(|d| *d != slot);
        self.retire(slot);
        Some(slot)
    }

    fn retire(&mut self, slot: u32) {
        self.slots[slot as usize].phase = Phase::Draining;
        self.slots[slot as usize].pinned = false;
        if self.slots[slot as usize].refs == 0 {
            self.vacate(slot);
        }
    }

    fn vacate(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        entry.name = None;
        entry.phase = Phase::Vacant;
        entry.pinned = false;
    }
}
