//! `lorapool run`

use serde_json::Value;

use crate::{backends, fixture, lorapool, named};

/// Runs and checks what every good run has to say.
#[track_caller]
fn passes(args: &[&str]) -> Value {
    let ran = lorapool(["run", "--json", "--steps", "2"].iter().chain(args));
    assert_eq!(ran.code, 0, "{args:?}: {ran:?}");
    let document = ran.json();
    assert_eq!((&document["mismatches"], &document["swapped"]), (&0.into(), &true.into()), "{args:?}: {document}");
    let worst = document["worst_error_over_bound"].as_f64().unwrap();
    assert!(worst > 0.0 && worst <= 1.0, "{args:?}: {worst}");
    assert!(document["step_us"].as_f64().unwrap() > 0.0);
    assert!(document["elements_checked"].as_u64().unwrap() > 0);
    document
}

#[test]
fn the_samples_pass_on_every_required_backend() {
    for backend in backends() {
        let document = passes(&["--backend", &backend]);
        assert_eq!(document["backend"], backend.as_str());
        assert!(document["device"].as_str().is_some_and(|device| !device.is_empty()));
        let adapters = document["adapters"].as_array().unwrap();
        assert!(adapters.len() >= 3);
        for adapter in adapters {
            assert!(adapter["name"].is_string() && adapter["sites"].as_u64() > Some(0), "{adapter}");
            assert!(adapter["rank_max"].as_u64() > Some(0), "{adapter}");
        }
        assert_eq!(document["rows"], 32);
        assert!(document["base_rows"].as_u64() > Some(0));
        assert!(document["sites"].as_u64() >= Some(14));
    }
}

#[test]
fn without_a_backend_the_best_one_takes_the_samples() {
    let document = passes(&[]);
    let auto = &lorapool(["devices", "--json"]).json()["auto"]["backend"];
    assert_eq!(&document["backend"], auto);
}

#[test]
fn every_type_and_mix_passes_with_adapters_of_ones_own() {
    let (a, b, c) =
        (named("a", "02_plain_f16"), named("b", "08_rank_pattern_rslora"), named("c", "06_r72_over_hidden"));
    let base = fixture("_base/llama");
    for backend in backends() {
        for (dtype, mix, rows) in [("f32", "distinct", "33"), ("f16", "uniform", "7"), ("bf16", "zipf", "65")] {
            let own = ["--base", &base, "--adapter", &a, "--adapter", &b, "--adapter", &c, "--backend", &backend];
            let document = passes(&[&own[..], &["--dtype", dtype, "--mix", mix, "--rows", rows]].concat());
            assert_eq!((&document["dtype"], &document["mix"]), (&dtype.into(), &mix.into()));
            let names: Vec<&Value> = document["adapters"].as_array().unwrap().iter().map(|a| &a["name"]).collect();
            assert_eq!(names, ["a", "b", "c"]);
        }
    }
}

#[test]
fn a_base_is_inferred_from_the_adapters_where_none_is_given() {
    for (case, sites) in [("13_fused_qkv_phi3", 8), ("14_gpt2_conv1d", 8), ("15_bert_seqcls", 4), ("05_r1", 4)] {
        let document = passes(&["--adapter", &named("only", case), "--backend", "cpu", "--rows", "5"]);
        assert_eq!(document["sites"], sites, "{case}");
    }
    let union = ["--adapter", &named("q", "05_r1"), "--adapter", &named("k", "06_r72_over_hidden"), "--backend", "cpu"];
    assert_eq!(passes(&union)["sites"], 8);
}

#[test]
fn one_row_and_one_adapter_are_a_batch_too() {
    let document = passes(&["--adapter", &named("only", "09_layers_to_transform"), "--rows", "1", "--backend", "cpu"]);
    assert_eq!((&document["rows"], &document["base_rows"]), (&1.into(), &0.into()));
}

#[test]
fn the_same_seed_gives_the_same_batch() {
    let batch = |seed: &str| {
        let document = passes(&["--mix", "uniform", "--seed", seed, "--backend", "cpu"]);
        (document["base_rows"].clone(), document["worst_error_over_bound"].clone())
    };
    assert_eq!(batch("5"), batch("5"));
    assert_ne!(batch("5"), batch("6"));
}

#[test]
fn the_text_names_device_adapters_and_result() {
    let ran = lorapool(["run", "--backend", "cpu", "--steps", "2"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    for word in ["cpu ", "plain-f32", "rank-pattern", "bgmv", "sgmv", "worst error/bound"] {
        assert!(ran.stdout.contains(word), "{word}: {}", ran.stdout);
    }
    assert!(ran.stdout.lines().last().unwrap().starts_with("ok all "), "{}", ran.stdout);
}

#[test]
fn a_refused_adapter_is_named_with_its_code() {
    let (good, bad) = (named("fine", "05_r1"), named("broken", "d_truncated"));
    let ran = lorapool(["run", "--backend", "cpu", "--adapter", &good, "--adapter", &bad, "--json"]);
    ran.fails(1, "E_FILE_TRUNCATED", &["\"broken\"", "d_truncated/adapter_model.safetensors"]);
    let ran = lorapool(["run", "--backend", "cpu", "--adapter", &good, "--adapter", &bad]);
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""));
    assert!(ran.stderr.starts_with("error[E_FILE_TRUNCATED]: adapter \"broken\": "), "{}", ran.stderr);
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
}

#[test]
fn adapters_for_different_bases_are_refused_by_name() {
    let (llama, wide) = (named("llama", "05_r1"), named("other", "d_wrong_hidden"));
    let ran = lorapool(["run", "--backend", "cpu", "--adapter", &llama, "--adapter", &wide, "--json"]);
    ran.fails(1, "E_SHAPE", &["\"other\"", "model.layers.0.self_attn.q_proj"]);
    let base = fixture("_base/qwen3");
    let ran = lorapool(["run", "--backend", "cpu", "--adapter", &llama, "--base", &base, "--json"]);
    ran.fails(1, "E_BASE_SHAPE", &["\"llama\""]);
}

#[test]
fn a_sum_of_adapters_runs_as_one() {
    let sum = format!("sum={}@0.7+{}@0.3", fixture("07_rank_pattern"), fixture("02_plain_f16"));
    let plain = named("plain", "01_plain_f32");
    let document = passes(&["--adapter", &sum, "--adapter", &plain, "--backend", "cpu", "--dtype", "f32"]);
    assert_eq!(document["adapters"][0]["name"], "sum");
    let alone = passes(&["--adapter", &named("a", "07_rank_pattern"), "--backend", "cpu"]);
    let rank = |document: &Value| document["adapters"][0]["rank_max"].as_u64().unwrap();
    assert_eq!(rank(&document), rank(&alone) + 8);
}

#[test]
fn experts_are_checked_at_every_routed_linear_on_every_required_backend() {
    // Outputs of gate_up and down over both layers; two experts a token, inputs of tokens and of rows, each op twice.
    const ELEMENTS: u64 = 2 * (40 + 48) * 2 * 2 * 4;
    for (case, base) in [
        ("24_moe_target_params_mixtral", "mixtral"),
        ("25_moe_target_params_qwen3", "qwen3moe"),
        ("26b_moe_gptoss_transposed", "gptoss"),
        ("41_moe_v4_per_expert_keys", "mixtral"),
    ] {
        let (base, adapter) = (fixture(&format!("_base/{base}")), named("routed", case));
        for backend in backends() {
            for (dtype, rows) in [("f32", 21), ("bf16", 6)] {
                let args = ["--backend", &backend, "--dtype", dtype, "--rows", &rows.to_string()];
                let document = passes(&[&args[..], &["--base", &base, "--adapter", &adapter]].concat());
                assert_eq!(document["expert_sites"], 4, "{case}");
                assert_eq!(document["adapters"][0]["experts"], 16, "{case}");
                assert!(document["elements_checked"].as_u64() > Some(rows * ELEMENTS), "{case}: {document}");
                // Without the base: the linears of the adapter alone.
                let alone = passes(&[&args[..], &["--adapter", &adapter]].concat());
                assert!(alone["expert_sites"].as_u64() > Some(0), "{case}: {alone}");
            }
        }
    }
}

#[test]
fn experts_go_with_the_adapter_that_is_swapped_in() {
    let (experts, router) = (named("experts", "24_moe_target_params_mixtral"), named("router", "26_moe_router"));
    let base = fixture("_base/mixtral");
    for adapters in [[&experts, &router], [&router, &experts]] {
        let args = ["--backend", "cpu", "--base", &base, "--adapter", adapters[0], "--adapter", adapters[1]];
        let document = passes(&args);
        let of = |line: &Value| (line["name"].as_str().unwrap().to_owned(), line["experts"].as_u64() > Some(0));
        let swap = of(&document["swap"]["in"]);
        assert_eq!(swap.1, document["adapters"][1]["experts"].as_u64() > Some(0), "{document}");
        assert!(swap.0.ends_with("(again)"), "{document}");
    }
}
