//! One captured step's LoRA work by criterion, on the cases of `lorapool bench` and `bench --experts`, for comparing two states of
//! the code.
//!
//! `LORAPOOL_BENCH_BACKEND` names the backend (default: the best one here), `LORAPOOL_BENCH_LAYERS` the number of layers
//! (default: 2). Times are a captured graph's replay, waited for; throughput is in the bytes of the floor.

// The command's own cases and rigs: what is timed here is what it times.
#[path = "../src/cli/bench/case.rs"]
#[allow(dead_code, unused_imports)]
mod case;
#[path = "../src/cli/bench/experts.rs"]
#[allow(dead_code)]
mod experts;
#[path = "../src/cli/bench/rig.rs"]
#[allow(dead_code, unused_imports)]
mod rig;
#[path = "../src/cli/bench/routed.rs"]
#[allow(dead_code, unused_imports)]
mod routed;

use std::sync::Arc;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use lorapool::DType;
use lorapool::backend::{GpuBackend, best, open};

use case::Case;
use experts::ExpertRig;
use rig::{Rig, Step};
use routed::Routed;

fn steps(criterion: &mut Criterion) {
    let gpu = match std::env::var("LORAPOOL_BENCH_BACKEND") {
        Ok(name) => open(&name, 0),
        Err(_) => best(),
    };
    let gpu = gpu.expect("a backend");
    let layers = std::env::var("LORAPOOL_BENCH_LAYERS").ok().and_then(|n| n.parse().ok()).unwrap_or(2);
    let caps = gpu.caps();
    let mut group = criterion.benchmark_group(format!("{} on {}, {layers} layers", caps.backend, caps.device));
    for (cases, rank, slots) in pools(Case::usual()) {
        let rig = Rig::new(&gpu, rig::llama(layers), rank, slots, DType::Bf16).expect("a pool");
        cases.iter().for_each(|case| time(&mut group, &gpu, case, &rig.prepare(case, 0).expect("a step")));
    }
    let routed = Routed::qwen3(layers, None).expect("its own experts a token");
    for (cases, rank, slots) in pools(Case::usual_experts()) {
        let rig = ExpertRig::new(&gpu, &routed, rank, slots, DType::Bf16).expect("a pool");
        cases.iter().for_each(|case| time(&mut group, &gpu, case, &rig.prepare(case, 0).expect("a step")));
    }
    group.finish();
}

/// Cases that share a pool, its rank and slots.
fn pools(mut cases: Vec<Case>) -> Vec<(Vec<Case>, u32, u32)> {
    cases.sort_by_key(|case| case.rank);
    let slots = |cases: &[Case]| cases.iter().map(|case| case.adapters).max().unwrap_or(1);
    cases.chunk_by(|a, b| a.rank == b.rank).map(|cases| (cases.to_vec(), cases[0].rank, slots(cases))).collect()
}

fn time(group: &mut BenchmarkGroup<'_, WallTime>, gpu: &Arc<dyn GpuBackend>, case: &Case, step: &Step) {
    group.throughput(Throughput::Bytes(step.floor_bytes));
    group.bench_function(&case.name, |bencher| {
        bencher.iter(|| gpu.wait(step.graph.replay().expect("a replay")).expect("its end"));
    });
}

criterion_group!(benches, steps);
criterion_main!(benches);
