//! A hundred thousand damaged adapters: no panic, no memory beyond a few times the files' size, an error that names file
//! and tensor or field, finite outputs of those that are accepted. `tests/fuzz` goes on from here for as long as one likes.

#[path = "loader_support/damage.rs"]
mod damage;
mod loader_support;
#[path = "loader_support/mutate.rs"]
mod mutate;
use loader_support::gguf;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use loader_support::Files;
use loader_support::{base, file_bytes, fixture_files, fixtures};
use lorapool::adapter::load;
use lorapool::{Error, Result};
use mutate::{Bed, Outcome};
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde_json::json;

/// Fewer only on a machine that can't do them in [`PATIENCE`].
const INPUTS: usize = 100_000;
const PATIENCE: Duration = Duration::from_secs(240);
/// Threads beyond these share a memory bus and gain little.
const THREADS: usize = 8;

#[test]
fn damaged_adapters_neither_panic_nor_allocate_nor_hide_what_is_wrong() {
    let start = Instant::now();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut bed = Bed::new();
        let mut outcomes = BTreeMap::<Outcome, usize>::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= INPUTS || start.elapsed() > PATIENCE {
                return outcomes;
            }
            let mut dice = Xoshiro256PlusPlus::seed_from_u64(seed as u64);
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bed.try_one(&mut dice)));
            let Ok(outcome) = outcome else { panic!("seed {seed}") };
            *outcomes.entry(outcome).or_default() += 1;
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    let mut outcomes = BTreeMap::<Outcome, usize>::new();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            for (outcome, count) in worker.join().unwrap() {
                *outcomes.entry(outcome).or_default() += count;
            }
        }
    });
    let done: usize = outcomes.values().sum();
    let accepted = outcomes.get(&Outcome::Accepted).copied().unwrap_or_default();
    eprintln!("{done} inputs in {:?} on {threads} threads: {outcomes:?}", start.elapsed());
    assert!(outcomes.len() > 35, "the damage reaches few checks: {outcomes:?}");
    assert!(accepted > done / 50, "the damage never leaves an adapter intact: {accepted}");
}

/// Files that are small for what they could make a careless reader build.
#[test]
fn files_that_amplify_are_refused_within_the_same_bound() {
    let dir = tempfile::tempdir().unwrap();
    let config = fs::read(fixtures().join("05_r1/adapter_config.json")).unwrap();
    let write = |config: &[u8], weights: &[u8]| {
        fs::write(dir.path().join("adapter_config.json"), config).unwrap();
        fs::write(dir.path().join("adapter_model.safetensors"), weights).unwrap();
        config.len() + weights.len()
    };
    let many = |entry: &dyn Fn(usize) -> String| {
        let entries: Vec<_> = (0..100_000).map(entry).collect();
        file_bytes(format!("{{{}}}", entries.join(",")).as_bytes(), &[])
    };
    for (what, weights) in [
        ("empty tensors", many(&|i| format!(r#""{i:05}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#))),
        ("an endless shape", file_bytes(format!(r#"{{"a":{{"shape":[{}0]}}}}"#, "0,".repeat(1 << 20)).as_bytes(), &[])),
        ("endless nesting", file_bytes("[".repeat(1 << 20).as_bytes(), &[])),
        ("nested metadata", file_bytes(format!(r#"{{"__metadata__":{}"#, "{\"a\":".repeat(1 << 18)).as_bytes(), &[])),
        ("a huge header length", [&99_999_999u64.to_le_bytes()[..], b"{}"].concat()),
    ] {
        let size = write(&config, &weights);
        assert!(matches!(measured(dir.path(), size), Err(Error::Reject(_))), "{what}");
    }
    let weights = fs::read(fixtures().join("05_r1/adapter_model.safetensors")).unwrap();
    for (what, config) in [
        ("a list of zeros", format!("[{}0]", "0,".repeat(1 << 20))),
        ("a list of lists", format!("[{}[]]", "[],".repeat(1 << 20))),
        ("endless nesting", "[".repeat(1 << 20)),
        ("a long string", format!("{{\"peft_type\": \"{}\"}}", "x".repeat(1 << 20))),
    ] {
        let size = write(config.as_bytes(), &weights);
        assert!(matches!(measured(dir.path(), size), Err(Error::Reject(_))), "{what}");
    }
    let file = dir.path().join("a.gguf");
    let entries = |count: usize, entry: &dyn Fn(usize) -> Vec<u8>| {
        let mut bytes = [&b"GGUF\x03\0\0\0"[..], &0u64.to_le_bytes(), &(count as u64).to_le_bytes()].concat();
        (0..count).for_each(|i| bytes.extend(entry(i)));
        bytes
    };
    let key = |i: usize| [&5u64.to_le_bytes()[..], format!("{i:05}").as_bytes()].concat();
    let counts = |tensors: u64, entries: u64| {
        [&b"GGUF\x03\0\0\0"[..], &tensors.to_le_bytes(), &entries.to_le_bytes(), &[0; 4096]].concat()
    };
    let strings = [&key(0)[..], &9u32.to_le_bytes(), &8u32.to_le_bytes(), &(1u64 << 17).to_le_bytes()].concat();
    for (what, bytes) in [
        ("many keys", entries(100_000, &|i| [key(i), 0u32.to_le_bytes().into(), vec![0]].concat())),
        ("many strings", entries(1, &|_| [&strings[..], &[0; 1 << 20]].concat())),
        ("counts without contents", counts(u64::MAX, u64::MAX)),
        ("many tensors in a few bytes", counts(120, 0)),
    ] {
        fs::write(&file, &bytes).unwrap();
        assert!(matches!(measured(&file, bytes.len()), Err(Error::Reject(_))), "{what}");
    }
}

/// Loads, and asserts that this thread's heap grew by no more than the files justify.
fn measured(path: &Path, size: usize) -> Result<()> {
    let mut loaded = None;
    let used = allocation_counter::measure(|| loaded = Some(load(path, None).map(drop))).bytes_max as usize;
    // A list of small numbers takes sixteen bytes a value while it is read; only the config has such lists, and few values.
    let slack = (1 << 20) + (8 << 20) * usize::from(size > 1 << 20);
    assert!(used <= 4 * size + slack, "{used} bytes for files of {size}");
    loaded.unwrap()
}

/// A whole adapter stays within the bound too, and a large one within its files' size and a little.
#[test]
fn a_large_adapter_takes_its_weights_and_little_more() {
    let mut files = Files::lora(64);
    for layer in 0..8 {
        files = files.pair(&format!("model.layers.{layer}.self_attn.q_proj"), 64, 1024, 1024);
    }
    let dir = tempfile::tempdir().unwrap();
    files.with("x", json!(null)).write(dir.path());
    let size = fs::metadata(dir.path().join("adapter_model.safetensors")).unwrap().len();
    let mut loaded = None;
    let used = allocation_counter::measure(|| loaded = Some(load(dir.path(), None))).bytes_max;
    assert!(loaded.unwrap().is_ok() && used < size + (1 << 20), "{used} for {size}");
}
