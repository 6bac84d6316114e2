//! What a slot's next adapter may inherit from its last one: nothing. With PEFT's adapters, on every backend.

mod common;

use std::path::Path;
use std::sync::Arc;

use common::backends;
use lorapool::adapter::{Adapter, BaseModel, load};
use lorapool::backend::{GpuBackend, Graph};
use lorapool::manager::{LoraAdapterInput, LoraWeights};
use lorapool::ops::{Applier, ExpertApplier, ExpertInput, Experts, Matrix, Op, Output, Routing};
use lorapool::pool::{Capacity, ExpertSite, ExpertSpec, Plan, PoolSpec, SiteKind, SiteSpec};
use lorapool::{DType, Region};

const ROWS: u32 = 5;

/// Adapters of the llama fixtures: every rank, scale, type and coverage that the loader accepts for that base.
const FIXTURES: [&str; 18] = [
    "01_plain_f32",
    "02_plain_f16",
    "03_plain_bf16",
    "04_rslora_r6",
    "05_r1",
    "06_r72_over_hidden",
    "07_rank_pattern",
    "08_rank_pattern_rslora",
    "09_layers_to_transform",
    "11_all_linear",
    "12_exclude_modules",
    "16_lora_bias",
    "18_embedding_lora",
    "19_embedding_lora_nobase",
    "20_modules_to_save",
    "21_trainable_tokens",
    "23_dora",
    "26c_pattern_overlap",
];

fn fixtures() -> Vec<(&'static str, Adapter)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let base = BaseModel::open(root.join("_base/llama")).unwrap();
    FIXTURES.into_iter().map(|name| (name, load(root.join(name), Some(&base)).unwrap())).collect()
}

/// All sites that any of the fixtures covers, in a pool of `max_loras` slots.
fn spec(adapters: &[(&'static str, Adapter)], max_loras: u32) -> PoolSpec {
    PoolSpec::for_adapters(adapters.iter().map(|(_, adapter)| adapter), max_loras, DType::F32).unwrap()
}

/// A step over every site, captured once.
struct Captured {
    gpu: Arc<dyn GpuBackend>,
    applier: Applier,
    graph: Box<dyn Graph>,
    outputs: Vec<Matrix>,
    base: Vec<Vec<u8>>,
}

impl Captured {
    fn new(weights: &LoraWeights, op: Op) -> Self {
        let (gpu, pool) = (weights.gpu(), weights.storage());
        let capacity = Capacity::any(ROWS);
        let applier = Applier::new(&**gpu, pool, DType::F32, capacity).unwrap();
        let upload = |width: u32, salt: u32| {
            let value = |i: u32| ((i * 29 + salt * 17) % 64) as f32 / 64.0 - 0.5;
            let bytes: Vec<u8> = (0..ROWS * width).flat_map(|i| value(i).to_le_bytes()).collect();
            let region = gpu.alloc(bytes.len() as u64, "activations").unwrap();
            gpu.submit(&mut |encoder| encoder.write(&region, &bytes)).unwrap();
            (region, bytes)
        };
        // Tokens that adapters replace and one that none does.
        let ids: Vec<u8> = [0u32, 5, 130, 3, 0].iter().flat_map(|id| id.to_le_bytes()).collect();
        let tokens = gpu.alloc(ids.len() as u64, "ids").unwrap();
        gpu.submit(&mut |encoder| encoder.write(&tokens, &ids)).unwrap();
        let head = |site: &SiteSpec| &*site.id.path == "lm_head";
        let site = |(i, site): (usize, &SiteSpec)| {
            // A table of tokens gives rows, and a head logits; of both a pool keeps rows of the hidden width.
            let (inputs, outputs) = match site.is_token_rows() && !head(site) {
                true => (1, site.in_features),
                false => (site.in_features, site.out_features),
            };
            let x = Matrix::new(upload(inputs, i as u32).0, inputs);
            let (origin, base) = upload(outputs, 100 + i as u32);
            let y = Matrix::new(gpu.alloc(origin.len(), "y").unwrap(), outputs);
            (x, origin, y, base)
        };
        let all: Vec<_> = pool.sites().iter().enumerate().map(site).collect();
        let graph = gpu
            .capture(&mut |encoder| {
                for (i, (x, origin, y, _)) in all.iter().enumerate() {
                    encoder.copy(y.region(), origin)?;
                    let (site, output) = (&pool.sites()[i], Output { site: i, y });
                    match site.kind {
                        SiteKind::Linear => applier.encode(encoder, pool, op, capacity, x, &[output])?,
                        SiteKind::Embedding => {
                            applier.encode_embedding(encoder, pool, op, capacity, &tokens, output)?
                        }
                        SiteKind::TokenRows { .. } if head(site) => {
                            applier.encode_logits(encoder, pool, capacity, x, output)?
                        }
                        SiteKind::TokenRows { .. } => {
                            applier.encode_token_rows(encoder, pool, capacity, &tokens, output)?
                        }
                    }
                }
                Ok(())
            })
            .unwrap();
        let (outputs, base) = all.into_iter().map(|(_, _, y, base)| (y, base)).unzip();
        Self { gpu: gpu.clone(), applier, graph, outputs, base }
    }

    /// Replays the step; each site's outputs.
    fn replay(&self, slots: [i32; ROWS as usize]) -> Vec<Vec<u8>> {
        let plan = Plan::from_slots(slots);
        let capacity = self.applier.capacity();
        self.gpu.submit(&mut |encoder| self.applier.write_batch(encoder, &plan, capacity)).unwrap();
        self.graph.replay().unwrap();
        self.outputs.iter().map(|y| self.gpu.read(y.region()).unwrap()).collect()
    }
}

#[test]
fn after_any_other_adapter_a_slot_gives_the_bits_of_a_fresh_pool_and_one_captured_graph_serves_all() {
    let adapters = fixtures();
    for gpu in backends() {
        let backend = gpu.caps().backend;
        for op in Op::ALL {
            let fresh: Vec<_> = adapters
                .iter()
                .map(|(name, adapter)| {
                    let input = LoraAdapterInput { name, adapter };
                    let weights = LoraWeights::load(&gpu, spec(&adapters, 1), &[input]).unwrap();
                    Captured::new(&weights, op).replay([0, 0, -1, 0, -1])
                })
                .collect();
            let mut weights = LoraWeights::load(&gpu, spec(&adapters, 2), &[]).unwrap();
            let step = Captured::new(&weights, op);
            assert_eq!(step.replay([-1; ROWS as usize]), step.base, "{backend}: nothing loaded, nothing added");
            for (first, p) in &adapters {
                for (index, (second, q)) in adapters.iter().enumerate() {
                    weights.swap(1, LoraAdapterInput { name: first, adapter: p }).unwrap();
                    step.replay([1; ROWS as usize]);
                    weights.swap(1, LoraAdapterInput { name: second, adapter: q }).unwrap();
                    let found = step.replay([1, 1, -1, 1, -1]);
                    assert_eq!(found, fresh[index], "{backend} {}: {second} after {first}", op.name());
                    for (site, base) in weights.storage().sites().iter().zip(found.iter().zip(&step.base)) {
                        let covered = match site.is_token_rows() {
                            true => q.tokens.iter().any(|tokens| tokens.site == site.id),
                            false => q.pairs.iter().any(|pair| pair.site == site.id),
                        };
                        let (found, base) = base;
                        assert!(covered || found == base, "{backend}: {second} does not cover {}", site.id.path);
                    }
                }
            }
        }
    }
}

#[test]
fn a_captured_graph_stays_right_through_evictions_reordered_rows_and_base_rows() {
    let adapters = fixtures();
    for gpu in backends() {
        let mut weights = LoraWeights::load(&gpu, spec(&adapters, 3), &[]).unwrap();
        let step = Captured::new(&weights, Op::Bgmv);
        // What each adapter gives each row, from a batch of that adapter alone.
        let alone: Vec<_> = adapters
            .iter()
            .map(|(name, adapter)| {
                weights.swap(0, LoraAdapterInput { name, adapter }).unwrap();
                step.replay([0; ROWS as usize])
            })
            .collect();
        weights.clear(0).unwrap();
        assert_eq!(step.replay([0; ROWS as usize]), step.base, "a cleared slot adds nothing");
        let mut held: [Option<usize>; 3] = [None; 3];
        for turn in 0..24usize {
            let (slot, index) = (turn * 7 % 3, turn * 5 % adapters.len());
            if held.contains(&Some(index)) {
                continue;
            }
            let (name, adapter) = &adapters[index];
            weights.swap(slot, LoraAdapterInput { name, adapter }).unwrap();
            held[slot] = Some(index);
            let slots: [i32; ROWS as usize] = std::array::from_fn(|row| (row * (turn + 1)) as i32 % 4 - 1);
            let found = step.replay(slots);
            for (site, base) in step.base.iter().enumerate() {
                let row_bytes = base.len() / ROWS as usize;
                for (row, slot) in slots.iter().enumerate() {
                    let holder = usize::try_from(*slot).ok().and_then(|slot| held[slot]);
                    let expected = holder.map_or(base, |index| &alone[index][site]);
                    let range = row * row_bytes..(row + 1) * row_bytes;
                    assert_eq!(found[site][range.clone()], expected[range], "{} turn {turn}", gpu.caps().backend);
                }
            }
        }
    }
}

/// Sites of experts in order, a token a row, one of its experts each; captured once.
struct Routed {
    gpu: Arc<dyn GpuBackend>,
    tokens: Applier,
    graph: Box<dyn Graph>,
    experts: Region,
    outputs: Vec<Matrix>,
    base: Vec<Vec<u8>>,
}

impl Routed {
    fn new(weights: &LoraWeights, op: Op) -> Self {
        let (gpu, storage) = (weights.gpu(), weights.storage());
        let pool = storage.experts().unwrap();
        let capacity = Capacity::any(ROWS);
        let tokens = Applier::new(&**gpu, storage, DType::F32, capacity).unwrap();
        let applier = ExpertApplier::new(&**gpu, pool, DType::F32, ROWS).unwrap();
        let experts = gpu.alloc(4 * u64::from(ROWS), "experts").unwrap();
        let upload = |width: u32, salt: u32| {
            let value = |i: u32| ((i * 29 + salt * 17) % 64) as f32 / 64.0 - 0.5;
            let bytes: Vec<u8> = (0..ROWS * width).flat_map(|i| value(i).to_le_bytes()).collect();
            let region = gpu.alloc(bytes.len() as u64, "activations").unwrap();
            gpu.submit(&mut |encoder| encoder.write(&region, &bytes)).unwrap();
            (region, bytes)
        };
        let site = |(i, site): (usize, &ExpertSite)| {
            let x = Matrix::new(upload(site.in_features, i as u32).0, site.in_features);
            let (origin, base) = upload(site.out_features, 100 + i as u32);
            let y = Matrix::new(gpu.alloc(origin.len(), "y").unwrap(), site.out_features);
            (x, origin, y, base)
        };
        let all: Vec<_> = pool.sites().iter().enumerate().map(site).collect();
        let graph = gpu
            .capture(&mut |encoder| {
                for (i, (x, origin, y, _)) in all.iter().enumerate() {
                    encoder.copy(y.region(), origin)?;
                    let count = pool.sites()[i].experts;
                    let expert = Experts::ByRow(&experts);
                    let routing = Routing { rows: ROWS, experts: count, top_k: 1, expert, places: None };
                    applier.encode_rows(encoder, op, pool, &tokens, capacity, &routing)?;
                    let outputs = [Output { site: i, y }];
                    applier.encode(encoder, pool, op, ROWS, ROWS, ExpertInput::Tokens(x), &outputs)?;
                }
                Ok(())
            })
            .unwrap();
        let (outputs, base) = all.into_iter().map(|(_, _, y, base)| (y, base)).unzip();
        Self { gpu: gpu.clone(), tokens, graph, experts, outputs, base }
    }

    /// Replays the step for these tokens and experts; each site's outputs.
    fn replay(&self, slots: [i32; ROWS as usize], experts: [u32; ROWS as usize]) -> Vec<Vec<u8>> {
        let plan = Plan::from_slots(slots);
        let capacity = self.tokens.capacity();
        self.gpu
            .submit(&mut |encoder| {
                encoder.write(&self.experts, bytemuck::cast_slice(&experts))?;
                self.tokens.write_batch(encoder, &plan, capacity)
            })
            .unwrap();
        self.graph.replay().unwrap();
        self.outputs.iter().map(|y| self.gpu.read(y.region()).unwrap()).collect()
    }
}

#[test]
fn after_any_other_adapter_a_slot_has_the_experts_of_its_own_and_no_others() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let base = BaseModel::open(root.join("_base/mixtral")).unwrap();
    let open = |name: &'static str| (name, load(root.join(name), Some(&base)).unwrap());
    let mut adapters: Vec<_> =
        ["24_moe_target_params_mixtral", "26_moe_router", "41_moe_v4_per_expert_keys"].into_iter().map(open).collect();
    // One of a few experts of one layer.
    let few = adapters[0].1.experts.iter().filter(|pair| pair.site.layer == 1 && pair.expert % 3 == 0).cloned();
    adapters.push(("few", Adapter::from_pairs(Vec::new()).with_experts(few.collect())));
    let all = || adapters.iter().map(|(_, adapter)| adapter);
    let experts = || ExpertSpec::for_adapters(all(), DType::F32).unwrap().map(|spec| spec.over(&base));
    let (slots, routed) = ([0, 0, -1, 0, -1], [0, 3, 1, 2, 0]);
    for gpu in backends() {
        let backend = gpu.caps().backend;
        for op in Op::ALL {
            let load = |max_loras: u32, inputs: &[LoraAdapterInput<'_>]| {
                LoraWeights::load_with_experts(&gpu, spec(&adapters, max_loras), experts(), inputs).unwrap()
            };
            let fresh: Vec<_> = adapters
                .iter()
                .map(|(name, adapter)| {
                    let weights = load(1, &[LoraAdapterInput { name, adapter }]);
                    assert!(weights.expert_pool.is_some() && weights.expert_pool_bytes > 0);
                    Routed::new(&weights, op).replay(slots, routed)
                })
                .collect();
            let mut weights = load(2, &[]);
            let step = Routed::new(&weights, op);
            assert_eq!(step.replay([-1; ROWS as usize], routed), step.base, "{backend}: nothing loaded, nothing added");
            for (first, p) in &adapters {
                for (index, (second, q)) in adapters.iter().enumerate() {
                    weights.swap(1, LoraAdapterInput { name: first, adapter: p }).unwrap();
                    step.replay([1; ROWS as usize], routed);
                    weights.swap(1, LoraAdapterInput { name: second, adapter: q }).unwrap();
                    let found = step.replay(slots.map(|slot| if slot < 0 { slot } else { 1 }), routed);
                    assert_eq!(found, fresh[index], "{backend} {}: {second} after {first}", op.name());
                }
            }
            weights.clear(1).unwrap();
            assert_eq!(step.replay([1; ROWS as usize], routed), step.base, "{backend}: an emptied slot adds nothing");
        }
    }
}

#[test]
fn without_experts_there_is_no_pool_of_them_and_an_adapter_that_has_some_is_refused() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let base = BaseModel::open(root.join("_base/mixtral")).unwrap();
    let open = |name: &str| load(root.join(name), Some(&base)).unwrap();
    let (router, experts) = (open("26_moe_router"), open("24_moe_target_params_mixtral"));
    let gpu = lorapool::backend::open("cpu", 0).unwrap();
    let spec = PoolSpec::for_adapters([&router, &experts], 2, DType::F32).unwrap();
    let mut weights = LoraWeights::load(&gpu, spec, &[LoraAdapterInput { name: "router", adapter: &router }]).unwrap();
    assert_eq!((weights.expert_pool, weights.expert_pool_bytes), (None, 0));
    let refused = weights.swap(1, LoraAdapterInput { name: "experts", adapter: &experts }).unwrap_err();
    assert!(refused.to_string().contains("mlp.experts"), "{refused}");
    assert_eq!(weights.adapter_names(), ["router"]);
}
