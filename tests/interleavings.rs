//! Thousands of interleavings of acquire, release, promote, load, unload, activate and step over a small
//! pool. Runs under `RUSTFLAGS="--cfg shuttle"`, where the manager's locks are shuttle's.

#![cfg(shuttle)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Rig, adapter, sites};
use lorapool::adapter::Adapter;
use lorapool::manager::{Options, SlotRef, Source};
use shuttle::thread;

/// Longer than any run: what waits for ever is found as a deadlock, not as a time-out.
fn options() -> Options {
    Options { wait: Duration::from_secs(3600), verify: false, ..Options::default() }
}

fn versions() -> Vec<Arc<Adapter>> {
    (0..4).map(|seed| Arc::new(adapter(&sites(), 1, seed))).collect()
}

/// Runs `body` under random schedules, then under schedules with few switches at chosen points.
fn explore(body: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(body.clone(), 2000);
    shuttle::check_pct(body, 2000, 3);
}

fn check_at_rest(rig: &Rig) {
    let status = rig.manager.status();
    assert!(status.residents.iter().all(|r| r.refs == 0 && !r.draining), "{status}");
    assert_eq!(status.loading, 0);
}

#[test]
fn two_names_and_one_slot_take_turns_and_every_lease_has_its_own_bytes() {
    let versions = versions();
    explore(move || {
        let rig = Arc::new(Rig::new(1, options()));
        let ids: Vec<u64> = versions.iter().map(|a| u64::from_le_bytes(a.digest[..8].try_into().unwrap())).collect();
        for (name, adapter) in ["a", "b"].iter().zip(&versions) {
            rig.manager.register(name, Source::Memory(adapter.clone()));
        }
        let ask = |name: &'static str, id: u64| {
            let rig = rig.clone();
            thread::spawn(move || {
                let lease = rig.manager.acquire(name).unwrap();
                assert_eq!(lease.id(), id);
                let step = rig.manager.step();
                step.plan([(lease.slot_ref(), 1.0)]).unwrap();
                assert_eq!(rig.manager.weights().slots[lease.slot() as usize].id(), id, "for as long as it is held");
            })
        };
        let threads = [ask("a", ids[0]), ask("b", ids[1]), ask("a", ids[0])];
        threads.into_iter().for_each(|t| t.join().unwrap());
        check_at_rest(&rig);
    });
}

#[test]
fn a_replacement_under_leases_and_steps_never_mixes_generations() {
    let versions = versions();
    explore(move || {
        let rig = Arc::new(Rig::new(2, options()));
        rig.manager.load("p", Source::Memory(versions[0].clone())).unwrap();
        let replace = |index: usize| {
            let (rig, adapter) = (rig.clone(), versions[index].clone());
            thread::spawn(move || _ = rig.manager.load("p", Source::Memory(adapter)).unwrap())
        };
        let serve = || {
            let rig = rig.clone();
            thread::spawn(move || {
                let lease = rig.manager.acquire("p").unwrap();
                let before = rig.manager.weights().slots[lease.slot() as usize].digest;
                drop(rig.manager.step());
                assert_eq!(rig.manager.weights().slots[lease.slot() as usize].digest, before);
            })
        };
        let threads = [replace(1), serve(), replace(2), serve()];
        threads.into_iter().for_each(|t| t.join().unwrap());
        check_at_rest(&rig);
        assert_eq!(rig.manager.status().residents.len(), 1, "old generations leave");
    });
}

#[test]
fn unloads_activations_and_promotions_end_whatever_comes_between() {
    let versions = versions();
    explore(move || {
        let rig = Arc::new(Rig::new(2, options()));
        for (name, adapter) in ["a", "b", "c"].iter().zip(&versions) {
            rig.manager.register(name, Source::Memory(adapter.clone()));
        }
        let run = |body: fn(&Rig)| {
            let rig = rig.clone();
            thread::spawn(move || body(&rig))
        };
        let threads = [
            run(|rig| drop(rig.manager.acquire("a"))),
            run(|rig| drop(rig.manager.unload("a"))),
            run(|rig| drop(rig.manager.promote("b").and_then(|_| rig.manager.activate("b")))),
            run(|rig| drop(rig.manager.acquire("c"))),
        ];
        threads.into_iter().for_each(|t| t.join().unwrap());
        check_at_rest(&rig);
        let active = rig.manager.weights().name.clone();
        assert!(active.is_empty() || active == "b");
        assert_eq!(rig.manager.weights().device_slot(SlotRef::Active).is_ok(), active == "b");
    });
}

#[test]
fn loads_of_the_same_bytes_all_hear_of_the_one_that_landed() {
    let versions = versions();
    explore(move || {
        let rig = Arc::new(Rig::new(1, options()));
        let load = |_| {
            let (rig, adapter) = (rig.clone(), versions[0].clone());
            thread::spawn(move || rig.manager.load("p", Source::Memory(adapter)).unwrap())
        };
        let ids: Vec<u64> = (0..3).map(load).collect::<Vec<_>>().into_iter().map(|t| t.join().unwrap()).collect();
        assert!(ids.iter().all(|id| *id == ids[0]));
        assert_eq!(rig.manager.status().residents[0].generation, 1);
        check_at_rest(&rig);
    });
}
