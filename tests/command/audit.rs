//! `lorapool audit`

use crate::{cases, fixture, lorapool};

/// Cases that are accepted; every other one is rejected.
const ACCEPTED: &[&str] = &[
    "01_plain_f32",
    "02_plain_f16",
    "03_plain_bf16",
    "04_rslora_r6",
    "05_r1",
    "06_r72_over_hidden",
    "07_rank_pattern",
    "08_rank_pattern_rslora",
    "09_layers_to_transform",
    "10_target_regex_string",
    "11_all_linear",
    "12_exclude_modules",
    "13_fused_qkv_phi3",
    "13b_headdim_not_hidden_over_heads",
    "14_gpt2_conv1d",
    "15_bert_seqcls",
    "16_lora_bias",
    "18_embedding_lora",
    "19_embedding_lora_nobase",
    "20_modules_to_save",
    "21_trainable_tokens",
    "22_trainable_tokens_tied",
    "23_dora",
    "24_moe_target_params_mixtral",
    "25_moe_target_params_qwen3",
    "26_moe_router",
    "26b_moe_gptoss_transposed",
    "26c_pattern_overlap",
    "26d_embed_lora_tied",
    "26e_embed_lora_tied_ensure",
    "26f_modules_to_save_tied_ensure",
    "41_moe_v4_per_expert_keys",
    "43_named_subfolder",
    "d_config_alpha_float",
    "d_config_alpha_zero",
    "d_config_bom",
    "d_config_no_peft_type",
    "d_config_null_patterns",
    "d_config_old_peft",
    "d_config_r_float",
    "d_config_unknown_fields",
    "d_default_infix",
    "d_double_prefix",
    "d_f64",
    "d_language_model_prefix",
    "d_mixed_dtype",
    "d_no_prefix",
];

/// A batch of other cases, and no adapter itself.
const BATCH: &str = "42_batch_mixed";

#[test]
fn every_fixture_gets_its_verdict_with_exit_code_and_reason() {
    let cases = cases();
    let mut accepted = Vec::new();
    for (case, base) in cases.iter().filter(|(case, _)| case != BATCH) {
        let ran = lorapool(["audit", &fixture(case), "--base", &fixture(base), "--json"]);
        let document = ran.json();
        assert_eq!(ran.stderr, "", "{case}");
        assert!(document["notices"].is_array() && document["tensors"]["total"].is_u64(), "{case}: {document}");
        if document["verdict"] == "accept" {
            assert_eq!(ran.code, 0, "{case}");
            assert!(
                document["code"].is_null() && document["tensors"]["applied"].as_u64() > Some(0),
                "{case}: {document}"
            );
            assert!(document["slot_bytes"].as_u64() > Some(0), "{case}");
            for site in document["sites"].as_array().unwrap() {
                for field in ["layer", "rank", "in", "out"] {
                    assert!(site[field].is_u64(), "{case}: {field} of {site}");
                }
                assert!(
                    site["scale"].is_f64() && site["site"].is_string() && site["module"].is_string(),
                    "{case}: {site}"
                );
            }
            accepted.push(case.as_str());
        } else {
            assert_eq!((ran.code, document["verdict"].as_str()), (2, Some("reject")), "{case}");
            assert!(document["code"].as_str().is_some_and(|code| code.starts_with("E_")), "{case}: {document}");
            assert!(document["message"].as_str().is_some_and(|text| text.contains(case)), "{case}: {document}");
            assert_eq!(document["sites"].as_array().unwrap().len(), 0, "{case}");
        }
    }
    accepted.sort_unstable();
    assert_eq!(accepted, ACCEPTED);
}

#[test]
fn a_site_has_the_rank_scale_and_widths_that_peft_gave_it() {
    let ran = lorapool(["audit", &fixture("04_rslora_r6"), "--base", &fixture("_base/llama"), "--json"]);
    let document = ran.json();
    let site = &document["sites"][0];
    assert_eq!(site["site"], "model.layers.0.self_attn.q_proj");
    assert_eq!((&site["layer"], &site["module"]), (&0.into(), &"q_proj".into()));
    assert_eq!((&site["rank"], &site["in"], &site["out"]), (&6.into(), &48.into(), &48.into()));
    assert!((site["scale"].as_f64().unwrap() - 12.0 / 6f64.sqrt()).abs() < 1e-6);
    assert_eq!(document["tensors"], serde_json::json!({ "applied": 8, "total": 8 }));
}

#[test]
fn the_text_ends_with_the_verdict() {
    let ran = lorapool(["audit", &fixture("01_plain_f32")]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    assert!(ran.stdout.lines().last().unwrap().starts_with("accept 14 sites, 28 of 28 tensors"), "{}", ran.stdout);
    let ran = lorapool(["audit", &fixture("23_dora")]);
    assert_eq!((ran.code, ran.stderr.as_str()), (2, ""));
    let last = ran.stdout.lines().last().unwrap();
    assert!(last.starts_with("reject E_DORA: ") && last.contains("--base"), "{}", ran.stdout);
}

#[test]
fn sites_say_where_a_bias_or_dora_is() {
    for (case, kind, said, outputs) in
        [("16_lora_bias", "lora_bias", "bias", 4 * 36), ("23_dora", "dora", "DoRA", 2 * (48 + 24 + 48))]
    {
        let args = [&fixture(case)[..], "--base", &fixture("_base/llama")].map(str::to_owned);
        let document = lorapool(["audit".to_owned(), "--json".to_owned()].into_iter().chain(args.clone())).json();
        let sites = document["sites"].as_array().unwrap();
        assert!(!sites.is_empty() && sites.iter().all(|site| site["vectors"] == kind), "{document}");
        let number = |site: &serde_json::Value, field: &str| site[field].as_u64().unwrap();
        let matrices: u64 = sites.iter().map(|s| 4 * number(s, "rank") * (number(s, "in") + number(s, "out"))).sum();
        assert_eq!(document["slot_bytes"], matrices + 8 * outputs, "{case}");
        let ran = lorapool(["audit".to_owned()].into_iter().chain(args));
        assert!(ran.stdout.lines().filter(|line| line.contains(said)).count() >= sites.len(), "{}", ran.stdout);
        // The pool that is estimated has room for them.
        let least = 8 * (2 * (48 + 24) + 2 * 48);
        assert!(document["pool"]["bytes"].as_u64().unwrap() > least, "{document}");
    }
    let plain = lorapool(["audit", &fixture("01_plain_f32"), "--json"]).json();
    assert!(plain["sites"].as_array().unwrap().iter().all(|site| site["vectors"].is_null()));
}

#[test]
fn what_is_not_there_or_not_a_directory_is_rejected_and_a_bad_base_is_an_error() {
    let document = |path: &str| {
        let ran = lorapool(["audit", path, "--json"]);
        assert_eq!(ran.code, 2, "{ran:?}");
        ran.json()
    };
    assert_eq!(document("/nonexistent/adapter")["code"], "E_NOT_FOUND");
    assert_eq!(document(&fixture("INDEX.json"))["code"], "E_NOT_A_DIRECTORY");
    let ran = lorapool(["audit", &fixture("05_r1"), "--base", "/nonexistent/base", "--json"]);
    ran.fails(1, "E_NOT_FOUND", &["base", "/nonexistent/base"]);
}

#[test]
fn several_adapters_are_a_table_and_an_array_and_one_refusal_is_exit_code_2() {
    let (good, other, bad) = (fixture("01_plain_f32"), fixture("06_r72_over_hidden"), fixture("23_dora"));
    let ran = lorapool(["audit", &good, &other, "--json"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    let documents = ran.json();
    let documents = documents.as_array().unwrap();
    assert_eq!(documents.len(), 2);
    assert!(
        documents.iter().all(|d| d["verdict"] == "accept" && d["pool"]["bytes"].as_u64() > Some(0)),
        "{documents:?}"
    );
    assert_eq!(documents[1]["adapter"], other.as_str());
    let ran = lorapool(["audit", &good, &bad, &other, "--json"]);
    assert_eq!(ran.code, 2);
    let verdicts: Vec<_> = ran.json().as_array().unwrap().iter().map(|d| d["verdict"].clone()).collect();
    assert_eq!(verdicts, ["accept", "reject", "accept"]);
    // One is an object still, and its file is named.
    assert!(lorapool(["audit", &good, "--json"]).json().is_object());
    let ran = lorapool(["audit", &good, &bad]);
    assert_eq!((ran.code, ran.stderr.as_str()), (2, ""));
    let lines: Vec<_> = ran.stdout.lines().collect();
    assert!(lines[0].starts_with("adapter"), "{}", ran.stdout);
    assert!(
        lines[1].contains("01_plain_f32") && lines[1].contains(" accept ") && lines[1].contains("28/28"),
        "{}",
        lines[1]
    );
    assert!(lines[2].contains("23_dora") && lines[2].contains("reject E_DORA"), "{}", lines[2]);
    assert_eq!(lines.last(), Some(&"reject 1 of 2"));
    assert_eq!(lorapool(["audit"]).code, 2);
}

#[test]
fn the_pool_is_estimated_for_the_ranks_and_slots_that_are_asked_for() {
    let pool = |args: &[&str]| {
        let adapter = fixture("06_r72_over_hidden");
        let base = fixture("_base/llama");
        let ran = lorapool([&["audit", &adapter, "--base", &base, "--json"], args].concat());
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.json()
    };
    let own = pool(&[]);
    assert_eq!((&own["pool"]["max_rank"], &own["pool"]["max_loras"]), (&72.into(), &8.into()));
    assert!(!own["notices"].to_string().contains("N_RANK_OVER_POOL"));
    // Every linear of the base has room, at the padded rank: A is [72][in], B is [out][72], of two bytes.
    let base = lorapool::adapter::BaseModel::open(fixture("_base/llama")).unwrap();
    // So have its embeddings, and 256 replaced rows of f32 each the input embedding and the head.
    let linears = base.linears().iter().map(|l| l.in_features + l.out_features);
    let embeddings = base.embeddings().iter().map(|e| e.vocabulary + e.width);
    let least: u64 = linears.chain(embeddings).map(|width| 2 * 72 * width as u64).sum::<u64>() + 2 * 256 * (4 + 48 * 4);
    let bytes = own["pool"]["bytes"].as_u64().unwrap();
    assert!(bytes >= 8 * least && bytes < 8 * least * 5 / 4, "{bytes} beside {}", 8 * least);
    assert_eq!(own["pool"]["sites"], base.linears().len() + base.embeddings().len() + 2);
    let twice = pool(&["--max-loras", "16", "--dtype", "f32"])["pool"]["bytes"].as_u64().unwrap();
    // All but the replaced rows, which keep the type of the base's tables, takes four times as much.
    assert!(twice > bytes * 13 / 4, "{twice} beside {bytes}");
    let small = pool(&["--max-rank", "64"]);
    assert!(small["notices"].to_string().contains("N_RANK_OVER_POOL"), "{small}");
    assert_eq!(small["verdict"], "accept");
    assert!(lorapool(["audit", &fixture("05_r1"), "--max-rank", "0"]).code == 2);
}

#[test]
fn a_sum_of_adapters_is_judged_as_one() {
    let base = fixture("_base/llama");
    let sum = format!("{}@0.7+{}@-0.3", fixture("05_r1"), fixture("04_rslora_r6"));
    let ran = lorapool(["audit", &sum, "--base", &base, "--json"]);
    let document = ran.json();
    assert_eq!((ran.code, &document["adapter"]), (0, &sum.as_str().into()), "{document}");
    assert_eq!(document["notices"][0]["code"], "N_MERGED", "{document}");
    let alone =
        |case: &str| lorapool(["audit", &fixture(case), "--json"]).json()["tensors"]["applied"].as_u64().unwrap();
    assert_eq!(document["tensors"]["applied"], alone("05_r1") + alone("04_rslora_r6"));
    // Beside others, and refused by name.
    let head = format!("{}@1+{}@1", fixture("05_r1"), fixture("15_bert_seqcls"));
    let ran = lorapool(["audit", &fixture("05_r1"), &head, "--json"]);
    assert_eq!((ran.code, &ran.json()[1]["code"]), (2, &"E_MERGE".into()));
    let half = format!("{}@0.5+{}", fixture("05_r1"), fixture("04_rslora_r6"));
    lorapool(["audit", &half, "--json"]).fails(2, "E_USAGE", &["PATH@WEIGHT", "04_rslora_r6"]);
}
