//! Adapters merged at load: PEFT's rule for `add_weighted_adapter(combination_type="cat")`, against sums of PEFT's own
//! deltas.

mod loader_support;

use std::collections::BTreeMap;
use std::sync::Arc;

use loader_support::{Files, assert_refused, base, delta, fixtures, notice_codes, pair_at, read_tensors};
use lorapool::adapter::{Adapter, Code, RowVectors, audit_merged, load, load_merged};
use lorapool::backend::{self, GpuBackend};
use lorapool::manager::{AdapterManager, LoraAdapterInput, LoraWeights, Options, Source};
use lorapool::pool::PoolSpec;
use lorapool::{DType, Error};
use serde_json::json;

const Q: &str = "model.layers.0.self_attn.q_proj";

fn fixture(case: &str) -> Adapter {
    load(fixtures().join(case), Some(&base("llama"))).unwrap()
}

/// PEFT's own delta at each site: outputs with the adapter less those without, for the fixture's inputs.
fn pefts(case: &str) -> BTreeMap<String, (Vec<f64>, Vec<f64>)> {
    let tensors = read_tensors(&fixtures().join(case).join("expected.safetensors"));
    let site = |name: &String| {
        let path = name.strip_suffix("|y")?;
        let get = |part: &str| &tensors[&format!("{path}|{part}")].values;
        let delta = get("y").iter().zip(get("y_base")).map(|(y, base)| y - base).collect();
        Some((path.to_owned(), (get("x").clone(), delta)))
    };
    tensors.keys().filter_map(site).collect()
}

#[test]
fn a_merged_adapter_gives_the_weighted_sum_of_pefts_deltas() {
    // These have the same inputs at every site, and scales and ranks by pattern among them.
    let cases = ["01_plain_f32", "07_rank_pattern", "02_plain_f16"];
    let deltas = cases.map(pefts);
    let adapters = cases.map(fixture);
    for weights in [[1.0, 1.0, 1.0], [0.7, 0.3, -0.5], [0.0, 2.5, 1e-3]] {
        let parts: Vec<_> = adapters.iter().zip(weights).collect();
        let merged = Adapter::merge(&parts).unwrap();
        let mut compared = 0;
        for pair in &merged.pairs {
            let (x, _) = &deltas[0][&*pair.site.path];
            let found = delta(pair, pair.scale.into(), x);
            for (at, found) in found.iter().enumerate() {
                let terms = deltas.iter().zip(weights).map(|(deltas, weight)| {
                    let (inputs, delta) = &deltas[&*pair.site.path];
                    assert_eq!(inputs, x);
                    f64::from(weight) * delta[at]
                });
                let terms: Vec<f64> = terms.collect();
                let (sum, size) = (terms.iter().sum::<f64>(), terms.iter().map(|term| term.abs()).sum::<f64>());
                // One rounding of each element of B, in f32, and of the scale.
                assert!((found - sum).abs() <= 1e-6 * size + 1e-9, "{}: {found} {sum}", pair.site.path);
                compared += 1;
            }
            let ranks: usize = adapters.iter().map(|adapter| pair_at(adapter, &pair.site.path).rank()).sum();
            assert_eq!(pair.rank(), ranks);
        }
        assert!(compared > 2000, "{compared}");
        assert_eq!(notice_codes(&merged), ["N_MERGED"]);
        assert_eq!(merged.tensors_applied(), adapters.iter().map(Adapter::tensors_applied).sum::<usize>());
    }
}

#[test]
fn weights_that_are_the_same_at_a_site_leave_every_element_as_it_is() {
    let (one, two) = (fixture("02_plain_f16"), fixture("03_plain_bf16"));
    let merged = Adapter::merge(&[(&one, 0.5), (&one, 0.5)]).unwrap();
    for (pair, from) in merged.pairs.iter().zip(&one.pairs) {
        assert_eq!((pair.scale, pair.a.dtype, pair.b.dtype), (0.5 * from.scale, DType::F16, DType::F16));
        assert_eq!(pair.a.bytes, [&from.a.bytes[..], &from.a.bytes].concat());
    }
    // One adapter alone is multiplied.
    let merged = Adapter::merge(&[(&two, -3.0)]).unwrap();
    for (pair, from) in merged.pairs.iter().zip(&two.pairs) {
        assert_eq!((pair.scale, &pair.a, &pair.b), (-3.0 * from.scale, &from.a, &from.b));
    }
    assert_eq!(merged.scale, -3.0 * two.scale);
    // Types that differ become F32, exactly.
    let merged = Adapter::merge(&[(&one, 1.0), (&two, 1.0)]).unwrap();
    assert!(merged.pairs.iter().all(|pair| (pair.a.dtype, pair.b.dtype) == (DType::F32, DType::F32)));
}

#[test]
fn sites_that_one_adapter_alone_covers_keep_its_rank() {
    // q and v of both layers; q, k, v, o of layer 1, of other ranks.
    let (one, two) = (fixture("05_r1"), fixture("09_layers_to_transform"));
    let merged = Adapter::merge(&[(&one, 1.0), (&two, 2.0)]).unwrap();
    let find = |adapter: &'_ Adapter, path: &str| adapter.pairs.iter().find(|p| &*p.site.path == path).cloned();
    let (mut both, mut alone) = (0, 0);
    for pair in &merged.pairs {
        let parts = [find(&one, &pair.site.path), find(&two, &pair.site.path)];
        let ranks: usize = parts.iter().flatten().map(|pair| pair.rank()).sum();
        assert_eq!(pair.rank(), ranks);
        match parts.iter().flatten().count() {
            1 => alone += 1,
            _ => both += 1,
        }
    }
    assert!(both > 0 && alone > 0, "{both} {alone}");
    // Its config says so too, by PEFT's rule.
    let scales = merged.config.scales().unwrap();
    for pair in &merged.pairs {
        let (rank, scale) = scales.of(&pair.site.path).unwrap();
        assert_eq!((rank, scale as f32), (pair.rank(), pair.scale), "{}", pair.site.path);
    }
}

#[test]
fn the_digest_is_that_of_what_is_served() {
    let (one, two) = (fixture("01_plain_f32"), fixture("07_rank_pattern"));
    let merge = |weights: [f32; 2]| Adapter::merge(&[(&one, weights[0]), (&two, weights[1])]).unwrap().digest;
    assert_eq!(merge([0.7, 0.3]), merge([0.7, 0.3]));
    let all = [merge([0.7, 0.3]), merge([0.3, 0.7]), merge([0.7, 0.31]), one.digest, two.digest];
    for (i, digest) in all.iter().enumerate() {
        assert!(!all[..i].contains(digest), "{i}");
    }
    // Weights of 1 change nothing of one adapter alone.
    assert_eq!(Adapter::merge(&[(&one, 1.0)]).unwrap().digest, one.digest);
}

#[test]
fn what_can_not_be_added_up_is_refused_by_name() {
    let plain = fixture("05_r1");
    assert!(matches!(Adapter::merge(&[]), Err(Error::Input(_))));
    for weight in [f32::NAN, f32::INFINITY] {
        assert!(
            matches!(Adapter::merge(&[(&plain, 1.0), (&plain, weight)]), Err(Error::Input(m)) if m.contains("adapter 2"))
        );
    }
    // A task's head, which the host applies.
    let head = load(fixtures().join("15_bert_seqcls"), None).unwrap();
    assert_refused(Adapter::merge(&[(&plain, 1.0), (&head, 1.0)]), Code::Merge, &["adapter 2", "classifier"]);
    // DoRA, whose gains are no part of a sum.
    let mut shaped = plain.clone();
    shaped.pairs[0].vectors = Some(RowVectors { gain: vec![0.5; 48], offset: vec![0.0; 48] });
    let path = shaped.pairs[0].site.path.clone();
    assert_refused(Adapter::merge(&[(&plain, 1.0), (&shaped, 1.0)]), Code::Merge, &["adapter 2", &path, "DoRA"]);
    // Other widths at one site.
    let pairs = |rank: usize, outputs: usize| Files::lora(rank).pair(Q, rank, 48, outputs).load(None).unwrap();
    let (one, two) = (pairs(2, 48), pairs(2, 40));
    assert_refused(Adapter::merge(&[(&one, 1.0), (&two, 1.0)]), Code::BaseConflict, &[Q, "48", "40", "adapter 2"]);
    let wide = pairs(300, 48);
    assert_refused(
        Adapter::merge(&[(&wide, 1.0), (&wide, 1.0)]),
        Code::RankLimit,
        &[Q, "600", "512", "300 of adapter 1"],
    );
    let large = Files::lora(1).with("lora_alpha", json!(1e30)).pair(Q, 1, 8, 8).load(None).unwrap();
    assert_refused(Adapter::merge(&[(&large, 1e30)]), Code::Merge, &[Q, "1e30", "f32"]);
    // From files, the path is named.
    let dir = fixtures();
    let parts = [(dir.join("05_r1"), 1.0), (dir.join("d_nan_weight"), 0.5)];
    assert_refused(load_merged(&parts, None), Code::NotFinite, &["d_nan_weight"]);
    assert_eq!(audit_merged(&parts, None).unwrap().code, Some(Code::NotFinite));
    let parts = [(dir.join("05_r1"), 1.0), (dir.join("15_bert_seqcls"), 0.5)];
    assert_refused(load_merged(&parts, None), Code::Merge, &["15_bert_seqcls", "classifier"]);
    // Bases of other names are remarked on.
    let parts = [(dir.join("05_r1"), 1.0), (dir.join("13_fused_qkv_phi3"), 0.5)];
    let merged = load_merged(&parts, None).unwrap();
    assert_eq!(notice_codes(&merged), ["N_MERGED", "N_MERGED_BASES"]);
    assert!(merged.notices[0].message.contains("05_r1 times 1"), "{}", merged.notices[0].message);
}

#[test]
fn embeddings_add_up_as_linears_do() {
    let one = fixture("19_embedding_lora_nobase");
    let embedding = |adapter: &'_ Adapter| adapter.pairs.iter().find(|pair| pair.embedding).cloned().unwrap();
    let merged = Adapter::merge(&[(&one, 0.5), (&one, -2.0)]).unwrap();
    let (pair, from) = (embedding(&merged), embedding(&one));
    assert_eq!((pair.rank(), pair.in_features(), pair.out_features()), (2 * from.rank(), 131, 48));
    let token: Vec<f64> = (0..131).map(|id| f64::from(u8::from(id == 7))).collect();
    let found = delta(&pair, pair.scale.into(), &token);
    for (f, e) in found.iter().zip(delta(&from, -1.5 * f64::from(from.scale), &token)) {
        assert!((f - e).abs() < 1e-6 * e.abs().max(1e-3), "{f} {e}");
    }
    // Replaced rows don't.
    let tokens = load(fixtures().join("21_trainable_tokens"), Some(&base("llama"))).unwrap();
    assert_refused(Adapter::merge(&[(&one, 1.0), (&tokens, 1.0)]), Code::Merge, &["adapter 2", "rows", "embed_tokens"]);
}

#[test]
fn a_manager_loads_a_sum_into_one_slot() {
    let base = Arc::new(base("llama"));
    let gpu: Arc<dyn GpuBackend> = backend::open("cpu", 0).unwrap();
    let manager = |max_rank: u32| {
        let spec = PoolSpec::for_base(&base, max_rank, 2, DType::F32);
        let plain = fixture("05_r1");
        let weights = LoraWeights::load(&gpu, spec, &[LoraAdapterInput { name: "plain", adapter: &plain }]).unwrap();
        AdapterManager::new(weights, Options { base: Some(base.clone()), ..Options::default() }).unwrap()
    };
    let parts = vec![(fixtures().join("01_plain_f32"), 0.7), (fixtures().join("04_rslora_r6"), 0.3)];
    let served = manager(14);
    let id = served.load("sum", Source::Merged(parts.clone())).unwrap();
    let lease = served.acquire("sum").unwrap();
    assert_eq!(lease.id(), id);
    assert_eq!(served.weights().slots[lease.slot() as usize].digest, load_merged(&parts, Some(&base)).unwrap().digest);
    // The pool has to have room for the sum of the ranks; the error names both.
    let error = manager(13).load("sum", Source::Merged(parts)).unwrap_err().to_string();
    assert!(error.contains("14") && error.contains("13"), "{error}");
}
