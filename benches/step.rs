//! One captured step's LoRA work by criterion, on the cases of `lorapool bench`, for comparing two states of the code.
//!
//! `LORAPOOL_BENCH_BACKEND` names the backend (default: the best one here), `LORAPOOL_BENCH_LAYERS` the number of layers
//! (default: 2). Times are a captured graph's replay, waited for; throughput is in the bytes of the floor.

// The command's own cases and rig: what is timed here is what it times.
#[path = "../src/cli/bench/case.rs"]
#[allow(dead_code, unused_imports)]
mod case;
#[path = "../src/cli/bench/rig.rs"]
#[allow(dead_code, unused_imports)]
mod rig;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lorapool::DType;
use lorapool::backend::{best, open};

use case::Case;
use rig::Rig;

fn steps(criterion: &mut Criterion) {
    let gpu = match std::env::var("LORAPOOL_BENCH_BACKEND") {
        Ok(name) => open(&name, 0),
        Err(_) => best(),
    };
    let gpu = gpu.expect("a backend");
    let layers = std::env::var("LORAPOOL_BENCH_LAYERS").ok().and_then(|n| n.parse().ok()).unwrap_or(2);
    let caps = gpu.caps();
    let mut group = criterion.benchmark_group(format!("{} on {}, {layers} layers", caps.backend, caps.device));
    let mut cases = Case::usual();
    cases.sort_by_key(|case| case.rank);
    for cases in cases.chunk_by(|a, b| a.rank == b.rank) {
        let slots = cases.iter().map(|case| case.adapters).max().unwrap_or(1);
        let rig = Rig::new(&gpu, rig::llama(layers), cases[0].rank, slots, DType::Bf16).expect("a pool");
        for case in cases {
            let step = rig.prepare(case, 0).expect("a step");
            group.throughput(Throughput::Bytes(step.floor_bytes));
            group.bench_function(&case.name, |bencher| {
                bencher.iter(|| gpu.wait(step.graph.replay().expect("a replay")).expect("its end"));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, steps);
criterion_main!(benches);
