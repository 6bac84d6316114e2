//! `LoraWeights`, item by item: its fields, slots, references, tables and swaps.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use lorapool::DType;
use lorapool::adapter::{Adapter, HostMatrix, HostPair, LoraModule, PeftAdapterConfig, SiteId};
use lorapool::backend::{GpuBackend, open};
use lorapool::manager::{LoraAdapterInput, LoraWeights, SlotRef, select_victim_slot};
use lorapool::ops::{Applier, Matrix, Op, Output};
use lorapool::pool::{PoolSpec, SiteSpec};

const WIDTH: u32 = 48;

fn gpu() -> Arc<dyn GpuBackend> {
    open("cpu", 0).unwrap()
}

fn site(layer: usize, module: LoraModule) -> SiteId {
    let path = format!("model.layers.{layer}.self_attn.{module}");
    SiteId { layer, module, path: path.into() }
}

fn spec(max_rank: u32, max_loras: u32) -> PoolSpec {
    let modules = [LoraModule::QProj, LoraModule::KProj, LoraModule::VProj];
    let all = (0..2).flat_map(|layer| modules.clone().map(|module| site(layer, module)));
    let sites = all.map(|id| SiteSpec::linear(id, WIDTH, WIDTH)).collect();
    PoolSpec { sites, max_rank, max_loras, dtype: DType::F32, vectors: true }
}

fn matrix(rows: usize, cols: usize, seed: u64) -> HostMatrix {
    let value = |i: usize| ((i as u64 * 37 + seed * 101) % 61) as f32 / 64.0 - 0.5;
    let bytes = (0..rows * cols).flat_map(|i| value(i).to_le_bytes()).collect();
    HostMatrix { dtype: DType::F32, rows, cols, bytes }
}

/// An adapter over `sites`, told apart by `seed`.
fn adapter(sites: &[SiteId], rank: usize, scale: f32, seed: u64) -> Adapter {
    let pair = |site: &SiteId| {
        HostPair::new(site.clone(), matrix(rank, WIDTH as usize, seed), matrix(WIDTH as usize, rank, seed + 7), scale)
    };
    let config = PeftAdapterConfig { r: rank, ..PeftAdapterConfig::default() };
    Adapter { config, scale, ..Adapter::from_pairs(sites.iter().map(pair).collect()) }
}

fn load(max_loras: u32, adapters: &[(&str, &Adapter)]) -> LoraWeights {
    let inputs: Vec<_> = adapters.iter().map(|(name, adapter)| LoraAdapterInput { name, adapter }).collect();
    LoraWeights::load(&gpu(), spec(16, max_loras), &inputs).unwrap()
}

/// What rows of these slots get added to an output of zeros at (0, q_proj).
fn deltas(weights: &LoraWeights, slots: &[SlotRef]) -> Vec<Vec<f32>> {
    let gpu = weights.gpu();
    let plan = weights.plan(slots.iter().map(|slot| (*slot, 1.0))).unwrap();
    let applier = Applier::new(&**gpu, weights.storage(), DType::F32, plan.capacity()).unwrap();
    let bytes = slots.len() as u64 * u64::from(WIDTH) * 4;
    let x = Matrix::new(gpu.alloc(bytes, "x").unwrap(), WIDTH);
    let y = Matrix::new(gpu.alloc(bytes, "y").unwrap(), WIDTH);
    let ones: Vec<u8> = std::iter::repeat_n(1f32.to_le_bytes(), bytes as usize / 4).flatten().collect();
    let site = weights.storage().site(0, &LoraModule::QProj).unwrap();
    gpu.submit(&mut |encoder| {
        encoder.write(x.region(), &ones)?;
        applier.write_batch(encoder, &plan, plan.capacity())?;
        let outputs = [Output { site, y: &y }];
        applier.encode(encoder, weights.storage(), Op::Bgmv, plan.capacity(), &x, &outputs)
    })
    .unwrap();
    let values = DType::F32.decode(&gpu.read(y.region()).unwrap());
    values.chunks(WIDTH as usize).map(<[f32]>::to_vec).collect()
}

fn all_sites() -> Vec<SiteId> {
    spec(1, 1).sites.into_iter().map(|s| s.id).collect()
}

#[test]
fn several_adapters_are_packed_at_the_start_and_the_first_is_active() {
    let (p, q) = (adapter(&all_sites(), 8, 2.0, 1), adapter(&all_sites()[..1], 3, 0.5, 2));
    let weights = load(4, &[("p", &p), ("q", &q)]);
    assert_eq!((weights.name.as_str(), weights.active, weights.adapter_config.r), ("p", 0, 8));
    assert_eq!((weights.max_rank, weights.max_loras, weights.pinned), (16, 4, 2));
    assert_eq!((weights.slots.len(), weights.ref_counts.len(), weights.last_used.len()), (4, 4, 4));
    assert_eq!(weights.adapter_names(), ["p", "q"]);
    assert_eq!((weights.slot_of("q"), weights.slot_of("r"), weights.slot_of("")), (Some(1), None, None));
    assert!(weights.expert_pool.is_none() && weights.expert_pool_bytes == 0);
    assert!(weights.overlay_raw.len() == 4 && weights.overlay_raw.iter().all(Option::is_none));
    assert_eq!(weights.pool_bytes as u64, weights.storage().bytes());
    assert_eq!(weights.pool, weights.storage().blocks()[0].ptr());
    assert!(weights.active_layers()[1].as_ref().unwrap().module_pair(&LoraModule::VProj).is_some());
    assert!(weights.slots[1].layers[1].is_none());
    assert!(!weights.scale_table.is_null());
}

#[test]
fn tables_have_a_key_for_every_site_adapted_or_not() {
    let p = adapter(&all_sites()[..1], 8, 2.0, 1);
    let weights = load(3, &[("p", &p)]);
    assert_eq!(weights.tables.len(), 6);
    let (a, b) = weights.tables[&(0, LoraModule::QProj)];
    assert!(!a.is_null() && b.0 == a.0 + 3 * 8);
    let tables = weights.storage().tables();
    assert_eq!(tables.get(0, 0).rank, 8);
    assert!(tables.get(0, 1).a.is_null() && tables.get(1, 0).a.is_null());
}

#[test]
fn acquire_resolves_the_active_slot_and_release_takes_what_it_returned() {
    let (p, q) = (adapter(&all_sites(), 8, 2.0, 1), adapter(&all_sites(), 3, 0.5, 2));
    let mut weights = load(3, &[("p", &p), ("q", &q)]);
    let resolved = weights.acquire_slot(-1);
    assert_eq!((resolved, weights.slot_ref_count(0)), (0, 1));
    weights.activate("q").unwrap();
    assert_eq!((weights.name.as_str(), weights.acquire_slot(-1)), ("q", 1));
    weights.release_slot(resolved);
    assert_eq!((weights.slot_ref_count(0), weights.slot_ref_count(1)), (0, 1));
    weights.release_slot(0);
    assert_eq!(weights.slot_ref_count(0), 0, "a release too many");
    weights.release_slot(-1);
    assert_eq!((weights.acquire_slot(3), weights.slot_ref_count(3)), (-1, 0));
    assert!(weights.activate("nobody").is_err());
}

#[test]
fn a_touched_slot_is_not_the_next_victim() {
    let p = adapter(&all_sites(), 8, 2.0, 1);
    let mut weights = load(3, &[("p", &p)]);
    assert_eq!(weights.slot_last_used(9), 0);
    for (slot, seed) in [(1, 2), (2, 3)] {
        let other = adapter(&all_sites(), 4, 1.0, seed);
        weights.swap(slot, LoraAdapterInput { name: &format!("cached {slot}"), adapter: &other }).unwrap();
    }
    assert_eq!(select_victim_slot(&weights.cache_slot_views()), Ok(1));
    weights.touch_slot(1);
    assert_eq!(select_victim_slot(&weights.cache_slot_views()), Ok(2));
    weights.acquire_slot(2);
    assert_eq!(select_victim_slot(&weights.cache_slot_views()), Ok(1));
    assert!(weights.slot_last_used(2) > weights.slot_last_used(1));
    assert_eq!(weights.lru_tick.load(Ordering::Relaxed), weights.slot_last_used(2));
}

#[test]
fn prefill_is_routed_to_any_slot_but_the_active_one() {
    let p = adapter(&all_sites(), 8, 2.0, 1);
    let weights = load(2, &[("p", &p)]);
    assert_eq!([-1, 0, 1, 2, -7].map(|slot| weights.routed_prefill_slot(slot)), [None, None, Some(1), None, None]);
}

#[test]
fn an_id_is_the_contents_and_never_the_base_s() {
    let (p, q) = (adapter(&all_sites(), 8, 2.0, 1), adapter(&all_sites(), 8, 2.0, 2));
    let mut weights = load(2, &[("p", &p)]);
    let first = weights.adapter_id_for_slot(-1);
    assert_eq!((weights.adapter_id_for_slot(0), weights.adapter_id_for_slot(1)), (first, 0));
    weights.swap(0, LoraAdapterInput { name: "p", adapter: &q }).unwrap();
    let second = weights.adapter_id_for_slot(0);
    assert!(second != first && second != 0);
    weights.swap(0, LoraAdapterInput { name: "p", adapter: &p }).unwrap();
    assert_eq!(weights.adapter_id_for_slot(0), first);
    assert_eq!(weights.slots[0].generation, 3);
}

#[test]
fn a_busy_slot_is_never_overwritten() {
    let (p, q) = (adapter(&all_sites(), 8, 2.0, 1), adapter(&all_sites(), 8, 2.0, 2));
    let mut weights = load(2, &[("p", &p)]);
    let before = deltas(&weights, &[SlotRef::Slot(0)]);
    let resolved = weights.acquire_slot(0);
    let error = weights.swap(0, LoraAdapterInput { name: "q", adapter: &q }).unwrap_err();
    assert_eq!(error.code(), "E_SLOT_BUSY");
    assert!(weights.clear(0).is_err());
    assert_eq!(deltas(&weights, &[SlotRef::Slot(0)]), before);
    weights.release_slot(resolved);
    weights.swap(0, LoraAdapterInput { name: "q", adapter: &q }).unwrap();
    assert_ne!(deltas(&weights, &[SlotRef::Slot(0)]), before);
}

#[test]
fn a_swap_leaves_no_trace_of_the_old_adapter_and_a_refused_one_changes_nothing() {
    let wide = adapter(&all_sites(), 16, 2.0, 1);
    let other = adapter(&all_sites()[1..3], 2, 3.0, 2);
    let narrow = adapter(&all_sites(), 1, 1.0, 3);
    let mut weights = load(2, &[("wide", &wide)]);
    weights.swap(0, LoraAdapterInput { name: "other", adapter: &other }).unwrap();
    assert_eq!(deltas(&weights, &[SlotRef::Slot(0)]), [[0.0; WIDTH as usize]], "q_proj is not covered any more");
    weights.swap(0, LoraAdapterInput { name: "narrow", adapter: &narrow }).unwrap();
    let fresh = load(1, &[("narrow", &narrow)]);
    assert_eq!(deltas(&weights, &[SlotRef::Slot(0)]), deltas(&fresh, &[SlotRef::Slot(0)]));
    let layout = weights.storage().layout().slot_bytes();
    let bytes = |w: &LoraWeights| w.gpu().read(&w.storage().blocks()[0].slice(0, layout).unwrap()).unwrap();
    assert_eq!(bytes(&weights), bytes(&fresh), "every byte of the slot");

    let before = (bytes(&weights), weights.adapter_names(), weights.slots[0].generation);
    let unknown = SiteId { path: "model.layers.9.mlp.up_proj".into(), ..site(9, LoraModule::UpProj) };
    for bad in [adapter(&all_sites(), 17, 1.0, 4), adapter(&[unknown], 2, 1.0, 5)] {
        assert!(weights.swap(0, LoraAdapterInput { name: "bad", adapter: &bad }).is_err());
        assert_eq!((bytes(&weights), weights.adapter_names(), weights.slots[0].generation), before);
    }
}

#[test]
fn refresh_rewrites_one_slot_of_every_table() {
    let (p, q) = (adapter(&all_sites(), 8, 2.0, 1), adapter(&all_sites(), 8, 1.0, 2));
    let weights = load(2, &[("p", &p), ("q", &q)]);
    let both = deltas(&weights, &[SlotRef::Slot(0), SlotRef::Slot(1)]);
    weights.refresh_slot_tables(0, &[None, None], 0.0, &**weights.gpu()).unwrap();
    let after = deltas(&weights, &[SlotRef::Slot(0), SlotRef::Slot(1)]);
    assert_eq!(after[0], [0.0; WIDTH as usize]);
    assert_eq!(after[1], both[1]);
    weights.refresh_slot_tables(0, &weights.slots[0].layers, 2.0, &**weights.gpu()).unwrap();
    assert_eq!(deltas(&weights, &[SlotRef::Slot(0), SlotRef::Slot(1)]), both);
    assert!(weights.refresh_slot_tables(2, &[], 0.0, &**weights.gpu()).is_err());
}

#[test]
fn base_has_its_own_selector_and_a_vacant_slot_is_no_adapter() {
    let p = adapter(&all_sites(), 8, 2.0, 1);
    let weights = load(2, &[("p", &p)]);
    let rows = deltas(&weights, &[SlotRef::Base, SlotRef::Active, SlotRef::Slot(0)]);
    assert_eq!(rows[0], [0.0; WIDTH as usize]);
    assert!(rows[1] == rows[2] && rows[1].iter().all(|v| *v != 0.0));
    assert_eq!(weights.device_slot(SlotRef::Slot(1)).unwrap_err().code(), "E_UNKNOWN_SLOT");
    assert_eq!(weights.device_slot(SlotRef::Slot(2)).unwrap_err().code(), "E_UNKNOWN_SLOT");
}

#[test]
fn names_are_unique_and_not_empty_and_a_start_with_too_many_adapters_is_refused() {
    let p = adapter(&all_sites(), 8, 2.0, 1);
    let input = |name| LoraAdapterInput { name, adapter: &p };
    let load = |inputs: &[LoraAdapterInput<'_>]| LoraWeights::load(&gpu(), spec(16, 2), inputs).map(|_| ());
    assert_eq!(load(&[input("p"), input("p")]).unwrap_err().code(), "E_INPUT");
    assert_eq!(load(&[input("")]).unwrap_err().code(), "E_INPUT");
    assert_eq!(load(&[input("a"), input("b"), input("c")]).unwrap_err().code(), "E_LIMIT");
    assert!(load(&[]).is_ok());
}
