//! The slot state machine against a naive model: random acquires, releases, claims, publications,
//! unloads and pins; 100,000 operations.

use std::collections::BTreeMap;
use std::sync::Arc;

use lorapool::pool::{Claim, Phase, Slots};
use proptest::prelude::*;

const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

#[derive(Clone, Debug)]
enum Action {
    Acquire(usize),
    /// Ends the lease of this index, modulo their number.
    Release(usize),
    /// Opens a claim for a name, or asks the open one again.
    Claim(usize, bool),
    Abandon,
    GiveUp,
    Unload(usize),
    Pin(usize, bool),
}

fn action() -> impl Strategy<Value = Action> {
    let name = 0..NAMES.len();
    prop_oneof![
        6 => name.clone().prop_map(Action::Acquire),
        6 => any::<usize>().prop_map(Action::Release),
        6 => (name.clone(), prop::bool::weighted(0.2)).prop_map(|(n, pinned)| Action::Claim(n, pinned)),
        1 => Just(Action::Abandon),
        1 => Just(Action::GiveUp),
        1 => name.clone().prop_map(Action::Unload),
        1 => (name, any::<bool>()).prop_map(|(n, on)| Action::Pin(n, on)),
    ]
}

/// What must hold, kept as plainly as can be: who holds which contents of which slot.
#[derive(Default)]
struct Model {
    /// Slot and generation of each lease: while it lasts, that slot keeps that generation and name.
    leases: Vec<(u32, u64, Arc<str>)>,
    waiting: Option<(Arc<str>, bool)>,
}

fn step(slots: &mut Slots, model: &mut Model, action: Action) {
    match action {
        Action::Acquire(name) => {
            let ready = slots.slots().iter().any(|s| s.phase == Phase::Ready && s.name.as_deref() == Some(NAMES[name]));
            let slot = slots.acquire(NAMES[name]);
            assert_eq!(slot.is_some(), ready, "a name is served exactly where it is ready");
            if let Some(slot) = slot {
                model.leases.push((slot, slots.slots()[slot as usize].generation, NAMES[name].into()));
            }
        }
        Action::Release(index) if !model.leases.is_empty() => {
            let (slot, ..) = model.leases.swap_remove(index % model.leases.len());
            slots.release(slot);
        }
        Action::Release(_) => {}
        Action::Claim(name, pinned) => {
            let (name, pinned) = model.waiting.take().unwrap_or((NAMES[name].into(), pinned));
            let before = slots.clone();
            match slots.claim(&name) {
                Claim::Granted(slot) => {
                    let taken = &before.slots()[slot as usize];
                    assert_eq!(taken.refs, 0, "a slot in use is never given away");
                    assert!(!taken.pinned || taken.name.as_ref() == Some(&name), "nor a pinned one");
                    slots.publish(slot, &name, pinned);
                    assert_eq!(slots.ready(&name), Some(slot));
                }
                Claim::Wait => {
                    let idle = |s: &&lorapool::pool::Slot| s.refs == 0 && (!s.pinned || s.name.as_ref() == Some(&name));
                    assert!(slots.slots().iter().find(idle).is_none(), "a claim waits only when nothing is idle");
                    let draining = slots.slots().iter().filter(|s| s.phase == Phase::Draining).count();
                    assert!(draining >= 1, "something drains for it");
                    model.waiting = Some((name, pinned));
                }
                Claim::Never => {
                    let other = |s: &lorapool::pool::Slot| s.pinned && s.name.as_ref() != Some(&name);
                    assert!(slots.slots().iter().all(other), "hopeless only among pins of others");
                }
            }
        }
        Action::Abandon => {
            if model.waiting.is_none() {
                let before = slots.slots().to_vec();
                if let Claim::Granted(slot) = slots.claim(&"new".into()) {
                    slots.abandon(slot);
                    assert_eq!(slots.slots(), before, "an abandoned claim leaves nothing behind");
                } else {
                    slots.give_up();
                    assert_eq!(slots.slots(), before, "nor does one that is given up");
                }
            }
        }
        Action::GiveUp => {
            slots.give_up();
            model.waiting = None;
        }
        Action::Unload(name) => {
            slots.unload(NAMES[name]);
            assert_eq!(slots.ready(NAMES[name]), None);
            assert_eq!(slots.acquire(NAMES[name]), None);
        }
        Action::Pin(name, on) => {
            slots.pin(NAMES[name], on);
        }
    }
}

fn check(slots: &Slots, model: &Model) {
    let mut ready = BTreeMap::new();
    for (index, slot) in slots.slots().iter().enumerate() {
        let held = model.leases.iter().filter(|(s, ..)| *s == index as u32).count();
        assert_eq!(slot.refs as usize, held, "slot {index} counts its leases");
        assert_eq!(slot.name.is_none(), slot.phase == Phase::Vacant, "only a vacant slot has no name");
        assert!(slot.phase != Phase::Vacant || held == 0);
        assert!(slot.phase != Phase::Claimed, "no claim is left open here");
        if slot.phase == Phase::Ready {
            assert!(ready.insert(slot.name.clone(), index).is_none(), "one slot serves a name");
        }
    }
    for (slot, generation, name) in &model.leases {
        let slot = &slots.slots()[*slot as usize];
        assert_eq!((slot.generation, slot.name.as_ref()), (*generation, Some(name)), "a lease keeps its contents");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn no_sequence_of_operations_breaks_a_lease_or_loses_a_slot(
        count in 1..5u32,
        actions in prop::collection::vec(action(), 200),
    ) {
        let (mut slots, mut model) = (Slots::new(count), Model::default());
        for action in actions {
            step(&mut slots, &mut model, action);
            check(&slots, &model);
        }
        // Whatever happened: when all leases end, a waiting claim is served and every unpinned slot can be claimed.
        while let Some((slot, ..)) = model.leases.pop() {
            slots.release(slot);
        }
        if let Some((name, pinned)) = model.waiting.take() {
            match slots.claim(&name) {
                Claim::Granted(slot) => slots.publish(slot, &name, pinned),
                other => prop_assert!(false, "{other:?} with nothing in use"),
            }
        }
        for name in NAMES {
            slots.unload(name);
        }
        prop_assert!(slots.slots().iter().all(|s| s.phase == Phase::Vacant && s.refs == 0 && !s.pinned));
    }

    #[test]
    fn a_claim_waits_for_the_leases_of_one_slot_however_the_others_are_used(busy in 1..6u32, order in any::<prop::sample::Index>()) {
        let mut slots = Slots::new(busy);
        for name in &NAMES[..busy as usize] {
            match slots.claim(&(*name).into()) {
                Claim::Granted(slot) => slots.publish(slot, &(*name).into(), false),
                other => prop_assert!(false, "{other:?}"),
            }
            slots.acquire(name);
        }
        let hot = order.index(busy as usize);
        slots.acquire(NAMES[hot]);
        let name: Arc<str> = "cold".into();
        prop_assert_eq!(slots.claim(&name), Claim::Wait);
        let drains = slots.slots().iter().position(|s| s.phase == Phase::Draining).unwrap() as u32;
        let drained = slots.slots()[drains as usize].name.clone().unwrap();
        prop_assert_eq!(slots.acquire(&drained), None, "no new user prolongs the wait");
        while slots.slots()[drains as usize].refs > 0 {
            prop_assert_eq!(slots.claim(&name), Claim::Wait);
            slots.release(drains);
        }
        prop_assert_eq!(slots.claim(&name), Claim::Granted(drains));
    }
}
