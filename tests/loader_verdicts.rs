//! Every fixture gets its verdict, code, notices and number of sites: `tests/fixtures/verdicts.json` says which.

mod loader_support;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use loader_support::{Files, base, fixtures, json_file, notice_codes};
use lorapool::adapter::{Audit, BaseModel, Fate, PeftAdapterConfig, Targets, TensorFate, Verdict, audit, load};
use serde_json::Value;

/// What an audit says, as far as the table tells.
fn check(case: &str, with: &str, audit: &Audit, expected: &Value) -> Result<(), String> {
    let found = serde_json::json!({
        "verdict": audit.verdict,
        "code": audit.code,
        "sites": audit.sites.len(),
        "notices": audit.notices.iter().map(|notice| notice.code).collect::<Vec<_>>(),
    });
    let same = ["verdict", "code", "sites", "notices"].iter().all(|key| found[*key] == expected[*key]);
    if !same {
        return Err(format!("{case} {with}: found {found} ({:?}), expected {expected}", audit.message));
    }
    let other = |name: &str| !name.contains("lora_") || name.contains(".experts.");
    let rows = |fate: &&TensorFate| fate.fate == Fate::Applied && other(&fate.name);
    let rows = audit.fates.iter().filter(rows).count();
    match audit.verdict {
        // A and B, a bias or a magnitude beside some, and rows of tables.
        Verdict::Accept
            if audit.tensors.applied
                != 2 * audit.sites.len() + audit.sites.iter().filter(|site| site.vectors.is_some()).count() + rows
                || audit.code.is_some() =>
        {
            Err(format!("{case} {with}: {:?} of {} sites", audit.tensors, audit.sites.len()))
        }
        Verdict::Reject if !audit.message.as_ref().is_some_and(|m| m.contains(case)) => {
            Err(format!("{case} {with}: no file in {:?}", audit.message))
        }
        _ => Ok(()),
    }
}

#[test]
fn every_fixture_gets_its_verdict_with_and_without_its_base() {
    let table = json_file(&fixtures().join("verdicts.json"));
    let table = table.as_object().unwrap();
    let mut wrong = Vec::new();
    for (case, expected) in table {
        let dir = fixtures().join(case);
        let base = base(expected["base"].as_str().unwrap());
        wrong.extend(check(case, "with base", &audit(&dir, Some(&base)), expected).err());
        let expected = expected.get("without_base").unwrap_or(expected);
        wrong.extend(check(case, "without base", &audit(&dir, None), expected).err());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let folders: BTreeSet<_> = fs::read_dir(fixtures())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().into_string().unwrap())
        .filter(|name| !name.starts_with('_') && !matches!(name.as_str(), "configs" | "42_batch_mixed"))
        .collect();
    assert_eq!(folders, table.keys().cloned().collect(), "the table and the folders differ");
}

#[test]
fn every_trainers_config_is_read_or_refused_by_name() {
    let refused = [
        ("22", "E_BDLORA"),
        ("24", "E_KASA"),
        ("28", "E_PEFT_ADALORA"),
        ("29", "E_PEFT_VERA"),
        ("30", "E_PEFT_LOHA"),
        ("31", "E_PEFT_LOKR"),
        ("32", "E_PEFT_IA3"),
        ("33", "E_PEFT_OFT"),
        ("34", "E_PEFT_PROMPT"),
        ("35", "E_PEFT_TRAINABLE_TOKENS"),
        ("36", "E_PEFT_OTHER"),
        ("37", "E_PEFT_OTHER"),
    ];
    for number in 1..=38 {
        let name = format!("{number:02}");
        let path = fixtures().join("configs").join(format!("{name}.json"));
        let expected = refused.iter().find(|(case, _)| *case == name).map(|(_, code)| *code);
        match PeftAdapterConfig::from_file(&path) {
            Ok((config, _)) => {
                assert_eq!(expected, None, "{name} was read");
                let json = json_file(&path);
                assert_eq!(config.r as u64, json["r"].as_u64().unwrap());
                assert_eq!(config.lora_alpha, json["lora_alpha"].as_f64().unwrap());
                assert_eq!(config.use_rslora, json["use_rslora"].as_bool().unwrap_or(false));
                assert!(config.scales().is_ok());
            }
            Err(error) => assert_eq!(Some(error.code()), expected, "{name}: {error}"),
        }
    }
}

#[test]
fn every_trainers_config_that_is_read_loads_with_tensors_for_its_targets() {
    let mut loaded = 0;
    for number in 1..=38 {
        let path = fixtures().join("configs").join(format!("{number:02}.json"));
        let Ok((config, _)) = PeftAdapterConfig::from_file(&path) else { continue };
        if config.use_dora {
            continue;
        }
        let layer = |name: &String| match name.starts_with("layers.") {
            true => format!("model.{name}"),
            false => format!("model.layers.0.self_attn.{name}"),
        };
        let modules: Vec<String> = match &config.target_modules {
            Targets::Names(names) => names.iter().map(layer).collect(),
            Targets::Pattern(_) => vec!["model.language_model.layers.0.self_attn.q_proj".into()],
            Targets::None => vec!["model.layers.0.self_attn.q_proj".into()],
        };
        let files = Files { config: json_file(&path), tensors: Vec::new() };
        let files = modules.iter().fold(files, |files, module| files.pair(module, config.r, 12, 10));
        let adapter = files.load(None).unwrap_or_else(|error| panic!("{number}: {error}"));
        assert_eq!((adapter.pairs.len(), adapter.tensors_applied()), (modules.len(), 2 * modules.len()), "{number}");
        let scale = match config.use_rslora {
            true => config.lora_alpha / (config.r as f64).sqrt(),
            false => config.lora_alpha / config.r as f64,
        };
        assert!(adapter.pairs.iter().all(|pair| pair.scale == scale as f32), "{number}");
        assert!(!notice_codes(&adapter).contains(&"N_TARGETS_OUTSIDE"), "{number}: {:?}", adapter.notices);
        loaded += 1;
    }
    assert!(loaded >= 24, "{loaded}");
}

#[test]
fn adapters_from_public_trainers_load_where_they_are_at_hand() {
    let real = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/real");
    if !real.is_dir() {
        eprintln!("skipped: {} is not there", real.display());
        return;
    }
    let sites = |name: &str| load(real.join(name), None).map(|adapter| adapter.pairs.len()).unwrap();
    for name in ["gemma3-270m-a", "gemma3-270m-b", "gemma3-270m-c"] {
        assert_eq!(sites(name), 72);
    }
    assert_eq!(sites("opt-125m-bf16"), 24);
    let wide = load(real.join("token-cls-wide-q"), None).unwrap();
    assert_eq!(wide.pairs.len(), 32);
    assert_eq!(wide.unapplied.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["score.bias", "score.weight"]);
    // One base for all three, inferred from them.
    let three: Vec<_> = ["a", "b", "c"].map(|n| load(real.join(format!("gemma3-270m-{n}")), None).unwrap()).into();
    assert_eq!(BaseModel::infer(&three).unwrap().linears().len(), 72);
    assert!(BaseModel::infer(three.iter().chain([&wide])).is_err(), "two models' adapters are for one base");
}
