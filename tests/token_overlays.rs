//! Token overlays in two stages, through [`LoraWeights`] and [`AdapterManager`]: raw while the served tables are not
//! known, built when they are, gone without a trace with their adapter.

use std::path::Path;
use std::sync::Arc;

use lorapool::DType;
use lorapool::adapter::{self, Adapter, BaseModel};
use lorapool::backend::{self, GpuBackend};
use lorapool::manager::{AdapterManager, DeviceTables, LoraAdapterInput, LoraWeights, Options, SlotRef, Source};
use lorapool::pool::{Part, PoolSpec};

fn fixture(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn base(name: &str) -> BaseModel {
    BaseModel::open(fixture("_base").join(name)).unwrap()
}

fn cpu() -> Arc<dyn GpuBackend> {
    backend::open("cpu", 0).unwrap()
}

/// The weights of a base as its file has them, f32.
fn weight(base: &str, name: &str) -> Vec<u8> {
    let bytes = std::fs::read(fixture("_base").join(base).join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.tensor(name).unwrap().data().to_vec()
}

/// What a host of this base serves, on the device.
fn served(gpu: &Arc<dyn GpuBackend>, base: &str) -> Arc<DeviceTables> {
    let upload = |name: &str| {
        let bytes = weight(base, name);
        let region = gpu.alloc(bytes.len() as u64, name).unwrap();
        gpu.submit(&mut |encoder| encoder.write(&region, &bytes)).unwrap();
        region
    };
    let embedding = upload("model.embed_tokens.weight");
    let tables = DeviceTables::new(gpu).with("model.embed_tokens", embedding, 131, 48, DType::F32).unwrap();
    Arc::new(match base {
        "llama_tied" => tables.tied("model.embed_tokens", "lm_head"),
        _ => tables.with("lm_head", upload("lm_head.weight"), 131, 48, DType::F32).unwrap(),
    })
}

fn spec(base: &BaseModel, max_loras: u32) -> PoolSpec {
    PoolSpec::for_base(base, 8, max_loras, DType::F32)
}

/// Everything that a slot's token rows are: bytes and table entries.
fn state(weights: &LoraWeights, slot: u32) -> Vec<(Vec<u8>, u32)> {
    let pool = weights.storage();
    let sites = (0..pool.sites().len()).filter(|site| pool.sites()[*site].is_token_rows());
    let of = |site: usize| {
        let bytes = weights.gpu().read(&pool.part(slot, site, Part::A).unwrap()).unwrap();
        let cell = pool.tables().get(slot, site);
        assert_eq!(cell.a.is_null(), cell.rank == 0);
        (bytes, cell.rank)
    };
    sites.map(of).collect()
}

fn counts(weights: &LoraWeights, slot: u32) -> Vec<u32> {
    state(weights, slot).into_iter().map(|(_, rank)| rank).collect()
}

#[test]
fn a_raw_overlay_waits_serves_nothing_and_is_what_the_base_s_files_make_of_it_once_the_tables_are_known() {
    for (name, of) in [
        ("20_modules_to_save", "llama"),
        ("21_trainable_tokens", "llama"),
        ("22_trainable_tokens_tied", "llama_tied"),
        ("26f_modules_to_save_tied_ensure", "llama_tied"),
    ] {
        let (gpu, base) = (cpu(), base(of));
        let (raw, known): (Adapter, Adapter) =
            (adapter::load(fixture(name), None).unwrap(), adapter::load(fixture(name), Some(&base)).unwrap());
        assert!(!raw.raw_tokens.is_empty() && raw.tokens.is_empty(), "{name}");
        assert!(known.raw_tokens.is_empty() && !known.tokens.is_empty(), "{name}");
        assert_eq!(raw.digest, known.digest, "{name}: the digest is the files'");
        let input = |adapter| LoraAdapterInput { name: "it", adapter };
        let mut waiting = LoraWeights::load(&gpu, spec(&base, 3), &[input(&raw)]).unwrap();
        assert_eq!(waiting.overlay_raw.len(), waiting.slots.len());
        assert!(waiting.overlay_raw[0].is_some() && waiting.overlay_raw[1..].iter().all(Option::is_none));
        assert_eq!(counts(&waiting, 0), [0, 0]);
        let refused = waiting.plan([(SlotRef::Slot(0), 1.0)]).unwrap_err();
        assert_eq!(refused.code(), "E_OVERLAY_PENDING");
        let ready = LoraWeights::load(&gpu, spec(&base, 3), &[input(&known)]).unwrap();
        waiting.set_served_tables(served(&gpu, of)).unwrap();
        assert!(waiting.overlay_raw.iter().all(Option::is_none) && waiting.overlay_raw.len() == 3, "{name}");
        assert_eq!(state(&waiting, 0), state(&ready, 0), "{name}");
        assert!(waiting.plan([(SlotRef::Slot(0), 1.0)]).is_ok());
        // What comes later is compared at once, and what went leaves nothing.
        waiting.swap(1, LoraAdapterInput { name: "again", adapter: &raw }).unwrap();
        assert!(waiting.overlay_raw[1].is_none());
        assert_eq!(state(&waiting, 1), state(&ready, 0), "{name}");
        waiting.clear(1).unwrap();
        assert!(state(&waiting, 1).iter().all(|(bytes, rank)| *rank == 0 && bytes.iter().all(|byte| *byte == 0)));
        // Tables set anew from the slot's layers name the same rows.
        let (layers, before) = (waiting.slots[0].layers.clone(), state(&waiting, 0));
        waiting.refresh_slot_tables(0, &layers, 2.0, &*gpu).unwrap();
        assert_eq!(state(&waiting, 0), before);
    }
}

#[test]
fn a_swap_into_a_slot_whose_overlay_waits_forgets_the_overlay() {
    let (gpu, base) = (cpu(), base("llama"));
    let raw = adapter::load(fixture("20_modules_to_save"), None).unwrap();
    let plain = adapter::load(fixture("05_r1"), Some(&base)).unwrap();
    let mut weights =
        LoraWeights::load(&gpu, spec(&base, 2), &[LoraAdapterInput { name: "raw", adapter: &raw }]).unwrap();
    weights.swap(0, LoraAdapterInput { name: "plain", adapter: &plain }).unwrap();
    assert!(weights.overlay_raw[0].is_none() && weights.plan([(SlotRef::Slot(0), 1.0)]).is_ok());
    weights.set_served_tables(served(&gpu, "llama")).unwrap();
    assert_eq!(counts(&weights, 0), [0, 0]);
}

#[test]
fn an_overlay_that_does_not_fit_names_both_numbers_and_changes_nothing() {
    let (gpu, base) = (cpu(), base("llama"));
    let known = adapter::load(fixture("21_trainable_tokens"), Some(&base)).unwrap();
    let input = LoraAdapterInput { name: "it", adapter: &known };
    let error = LoraWeights::load(&gpu, spec(&base, 2).with_token_rows(2), &[input]).unwrap_err();
    let text = error.to_string();
    assert!(
        error.code() == "E_LIMIT" && text.contains('3') && text.contains('2') && text.contains("token_rows"),
        "{text}"
    );
    let error = LoraWeights::load(&gpu, spec(&base, 2).without_token_rows(), &[input]).unwrap_err();
    assert!(error.code() == "E_SHAPE" && error.to_string().contains("model.embed_tokens"), "{error}");
    // Raw, the same shows when the tables come; the adapter goes on waiting.
    let raw = adapter::load(fixture("21_trainable_tokens"), None).unwrap();
    let input = LoraAdapterInput { name: "it", adapter: &raw };
    let mut weights = LoraWeights::load(&gpu, spec(&base, 2).with_token_rows(2), &[input]).unwrap();
    assert_eq!(weights.set_served_tables(served(&gpu, "llama")).unwrap_err().code(), "E_LIMIT");
    assert!(weights.overlay_raw[0].is_some());
    // Another vocabulary.
    let other = DeviceTables::new(&gpu);
    let region = gpu.alloc(131 * 48 * 4, "short").unwrap();
    let other = other.with("model.embed_tokens", region, 100, 48, DType::F32).unwrap();
    let error = weights.set_served_tables(Arc::new(other)).unwrap_err();
    assert!(error.code() == "E_VOCABULARY" && error.to_string().contains("130"), "{error}");
}

#[test]
fn a_manager_promotes_overlays_like_any_adapter_and_a_later_one_leaves_no_trace_of_them() {
    let (gpu, of) = (cpu(), base("llama"));
    let weights = LoraWeights::load(&gpu, spec(&of, 1), &[]).unwrap();
    let manager = AdapterManager::new(weights, Options::default()).unwrap();
    let overlay = || Source::Dir(fixture("20_modules_to_save"));
    // Without a base and without tables it can't be told which rows it replaces.
    assert!(manager.load("overlay", overlay()).is_err());
    manager.set_served_tables(served(&gpu, "llama")).unwrap();
    manager.load("overlay", overlay()).unwrap();
    let first = state(&manager.weights(), 0);
    assert!(first.iter().all(|(_, rank)| *rank > 0));
    manager.load("plain", Source::Dir(fixture("05_r1"))).unwrap();
    assert!(state(&manager.weights(), 0).iter().all(|(bytes, rank)| *rank == 0 && bytes.iter().all(|b| *b == 0)));
    manager
        .load("overlay", Source::Memory(Arc::new(adapter::load(fixture("20_modules_to_save"), Some(&of)).unwrap())))
        .unwrap();
    assert_eq!(state(&manager.weights(), 0), first);
}
