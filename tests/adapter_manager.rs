//! `AdapterManager`: loads, leases, waits and swaps, from many threads.

mod common;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use common::{Rig, adapter, sites};
use lorapool::manager::{Options, SlotRef, Source};

fn patience(millis: u64) -> Options {
    Options { wait: Duration::from_millis(millis), ..Options::default() }
}

fn memory(seed: u64) -> Source {
    Source::Memory(Arc::new(adapter(&sites(), 4, seed)))
}

#[test]
fn a_lease_keeps_its_bytes_while_the_name_is_replaced_and_a_new_one_gets_the_new() {
    let rig = Rig::new(3, Options::default());
    let first = rig.manager.load("p", memory(1)).unwrap();
    let old = rig.manager.acquire("p").unwrap();
    let before = rig.row(old.slot_ref());
    let second = rig.manager.load("p", memory(2)).unwrap();
    let new = rig.manager.acquire("p").unwrap();
    assert_ne!(first, second);
    assert_eq!((old.id(), new.id()), (first, second));
    assert_ne!(old.slot(), new.slot());
    assert_eq!(rig.row(old.slot_ref()), before);
    assert_eq!(rig.row(new.slot_ref()), rig.alone(2));
    let slot = old.slot();
    drop(old);
    assert_eq!(rig.manager.status().residents.len(), 1, "the old generation has left");
    assert_eq!(rig.manager.weights().device_slot(SlotRef::Slot(slot)).unwrap_err().code(), "E_UNKNOWN_SLOT");
}

#[test]
fn the_same_bytes_again_change_nothing_and_keep_their_id() {
    let rig = Rig::new(2, Options::default());
    let first = rig.manager.load("p", memory(1)).unwrap();
    let generation = rig.manager.status().residents[0].generation;
    assert_eq!(rig.manager.load("p", memory(1)).unwrap(), first);
    assert_eq!(rig.manager.status().residents[0].generation, generation);
    assert_eq!(rig.manager.weights().adapter_names(), ["p"]);
    assert_ne!(rig.manager.load("p", memory(9)).unwrap(), first);
    assert_eq!(rig.manager.load("p", memory(1)).unwrap(), first, "and come back under the same id");
    assert_eq!(rig.manager.weights().adapter_names(), ["p"], "idle generations have left");
}

#[test]
fn a_thousand_requests_for_one_name_load_it_once() {
    let rig = Arc::new(Rig::new(2, Options::default()));
    rig.manager.register("p", memory(1));
    let barrier = Arc::new(Barrier::new(1000));
    let ask = |_| {
        let (rig, barrier) = (rig.clone(), barrier.clone());
        let body = move || {
            barrier.wait();
            let lease = rig.manager.acquire("p").unwrap();
            (lease.slot(), lease.id())
        };
        thread::Builder::new().stack_size(128 << 10).spawn(body).unwrap()
    };
    let answers: BTreeSet<_> = (0..1000).map(ask).collect::<Vec<_>>().into_iter().map(|t| t.join().unwrap()).collect();
    assert_eq!(answers.len(), 1);
    let status = rig.manager.status();
    assert_eq!((status.residents.len(), status.residents[0].generation, status.residents[0].refs), (1, 1, 0));
}

#[test]
fn a_failed_load_tells_everyone_who_waits_why_and_is_not_remembered() {
    let rig = Arc::new(Rig::new(2, Options::default()));
    rig.manager.register("bad", Source::Dir("no/such/adapter".into()));
    let ask = |_| {
        let rig = rig.clone();
        thread::spawn(move || rig.manager.acquire("bad").unwrap_err().code())
    };
    let codes: BTreeSet<_> = (0..16).map(ask).collect::<Vec<_>>().into_iter().map(|t| t.join().unwrap()).collect();
    assert_eq!(codes.len(), 1, "{codes:?}");
    rig.manager.load("bad", memory(1)).unwrap();
    assert_eq!(rig.row(rig.manager.acquire("bad").unwrap().slot_ref()), rig.alone(1));
}

#[test]
fn an_unknown_name_is_an_error_and_never_the_base() {
    let rig = Rig::new(2, Options::default());
    rig.manager.load("p", memory(1)).unwrap();
    let error = rig.manager.acquire("q").unwrap_err();
    assert_eq!(error.code(), "E_UNKNOWN_ADAPTER");
    assert!(error.to_string().contains("\"p\""), "{error}");
    assert!(rig.manager.try_acquire("q").is_none());
    assert_eq!(rig.manager.unload("q").unwrap_err().code(), "E_UNKNOWN_ADAPTER");
    assert_eq!(rig.manager.load("", memory(1)).unwrap_err().code(), "E_INPUT");
}

#[test]
fn unload_waits_for_the_last_user_and_names_who_stays() {
    let rig = Arc::new(Rig::new(2, patience(200)));
    rig.manager.load("p", memory(1)).unwrap();
    let lease = rig.manager.acquire("p").unwrap();
    let error = rig.manager.unload("p").unwrap_err();
    assert_eq!(error.code(), "E_TIMED_OUT");
    assert!(error.to_string().contains("\"p\", 1 leases"), "{error}");
    assert_eq!(rig.manager.acquire("p").unwrap_err().code(), "E_UNKNOWN_ADAPTER", "no one new");
    assert_eq!(rig.row(lease.slot_ref()), rig.alone(1), "but the user keeps it");
    drop(lease);
    assert!(rig.manager.status().residents.is_empty());

    rig.manager.load("q", memory(2)).unwrap();
    let lease = rig.manager.acquire("q").unwrap();
    let waiting = {
        let rig = rig.clone();
        thread::spawn(move || rig.manager.unload("q"))
    };
    thread::sleep(Duration::from_millis(50));
    drop(lease);
    waiting.join().unwrap().unwrap();
    assert_eq!(rig.manager.try_acquire("q").map(|l| l.slot()), None);
}

#[test]
fn a_full_pool_makes_the_next_one_wait_for_a_slot_or_names_the_holders() {
    let rig = Arc::new(Rig::new(2, patience(2000)));
    for (name, seed) in [("a", 1), ("b", 2), ("c", 3)] {
        rig.manager.register(name, memory(seed));
    }
    let (a, b) = (rig.manager.acquire("a").unwrap(), rig.manager.acquire("b").unwrap());
    let error = rig.manager.acquire("c").unwrap_err();
    assert_eq!(error.code(), "E_TIMED_OUT");
    assert!(error.to_string().contains("\"a\"") && error.to_string().contains("\"b\""), "{error}");
    assert_eq!(rig.manager.status().loading, 0, "one who gave up is not in line any more");
    drop(rig.manager.acquire("a").unwrap());

    let waiting = {
        let rig = rig.clone();
        thread::spawn(move || rig.manager.acquire("c").map(|l| rig.row(l.slot_ref())))
    };
    thread::sleep(Duration::from_millis(50));
    assert_eq!(rig.row(a.slot_ref()), rig.alone(1), "who holds a slot keeps it");
    drop(a);
    assert_eq!(waiting.join().unwrap().unwrap(), rig.alone(3));
    assert_eq!(rig.row(b.slot_ref()), rig.alone(2));
}

#[test]
fn all_pinned_is_an_error_at_once() {
    let rig = Rig::with_pinned(&[("a", 1), ("b", 2)], 2, Options::default());
    rig.manager.register("c", memory(3));
    let started = Instant::now();
    assert_eq!(rig.manager.acquire("c").unwrap_err().code(), "E_POOL_FULL");
    assert!(started.elapsed() < Duration::from_secs(5));
    let id = rig.manager.load("a", memory(7)).unwrap();
    assert_eq!(rig.manager.acquire("a").unwrap().id(), id, "a pinned name is replaced by itself alone");
    assert!(rig.manager.status().residents.iter().all(|r| r.pinned));
}

#[test]
fn promotion_does_not_change_who_is_active_and_the_active_one_is_not_evicted() {
    let rig = Rig::with_pinned(&[("a", 1)], 3, Options::default());
    for (name, seed) in [("b", 2), ("c", 3), ("d", 4), ("e", 5)] {
        rig.manager.register(name, memory(seed));
    }
    rig.manager.promote("b").unwrap();
    assert_eq!(rig.manager.acquire_active().unwrap().name(), "a");
    rig.manager.activate("b").unwrap();
    for name in ["c", "d", "e", "c"] {
        rig.manager.promote(name).unwrap();
    }
    assert_eq!(rig.row(rig.manager.acquire_active().unwrap().slot_ref()), rig.alone(2));
    assert_eq!(rig.row(SlotRef::Active), rig.alone(2));
    assert_eq!(rig.row(SlotRef::Base), vec![0.0; rig.width()]);
    rig.manager.activate("a").unwrap();
    rig.manager.promote("d").unwrap();
    rig.manager.promote("e").unwrap();
    assert!(rig.manager.try_acquire("b").is_none(), "it may go once it isn't active");
    assert_eq!(rig.manager.activate("b").unwrap_err().code(), "E_UNKNOWN_ADAPTER");
}

#[test]
fn two_hot_adapters_do_not_starve_a_cold_one() {
    let rig = Arc::new(Rig::new(2, Options::default()));
    let stop = Arc::new(AtomicBool::new(false));
    for (name, seed) in [("hot 1", 1), ("hot 2", 2), ("cold", 3)] {
        rig.manager.register(name, memory(seed));
    }
    let hot = |name: &'static str| {
        // Two threads a name, so that its leases overlap for as long as no one makes it drain.
        (0..2)
            .map(move |i| (name, i))
            .map(|(name, i)| {
                let (rig, stop) = (rig.clone(), stop.clone());
                thread::spawn(move || {
                    let mut served = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let lease = rig.manager.acquire(name).unwrap();
                        thread::sleep(Duration::from_millis(2 + i));
                        drop(lease);
                        served += 1;
                    }
                    served
                })
            })
            .collect::<Vec<_>>()
    };
    let threads: Vec<_> = ["hot 1", "hot 2"].into_iter().flat_map(hot).collect();
    thread::sleep(Duration::from_millis(50));
    for _ in 0..20 {
        let started = Instant::now();
        let lease = rig.manager.acquire("cold").unwrap();
        assert_eq!(rig.row(lease.slot_ref()), rig.alone(3));
        assert!(started.elapsed() < Duration::from_secs(5), "waited {:?}", started.elapsed());
    }
    stop.store(true, Ordering::Relaxed);
    for thread in threads {
        assert!(thread.join().unwrap() > 5, "and the hot ones go on");
    }
    assert!(rig.manager.status().residents.iter().all(|r| r.refs == 0));
}

#[test]
fn nothing_is_published_during_a_step_and_everything_after_it() {
    let rig = Arc::new(Rig::new(1, Options::default()));
    rig.manager.load("p", memory(1)).unwrap();
    let step = rig.manager.step();
    let loading = {
        let rig = rig.clone();
        thread::spawn(move || rig.manager.load("p", memory(2)))
    };
    thread::sleep(Duration::from_millis(100));
    let plan = step.plan([(SlotRef::Slot(0), 1.0)]).unwrap();
    assert_eq!(rig.run(&plan)[0], rig.alone(1));
    assert!(!loading.is_finished());
    drop(step);
    loading.join().unwrap().unwrap();
    assert_eq!(rig.row(SlotRef::Slot(0)), rig.alone(2));
}

#[test]
fn a_step_that_never_ends_makes_a_load_fail_and_the_next_one_works() {
    let rig = Rig::new(1, patience(100));
    rig.manager.load("p", memory(1)).unwrap();
    let step = rig.manager.step();
    assert_eq!(rig.manager.load("p", memory(2)).unwrap_err().code(), "E_TIMED_OUT");
    drop(step);
    assert_eq!(rig.row(SlotRef::Slot(0)), rig.alone(1));
    rig.manager.load("p", memory(2)).unwrap();
    assert_eq!(rig.row(SlotRef::Slot(0)), rig.alone(2));
}

#[test]
fn threads_that_load_replace_and_unload_never_change_a_row_that_is_leased() {
    let rig = Arc::new(Rig::new(3, Options::default()));
    let names = ["a", "b", "c", "d", "e"];
    for (seed, name) in names.iter().enumerate() {
        rig.manager.register(name, memory(seed as u64));
    }
    let answers: Arc<Vec<_>> = Arc::new((0..10).map(|seed| (rig.id(seed), rig.alone(seed))).collect());
    let (stop, rows) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut threads = Vec::new();
    for seed in 0..3u64 {
        let (rig, stop, rows, answers) = (rig.clone(), stop.clone(), rows.clone(), answers.clone());
        threads.push(thread::spawn(move || {
            let mut n = seed;
            while !stop.load(Ordering::Relaxed) {
                n = n.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let Ok(lease) = rig.manager.acquire(names[(n >> 33) as usize % names.len()]) else { continue };
                let step = rig.manager.step();
                let plan = step.plan([(lease.slot_ref(), 1.0), (SlotRef::Base, 1.0)]).unwrap();
                let got = rig.run(&plan);
                drop(step);
                let expected = &answers.iter().find(|(id, _)| *id == lease.id()).expect("an id that was loaded").1;
                assert_eq!(&got[0], expected, "exactly the adapter that was leased");
                assert!(got[1].iter().all(|v| *v == 0.0), "and the base row untouched");
                rows.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    for seed in 0..2u64 {
        let (rig, stop) = (rig.clone(), stop.clone());
        threads.push(thread::spawn(move || {
            let mut n = seed + 99;
            while !stop.load(Ordering::Relaxed) {
                n = n.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let name = (n >> 33) as usize % names.len();
                match (n >> 50) % 4 {
                    0 => drop(rig.manager.unload(names[name])),
                    _ => drop(rig.manager.load(names[name], memory((n >> 40) % 10))),
                }
                let seed = (n >> 44) % 10;
                rig.manager.register(names[name], memory(seed));
            }
        }));
    }
    thread::sleep(Duration::from_secs(3));
    stop.store(true, Ordering::Relaxed);
    threads.into_iter().for_each(|t| t.join().unwrap());
    assert!(rows.load(Ordering::Relaxed) > 100);
    let status = rig.manager.status();
    assert!(status.residents.iter().all(|r| r.refs == 0) && status.loading == 0, "{status}");
    for name in names {
        let _ = rig.manager.unload(name);
    }
    assert!(rig.manager.status().residents.is_empty());
}

#[test]
fn sixteen_loads_of_the_same_bytes_under_one_name_publish_once() {
    let rig = Arc::new(Rig::new(2, Options::default()));
    let load = |_| {
        let rig = rig.clone();
        thread::spawn(move || rig.manager.load("p", memory(1)).unwrap())
    };
    let ids: BTreeSet<_> = (0..16).map(load).collect::<Vec<_>>().into_iter().map(|t| t.join().unwrap()).collect();
    assert_eq!(ids.len(), 1);
    assert_eq!(rig.manager.status().residents[0].generation, 1);
}

#[test]
fn requests_find_adapters_below_the_root_and_nothing_else() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let base = lorapool::adapter::BaseModel::open(root.join("_base/llama")).unwrap();
    let fixture = lorapool::adapter::load(root.join("05_r1"), Some(&base)).unwrap();
    let spec = lorapool::pool::PoolSpec::for_adapters([&fixture], 2, lorapool::DType::F32).unwrap();
    let gpu = lorapool::backend::open("cpu", 0).unwrap();
    let weights = lorapool::manager::LoraWeights::load(&gpu, spec, &[]).unwrap();
    let options = Options { base: Some(Arc::new(base)), root: Some(root), ..Options::default() };
    let manager = lorapool::manager::AdapterManager::new(weights, options).unwrap();
    assert_eq!(manager.acquire("05_r1").unwrap().name(), "05_r1");
    let code = |name: &str| manager.acquire(name).unwrap_err().code();
    let long = "a".repeat(4096);
    let refused = ["../fixtures/05_r1", "/etc", "05_r1/../05_r1", "05\0r1", &long];
    assert_eq!(refused.map(code), ["E_PATH_ESCAPE"; 5]);
    assert_eq!(code("no_such_adapter"), "E_UNKNOWN_ADAPTER");
    assert_eq!(code("06_r72_over_hidden"), "E_SHAPE", "a site that the pool doesn't have");
    assert_eq!(manager.status().residents.len(), 1);
}

#[test]
fn a_bad_adapter_of_any_kind_changes_no_one_else_s_rows() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let rig = Rig::with_pinned(&[("kept", 1)], 3, Options::default());
    let mut refused = 0;
    for entry in std::fs::read_dir(root).unwrap() {
        let dir = entry.unwrap().path();
        // None of them fits this model, and most are broken in themselves.
        if rig.manager.load("bad", Source::Dir(dir)).is_err() {
            refused += 1;
            assert_eq!(rig.row(SlotRef::Active), rig.alone(1));
        }
    }
    assert!(refused > 80, "{refused}");
    assert_eq!(rig.manager.status().residents.len(), 1);
}

#[test]
fn sixteen_uses_of_one_adapter_end_in_any_order_and_an_unload_then_returns_at_once() {
    let rig = Rig::new(2, Options::default());
    rig.manager.load("p", memory(1)).unwrap();
    let mut leases: Vec<_> = (0..16).map(|_| rig.manager.acquire("p").unwrap()).collect();
    assert_eq!(rig.manager.status().residents[0].refs, 16);
    // A use that is given up in the middle of a step ends like any other.
    let step = rig.manager.step();
    for index in [7, 0, 12, 3] {
        drop(leases.swap_remove(index));
    }
    drop(step);
    assert_eq!(rig.manager.status().residents[0].refs, 12);
    leases.clear();
    let started = Instant::now();
    rig.manager.unload("p").unwrap();
    assert!(started.elapsed() < Duration::from_secs(1));
    assert!(rig.manager.weights().ref_counts.iter().all(|count| count.load(Ordering::SeqCst) == 0));
}

/// A copy of a fixture in a directory of its own, with a manager of one slot for it.
fn from_disk(host_cache: u64) -> (tempfile::TempDir, Arc<lorapool::manager::AdapterManager>) {
    let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/05_r1");
    let dir = tempfile::tempdir().unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(fixture.join(file), dir.path().join(file)).unwrap();
    }
    let adapter = lorapool::adapter::load(&fixture, None).unwrap();
    let spec = lorapool::pool::PoolSpec::for_adapters([&adapter], 1, lorapool::DType::F32).unwrap();
    let gpu = lorapool::backend::open("cpu", 0).unwrap();
    let weights = lorapool::manager::LoraWeights::load(&gpu, spec, &[]).unwrap();
    let options = Options { host_cache, ..Options::default() };
    let manager = lorapool::manager::AdapterManager::new(weights, options).unwrap();
    manager.register("disk", Source::Dir(dir.path().to_owned()));
    manager.register("other", Source::Memory(Arc::new(adapter)));
    (dir, manager)
}

/// Changes one weight on disk; the file keeps its length and, if asked, its time.
fn change(dir: &std::path::Path, keep_time: bool) {
    let path = dir.join("adapter_model.safetensors");
    let time = std::fs::metadata(&path).unwrap().modified().unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 3;
    bytes[last] = bytes[last].wrapping_add(1);
    std::fs::write(&path, bytes).unwrap();
    let time = if keep_time { time } else { time + Duration::from_secs(2) };
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
}

#[test]
fn an_evicted_adapter_comes_back_from_host_memory_until_its_files_change() {
    let (dir, manager) = from_disk(1 << 20);
    let visit = |name: &str| {
        let lease = manager.acquire(name).unwrap();
        let block = manager.gpu().read(&manager.pool().blocks()[0]).unwrap();
        (lease.id(), block)
    };
    let first = visit("disk");
    visit("other");
    // A change that the files' lengths and times hide shows that no file is read.
    change(dir.path(), true);
    assert_eq!(visit("disk"), first, "the same bytes, bit for bit");
    visit("other");
    change(dir.path(), false);
    let changed = visit("disk");
    assert_ne!(changed.0, first.0);
    change(dir.path(), true);
    assert_ne!(manager.load("disk", Source::Dir(dir.path().to_owned())).unwrap(), changed.0, "a load reads anew");
}

#[test]
fn without_a_host_cache_files_are_read_on_every_load() {
    let (dir, manager) = from_disk(0);
    let id = |name: &str| manager.acquire(name).unwrap().id();
    let first = id("disk");
    id("other");
    change(dir.path(), true);
    assert_ne!(id("disk"), first);
}

#[test]
fn without_an_active_adapter_a_request_for_it_is_told_so() {
    let rig = Rig::new(2, Options::default());
    rig.manager.load("p", memory(1)).unwrap();
    let error = rig.manager.acquire_active().unwrap_err();
    assert_eq!(error.code(), "E_NO_ACTIVE");
    assert!(error.to_string().contains("\"p\""), "{error}");
    assert_eq!(rig.manager.weights().device_slot(SlotRef::Active).unwrap_err().code(), "E_NO_ACTIVE");
    let vacant = rig.manager.weights().device_slot(SlotRef::Slot(1)).unwrap_err();
    assert_eq!(
        (vacant.code(), &*vacant.to_string()),
        ("E_UNKNOWN_SLOT", "slot 1 holds no adapter; there are slots 0 to 1")
    );
    rig.manager.activate("p").unwrap();
    assert_eq!(rig.manager.acquire_active().unwrap().name(), "p");
}
