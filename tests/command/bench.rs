//! `lorapool bench`

use crate::{backends, fixtures, lorapool};

/// One layer and few replays: the numbers mean nothing here, their document does.
const SHORT: [&str; 6] = ["--layers", "1", "--replays", "2", "--json", "--backend"];

#[test]
fn bench_times_named_cases_beside_their_floor_on_every_required_backend() {
    for backend in backends() {
        let ran =
            lorapool(["bench", "--case", "1x1-r16", "--case", "4x4-r16"].iter().chain(&SHORT).chain(&[&*backend]));
        assert_eq!(ran.code, 0, "{ran:?}");
        let document = ran.json();
        let lines = document["results"].as_array().unwrap();
        assert_eq!(lines.iter().map(|line| &line["name"]).collect::<Vec<_>>(), ["1x1-r16", "4x4-r16"]);
        for line in lines {
            assert!(line["median_us"].as_f64() > Some(0.0) && line["floor_us"].as_f64() > Some(0.0), "{line}");
            // Where the base's own products can't be timed, the document says why.
            assert_eq!(line["base_us"].is_null(), document["no_base"].is_string(), "{document}");
        }
        assert!(document["copy_bytes_per_second"].as_f64() > Some(0.0));
    }
}

#[test]
fn bench_says_which_linears_of_a_base_it_does_not_time() {
    let base = fixtures().join("_base/mixtral");
    let own = ["bench", "--rows", "2", "--rank", "4", "--backend", "cpu", "--replays", "2", "--base"];
    let ran = lorapool(own.iter().map(|word| word.as_ref()).chain([base.as_os_str()]).chain(["--json".as_ref()]));
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.json()["experts_left_out"].as_u64() > Some(0), "{ran:?}");
    let text = lorapool(own.iter().map(|word| word.as_ref()).chain([base.as_os_str()]));
    assert!(text.stdout.contains("not in these times:") && text.stdout.contains("--experts"), "{text:?}");
}

/// A Qwen3 of two routed layers of 5 experts; what more its config says.
fn routed_base(more: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = r#""model_type": "qwen3_moe", "hidden_size": 40, "moe_intermediate_size": 24, "num_experts": 5,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "intermediate_size": 8"#;
    std::fs::write(dir.path().join("config.json"), format!("{{{config}{more}}}")).unwrap();
    dir
}

#[test]
fn bench_times_a_bases_routed_experts_on_every_required_backend() {
    let dir = routed_base(r#", "num_experts_per_tok": 3"#);
    let base = dir.path().to_str().unwrap();
    for backend in backends() {
        for op in [&["--prefill"][..], &[]] {
            let own = ["bench", "--experts", "--base", base, "--rows", "21", "--adapters", "2", "--rank", "4"];
            let ran = lorapool(own.iter().chain(&SHORT).chain(&[&*backend]).chain(op));
            assert_eq!(ran.code, 0, "{ran:?}");
            let document = ran.json();
            assert_eq!((&document["sites"], &document["top_k"]), (&2.into(), &3.into()), "{document}");
            let line = &document["results"][0];
            assert_eq!((&line["name"], &line["adapters_used"]), (&"experts-21x2-r4".into(), &2.into()), "{line}");
            assert_eq!(line["op"], if op.is_empty() { "bgmv" } else { "sgmv" });
            assert!(line["median_us"].as_f64() > Some(0.0), "{line}");
            // At least as many as one token has, at most each adapter's all.
            let pairs = line["expert_pairs"].as_u64().unwrap();
            assert!((3..=2 * 5).contains(&pairs), "{line}");
            let weights = pairs * 4 * (40 + 48 + 24 + 40);
            let activations = 21 * 40 + 63 * 24 + 2 * 63 * (48 + 40);
            assert_eq!(line["floor_bytes"].as_u64(), Some(2 * (weights + activations)), "{line}");
            assert_eq!(line["base_us"].is_null(), document["no_base"].is_string(), "{document}");
        }
    }
    let own =
        ["bench", "--experts", "--base", base, "--rows", "2", "--top-k", "5", "--replays", "1", "--backend", "cpu"];
    let text = lorapool(own);
    assert!(text.stdout.contains("4 sites of experts, 5 experts a token"), "{text:?}");
    // Two tokens of one adapter, all experts of both layers.
    assert!(text.stdout.contains("pairs") && text.stdout.contains(" 10"), "{text:?}");
    let tuned = lorapool(own.into_iter().chain(["--tune", "--json"])).json();
    assert!(tuned["results"][0]["chosen_us"].as_f64() > Some(0.0), "{tuned}");
}

#[test]
fn bench_refuses_experts_that_it_does_not_know_enough_of() {
    let silent = routed_base("");
    let base = silent.path().to_str().unwrap();
    let own = ["bench", "--experts", "--rows", "2", "--backend", "cpu", "--json", "--base"];
    lorapool(own.iter().chain(&[base])).fails(2, "E_USAGE", &[base, "num_experts_per_tok", "--top-k"]);
    let many = ["--top-k", "6"];
    lorapool(own.iter().chain(&[base]).chain(&many)).fails(2, "E_USAGE", &["6", "--top-k", "5", "mlp.experts"]);
    let dense = fixtures().join("_base/llama").display().to_string();
    lorapool(own.iter().chain(&[&*dense])).fails(2, "E_USAGE", &["no routed experts", &dense]);
    for other in [&["--plot", "x.svg"][..], &["--sweep"], &["--swap"]] {
        lorapool(["bench", "--experts", "--json"].iter().chain(other)).fails(2, "E_USAGE", &["--experts", other[0]]);
    }
    lorapool(["bench", "--top-k", "2", "--json"]).fails(2, "E_USAGE", &["--experts"]);
    lorapool(["bench", "--experts", "--case", "1x1-r16", "--json"]).fails(2, "E_USAGE", &["--experts --list"]);
}

#[test]
fn bench_times_swaps_beside_a_bare_copy_and_the_step_beside_swaps() {
    for backend in backends() {
        let ran = lorapool(["bench", "--swap", "--case", "1x1-r16"].iter().chain(&SHORT).chain(&[&*backend]));
        assert_eq!(ran.code, 0, "{ran:?}");
        let document = ran.json();
        // Seven sites of one layer at rank 16, two bytes an element.
        assert_eq!(document["slot_bytes"], 16 * 2 * (4 * 4096 + 2 * 1024 + 4096 + 4096 * 3 + 14336 * 3 + 4096));
        let swaps = document["results"].as_array().unwrap();
        assert_eq!(swaps.iter().map(|line| &line["verify"]).collect::<Vec<_>>(), [false, true]);
        for line in swaps {
            assert!(line["share_of_copy"].as_f64() > Some(0.0), "{line}");
            assert!(line["step_meanwhile"]["samples"].as_u64() > Some(2), "{line}");
        }
    }
}

#[test]
fn bench_draws_its_cases() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("plot.svg");
    let plot = ["bench", "--case", "1x1-r16", "--case", "4x4-r16", "--plot", file.to_str().unwrap()];
    let ran = lorapool(plot.iter().chain(&SHORT).chain(&["cpu"]));
    assert_eq!(ran.code, 0, "{ran:?}");
    let drawing = std::fs::read_to_string(&file).unwrap();
    assert!(drawing.starts_with("<svg") && drawing.contains("rank 16, one adapter") && drawing.contains("<circle"));
    let nowhere = dir.path().join("missing/plot.svg");
    let plot = ["bench", "--case", "1x1-r16", "--plot", nowhere.to_str().unwrap()];
    lorapool(plot.iter().chain(&SHORT).chain(&["cpu"])).fails(1, "E_IO", &["missing/plot.svg"]);
}

#[test]
fn bench_names_its_cases_and_knows_no_others() {
    let names = lorapool(["bench", "--list", "--json"]).json();
    assert!(names.as_array().unwrap().contains(&"64x64-r16".into()));
    let names = lorapool(["bench", "--experts", "--list", "--json"]).json();
    assert!(names.as_array().unwrap().contains(&"experts-64x16-r16".into()));
    lorapool(["bench", "--case", "no-such-case", "--json"]).fails(2, "E_USAGE", &["no-such-case", "--list"]);
}

#[test]
fn bench_tunes_by_timing_every_variant_beside_the_chosen_one() {
    for backend in backends() {
        let ran = lorapool(["bench", "--tune", "--case", "1x1-r16"].iter().chain(&SHORT).chain(&[&*backend]));
        assert_eq!(ran.code, 0, "{ran:?}");
        let document = ran.json();
        let line = &document["results"][0];
        assert!(line["chosen_us"].as_f64() > Some(0.0), "{document}");
        let variants = document["variants"].as_array().unwrap();
        assert_eq!(line["variants_us"].as_object().unwrap().len(), variants.len());
    }
}
