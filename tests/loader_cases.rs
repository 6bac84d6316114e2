//! Cases that no fixture has: prefixes, two stacks, fused and resized bases, shards, damaged bases, odd configs.

mod loader_support;

use std::fs;

use loader_support::{Files, assert_refused, base, file_bytes, fixtures, json_file, notice_codes, refusal};
use lorapool::adapter::{BaseModel, Code, Linear, LoraModule, audit, load};
use serde_json::json;

const Q0: &str = "model.layers.0.self_attn.q_proj";

/// A base with these linears: `(path, in, out)`.
fn of(linears: &[(&str, usize, usize)]) -> BaseModel {
    let files = Files { config: json!({"model_type": "none of the usual"}), tensors: Vec::new() };
    linears.iter().fold(files, |f, (path, i, o)| f.tensor(&format!("{path}.weight"), &[*o, *i])).base().unwrap()
}

fn site_names(adapter: &lorapool::adapter::Adapter) -> Vec<(usize, String)> {
    adapter.pairs.iter().map(|pair| (pair.site.layer, pair.site.module.to_string())).collect()
}

#[test]
fn wrapped_paths_land_on_the_one_linear_that_they_can_mean() {
    let text = of(&[(Q0, 8, 6), ("lm_head", 8, 20)]);
    for prefix in [
        "base_model.model.",
        "base_model.model.base_model.model.",
        "",
        "base_model.model.language_model.",
        "base_model.model.model.language_model.",
        "base_model.model.transformer.",
    ] {
        for module in [Q0, "layers.0.self_attn.q_proj"] {
            let adapter = Files::lora(2).raw_pair(&format!("{prefix}{module}"), 2, 8, 6).load(Some(&text)).unwrap();
            assert_eq!(&*adapter.pairs[0].site.path, Q0);
            let plain = prefix == "base_model.model." && module == Q0;
            assert_eq!(notice_codes(&adapter), if plain { vec![] } else { vec!["N_PREFIX"] }, "{prefix}{module}");
        }
    }
    // Both ends of a wrapped model at once.
    let wrapped = Files::lora(2).pair("language_model.model.layers.0.self_attn.q_proj", 2, 8, 6).pair(
        "language_model.lm_head",
        2,
        8,
        20,
    );
    assert_eq!(site_names(&wrapped.load(Some(&text)).unwrap()), [(0, "lm_head".into()), (0, "q_proj".into())]);
}

#[test]
fn a_path_is_never_guessed() {
    let text = of(&[(Q0, 8, 6)]);
    // Another tower of a vision-language model is not the text model.
    let vision = Files::lora(2).pair("vision_tower.layers.0.self_attn.q_proj", 2, 8, 6);
    assert_refused(vision.load(Some(&text)), Code::NotInBase, &["vision_tower.layers.0", "adapter_model.safetensors"]);
    // One of two has no place: nothing is applied.
    let half = Files::lora(2).raw_pair(Q0, 2, 8, 6).raw_pair("model.layers.1.self_attn.q_proj", 2, 8, 6);
    assert_refused(half.load(Some(&text)), Code::NotInBase, &["model.layers.1.self_attn.q_proj"]);
    // Two modules that land on one linear.
    let twice = Files::lora(2).pair(Q0, 2, 8, 6).pair("language_model.layers.0.self_attn.q_proj", 2, 8, 6);
    assert_refused(twice.load(Some(&text)), Code::Prefix, &[Q0]);
    // A base in which the path could mean two linears.
    let two = of(&[(Q0, 8, 6), ("language_model.layers.0.self_attn.q_proj", 8, 6)]);
    let bare = Files::lora(2).pair("layers.0.self_attn.q_proj", 2, 8, 6);
    assert_refused(bare.load(Some(&two)), Code::Prefix, &["language_model.layers.0.self_attn.q_proj"]);
    // Without a base there is nothing to map to.
    assert_refused(Files::lora(2).raw_pair(Q0, 2, 8, 6).load(None), Code::Prefix, &["base_model.model."]);
}

#[test]
fn two_stacks_with_modules_of_one_name_stay_apart() {
    let vision = "model.vision_tower.encoder.layers.0.self_attn.q_proj";
    let text = "model.language_model.layers.0.self_attn.q_proj";
    let both = Files::lora(2).pair(vision, 2, 8, 8).pair(text, 2, 12, 12);
    let expected = [(0, "q_proj".to_owned()), (0, "model.vision_tower.encoder.layers.*.self_attn.q_proj".to_owned())];
    for base in [None, Some(of(&[(vision, 8, 8), (text, 12, 12)]))] {
        let adapter = both.load(base.as_ref()).unwrap();
        assert_eq!(site_names(&adapter), expected);
        // An adapter of one stack alone gives it the same name, so that one pool holds both.
        let alone = Files::lora(2).pair(vision, 2, 8, 8).load(base.as_ref()).unwrap();
        assert_eq!(site_names(&alone), expected[1..]);
    }
    // Two stacks that both look like the main one.
    let a = "transformer.h.0.mlp.up_proj";
    let b = "model.layers.0.mlp.up_proj";
    let sites = site_names(&Files::lora(2).pair(a, 2, 8, 8).pair(b, 2, 8, 8).load(None).unwrap());
    assert_eq!(sites, [(0, "up_proj".into()), (0, "transformer.h.*.mlp.up_proj".into())]);
}

#[test]
fn an_adapters_name_in_the_keys_is_passed_over_but_two_are_refused() {
    let keys = |names: [&str; 2]| {
        let [first, second] = names;
        Files::lora(2)
            .tensor(&format!("base_model.model.{Q0}.lora_A{first}.weight"), &[2, 8])
            .tensor(&format!("base_model.model.{Q0}.lora_B{first}.weight"), &[6, 2])
            .tensor(&format!("base_model.model.model.layers.1.self_attn.q_proj.lora_A{second}.weight"), &[2, 8])
            .tensor(&format!("base_model.model.model.layers.1.self_attn.q_proj.lora_B{second}.weight"), &[6, 2])
    };
    assert_eq!(keys([".ranking", ".ranking"]).load(None).unwrap().pairs.len(), 2);
    assert_refused(keys([".default", ".other"]).load(None), Code::SeveralAdapters, &["default", "other"]);
    assert_refused(keys(["", ".other"]).load(None), Code::SeveralAdapters, &["other"]);
}

#[test]
fn a_directory_of_several_adapters_is_refused_and_of_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    assert_refused(load(dir.path(), None), Code::ConfigMissing, &["adapter_config.json"]);
    Files::lora(2).pair(Q0, 2, 8, 6).write(&dir.path().join("first"));
    assert_eq!(notice_codes(&load(dir.path(), None).unwrap()), ["N_SUBFOLDER"]);
    Files::lora(2).pair(Q0, 2, 8, 6).write(&dir.path().join("second"));
    assert_refused(load(dir.path(), None), Code::SeveralAdapters, &["first", "second"]);
    assert_refused(load(dir.path().join("nowhere"), None), Code::NotFound, &["nowhere"]);
    assert_refused(load(dir.path().join("first/adapter_config.json"), None), Code::NotADirectory, &["first"]);
}

#[test]
fn a_resized_vocabulary_is_named_as_such() {
    let resized = Files::lora(2).pair("lm_head", 2, 48, 136);
    assert_refused(resized.load(Some(&base("llama"))), Code::Vocabulary, &["136", "131", "lm_head"]);
    // A tied base has a head too.
    assert_refused(resized.load(Some(&base("llama_tied"))), Code::Vocabulary, &["136", "131"]);
    assert!(Files::lora(2).pair("lm_head", 2, 48, 131).load(Some(&base("llama_tied"))).is_ok());
}

#[test]
fn a_copy_of_the_bases_weight_is_passed_over_only_when_equal() {
    let copy = |values: Vec<u8>| {
        let mut files = Files::lora(2).pair(Q0, 2, 8, 6);
        files.tensors.push((format!("base_model.model.{Q0}.base_layer.weight"), "F32", vec![6, 8], values));
        files
    };
    let weights = Files { config: json!({}), tensors: Vec::new() }.tensor(&format!("{Q0}.weight"), &[6, 8]);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("model.safetensors"), weights.bytes()).unwrap();
    let base = BaseModel::open(dir.path()).unwrap();
    let equal = weights.tensors[0].3.clone();
    let mut other = equal.clone();
    other[5] ^= 1;
    let adapter = copy(equal.clone()).load(Some(&base)).unwrap();
    assert_eq!((adapter.tensors_applied(), adapter.tensors.len()), (2, 3));
    assert_eq!(notice_codes(&adapter), ["N_BASE_COPY"]);
    assert_refused(copy(other).load(Some(&base)), Code::BaseLayer, &["base_layer.weight", "differs"]);
    assert_refused(copy(equal).load(None), Code::BaseLayer, &["no base"]);
}

#[test]
fn patterns_decide_rank_and_scale_by_the_files_order() {
    let files = |patterns| {
        Files::lora(2).with("rank_pattern", patterns).pair(Q0, 4, 8, 6).pair("model.layers.0.self_attn.k_proj", 2, 8, 6)
    };
    let adapter =
        files(json!({"q_proj": 4})).with("alpha_pattern", json!({"q_.*": 2, "q_proj": 64})).load(None).unwrap();
    let scales: Vec<_> = adapter.pairs.iter().map(|pair| (pair.rank(), pair.scale)).collect();
    assert_eq!(scales, [(2, 2.0), (4, 0.5)]);
    assert_eq!(adapter.scale, 2.0);
    // `proj` does not match q_proj.
    assert_refused(files(json!({"proj": 4})).load(None), Code::RankMismatch, &["q_proj", "rank 4", "rank 2"]);
    assert_refused(files(json!({"q_proj(": 4})).load(None), Code::ConfigPattern, &["q_proj(", "adapter_config.json"]);
    assert_refused(files(json!({"q_proj": 0})).load(None), Code::ConfigRank, &["rank_pattern", "q_proj"]);
    assert_refused(files(json!({"q_proj": "4"})).load(None), Code::ConfigRank, &["\"4\""]);
}

#[test]
fn odd_configs_get_pefts_meaning_or_a_refusal() {
    let plain = || Files::lora(8).pair(Q0, 8, 8, 6);
    let without = |field: &str| {
        let mut files = plain();
        files.config.as_object_mut().unwrap().remove(field);
        files.load(None)
    };
    let adapter = without("lora_alpha").unwrap();
    assert_eq!((adapter.scale, notice_codes(&adapter)), (1.0, vec!["N_CONFIG_NO_ALPHA"]));
    assert_eq!(notice_codes(&without("r").unwrap()), ["N_CONFIG_NO_R"]);
    for (field, value, code) in [
        ("use_dora", json!(true), Code::Dora),
        ("lora_bias", json!(true), Code::LoraBias),
        ("trainable_token_indices", json!([1, 2]), Code::TrainableTokens),
        ("use_rslora", json!("yes"), Code::ConfigType),
        ("r", json!(1.5), Code::ConfigRank),
        ("r", json!(true), Code::ConfigRank),
        ("r", json!("8"), Code::ConfigRank),
        ("lora_alpha", json!("16"), Code::ConfigAlpha),
        ("lora_alpha", json!(1e300), Code::ConfigAlpha),
        ("bias", json!("some"), Code::ConfigType),
        ("target_modules", json!([1]), Code::ConfigType),
        ("rank_pattern", json!([["q_proj", 4]]), Code::ConfigType),
        ("init_lora_weights", json!("pissa_niter_16"), Code::InitPissa),
        ("init_lora_weights", json!("corda"), Code::InitCorda),
        ("init_lora_weights", json!("olora"), Code::InitOlora),
        ("init_lora_weights", json!("loftq"), Code::InitLoftq),
        ("init_lora_weights", json!("brand new"), Code::InitUnknown),
        ("megatron_config", json!({"tensor_parallel": 2}), Code::Megatron),
        ("arrow_config", json!({"top_k": 2}), Code::Arrow),
        ("peft_type", json!("BONE"), Code::PeftOther),
        ("peft_type", json!("BRAND_NEW"), Code::PeftTypeUnknown),
        ("peft_type", json!(1), Code::ConfigType),
        ("brand_new", json!(1), Code::ConfigUnknownField),
        ("brand_new", json!(""), Code::ConfigUnknownField),
    ] {
        assert_refused(plain().with(field, value).load(None), code, &["adapter_config.json", field]);
    }
    for (field, value, notices) in [
        ("init_lora_weights", json!("gaussian"), vec![]),
        ("init_lora_weights", json!(false), vec![]),
        ("init_lora_weights", json!("mica"), vec![]),
        ("init_lora_weights", json!("lora_ga"), vec!["N_INIT_LORA_GA"]),
        ("peft_type", json!("lora"), vec![]),
        ("bias", json!("lora_only"), vec!["N_BIAS_ABSENT"]),
        ("loftq_config", json!({"loftq_bits": 4}), vec![]),
        ("brand_new", json!({}), vec![]),
        ("brand_new", json!([]), vec![]),
        ("modules_to_save", json!([]), vec![]),
        ("target_modules", json!("all-linear"), vec![]),
        ("target_modules", json!(["self_attn.q_proj"]), vec![]),
        ("target_modules", json!(["q_proj", "k_proj"]), vec!["N_TARGETS_IDLE"]),
        ("target_modules", json!(["v_proj"]), vec!["N_TARGETS_IDLE", "N_TARGETS_OUTSIDE"]),
        ("target_modules", json!(r"(?!.*vision).*\.q_proj"), vec![]),
        ("target_modules", json!("q_proj"), vec!["N_TARGETS_OUTSIDE"]),
        ("target_modules", json!("(q_proj"), vec!["N_TARGETS_PATTERN"]),
        ("layers_to_transform", json!([0, 1]), vec![]),
        ("layers_to_transform", json!(7), vec!["N_LAYERS_OUTSIDE"]),
    ] {
        let adapter = plain().with(field, value.clone()).load(None).unwrap();
        assert_eq!(notice_codes(&adapter), notices, "{field} {value}");
    }
}

#[test]
fn tensors_that_are_no_pair_are_named() {
    let plain = || Files::lora(2).pair(Q0, 2, 8, 6);
    let at = |part: &str| format!("base_model.model.{Q0}.{part}");
    for (name, shape, code) in [
        (at("lora_magnitude_vector"), vec![6], Code::Dora),
        (at("lora_magnitude_vector.default.weight"), vec![6], Code::Dora),
        (at("magnitude"), vec![6], Code::Dora),
        (at("lora_B.bias"), vec![6], Code::LoraBias),
        (at("lora_E"), vec![2, 1], Code::PeftAdalora),
        (at("lora_diag"), vec![2], Code::Kasa),
        (at("lora_C.weight"), vec![2, 2], Code::UnknownTensor),
        (at("lora_up.weight"), vec![6, 2], Code::UnknownTensor),
        (at("base_layer.bias"), vec![6], Code::BaseBias),
        (at("bias"), vec![6], Code::UnknownTensor),
        ("base_model.model.lm_head.bias".into(), vec![20], Code::UnknownTensor),
        ("base_model.model.model.embed_tokens.lora_embedding_A".into(), vec![2, 20], Code::Unpaired),
        (
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_index".into(),
            vec![2],
            Code::TrainableTokens,
        ),
        ("base_model.model.model.layers.0.mlp.experts.3.w1.lora_A.weight".into(), vec![2, 8], Code::Unpaired),
        ("base_model.model.model.norm.weight".into(), vec![8], Code::UnknownTensor),
        ("lora_A.weight".into(), vec![2, 8], Code::UnknownTensor),
        (String::new(), vec![1], Code::UnknownTensor),
        (at("lora_A.weight.weight"), vec![2, 8], Code::SeveralAdapters),
    ] {
        assert_refused(plain().tensor(&name, &shape).load(None), code, &["adapter_model.safetensors", &name]);
    }
    // Saved whole: a head is the host's, anything else is refused.
    let head = plain().with("modules_to_save", json!(["classifier", "score"]));
    let adapter = head.clone().tensor("base_model.model.score.weight", &[3, 8]).load(None).unwrap();
    assert_eq!((adapter.unapplied[0].name.as_str(), &*adapter.unapplied[0].shape), ("score.weight", &[3, 8][..]));
    let wrapped = head.clone().tensor("base_model.model.classifier.modules_to_save.default.weight", &[3, 8]);
    assert_eq!(wrapped.load(None).unwrap().unapplied[0].name, "classifier.weight");
    let projector =
        plain().with("modules_to_save", json!(["projector"])).tensor("base_model.model.projector.weight", &[8, 8]);
    assert_refused(projector.load(None), Code::ModulesToSave, &["projector"]);
    // A head alone is no adapter.
    let alone =
        Files::lora(2).with("modules_to_save", json!(["score"])).tensor("base_model.model.score.weight", &[3, 8]);
    assert_refused(alone.load(None), Code::NoTensors, &["LoRA pair"]);
}

#[test]
fn shapes_that_are_no_pair_are_named() {
    let pair = |a: &[usize], b: &[usize]| {
        Files::lora(2)
            .tensor(&format!("base_model.model.{Q0}.lora_A.weight"), a)
            .tensor(&format!("base_model.model.{Q0}.lora_B.weight"), b)
            .load(None)
    };
    assert!(pair(&[2, 8], &[6, 2]).is_ok());
    for (a, b, code) in [
        (&[16][..], &[6, 2][..], Code::TensorShape),
        (&[][..], &[6, 2], Code::TensorShape),
        (&[0], &[0], Code::TensorEmpty),
        (&[2, 0], &[6, 2], Code::TensorEmpty),
        (&[2, 8, 1], &[6, 2], Code::ConvLora),
        (&[2, 8], &[6, 2, 1, 1], Code::ConvLora),
        (&[6, 2], &[2, 8], Code::Swapped),
        (&[8, 2], &[2, 6], Code::Swapped),
        (&[2, 8], &[6, 3], Code::TensorShape),
        (&[3, 8], &[6, 3], Code::RankMismatch),
    ] {
        let reject = refusal(pair(a, b));
        assert_eq!(reject.code, code, "{reject}");
        assert!(reject.message.contains(Q0), "{reject}");
    }
    let wide = Files::lora(513).pair(Q0, 513, 8, 6);
    assert_refused(wide.load(None), Code::RankLimit, &["513", "512"]);
}

#[test]
fn values_that_can_not_be_served_are_named_with_their_index() {
    let with = |dtype: &'static str, value: &[u8]| {
        let mut files = Files::lora(2).pair(Q0, 2, 8, 6);
        let (_, of, _, bytes) = &mut files.tensors[1];
        *of = dtype;
        *bytes = vec![0; 12 * value.len()];
        bytes[5 * value.len()..6 * value.len()].copy_from_slice(value);
        files.load(None)
    };
    let q = "self_attn.q_proj.lora_B.weight";
    assert_refused(with("F32", &f32::NEG_INFINITY.to_le_bytes()), Code::NotFinite, &[q, "[2, 1]", "-inf"]);
    assert_refused(with("F16", &[0x01, 0x7c]), Code::NotFinite, &[q, "[2, 1]", "NaN"]);
    assert_refused(with("BF16", &[0x80, 0xff]), Code::NotFinite, &[q, "[2, 1]", "-inf"]);
    assert_refused(with("F64", &f64::NAN.to_le_bytes()), Code::NotFinite, &[q, "[2, 1]"]);
    assert_refused(with("F64", &1e39f64.to_le_bytes()), Code::Range, &[q, "[2, 1]", "1e39"]);
    assert_refused(with("I32", &[0; 4]), Code::Dtype, &[q, "I32"]);
    for (dtype, value) in
        [("F64", &f64::from(f32::MAX).to_le_bytes()[..]), ("F16", &[0xff, 0x7b]), ("BF16", &[0x7f, 0x7f])]
    {
        assert!(with(dtype, value).is_ok(), "{dtype}");
    }
}

#[test]
fn damaged_headers_are_named() {
    let plain = Files::lora(2).pair(Q0, 2, 8, 6);
    let load_bytes = |bytes: &[u8]| {
        let dir = tempfile::tempdir().unwrap();
        plain.write(dir.path());
        fs::write(dir.path().join("adapter_model.safetensors"), bytes).unwrap();
        load(dir.path(), None)
    };
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"a.lora_A.weight":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let four = [0u8; 16];
    for (header, code) in [
        (entry("F32", "[2,2]", "[0,16]").replace('}', ""), Code::FileHeader),
        (entry("F32", "[2,2]", "[0,12]"), Code::FileOffsets),
        (entry("F32", "[2,2]", "[16,0]"), Code::FileOffsets),
        (entry("F32", "[4,2]", "[0,32]"), Code::FileTruncated),
        (entry("F32", "[2]", "[4,12]"), Code::FileOffsets),
        (entry("F32", "[2]", "[0,8]"), Code::FileTrailing),
        (entry("F32", "[18446744073709551615,2]", "[0,16]"), Code::FileOffsets),
        (entry("F32", "[2,18446744073709551616]", "[0,16]"), Code::FileHeader),
        (entry("F32", "[4294967296,4294967296]", "[0,16]"), Code::FileOffsets),
        (entry("F32", "[-2,2]", "[0,16]"), Code::FileHeader),
        (entry("F32", "[1,1,1,1,1,1,1,2,2]", "[0,16]"), Code::FileHeader),
        (entry("F32", "[2,2]", "[0,16,0]"), Code::FileHeader),
        (entry("F9", "[2,2]", "[0,16]"), Code::Dtype),
        (entry("F4", "[3]", "[0,2]"), Code::FileOffsets),
        (entry("F32", "4", "[0,16]"), Code::FileHeader),
        (entry("F32", "[2,2]", "[0,16]").replace("shape", "form"), Code::FileHeader),
        (entry("F32", "[2,2]", r#"[0,16],"dtype":"F32""#), Code::FileHeader),
        (format!("{}x", entry("F32", "[2,2]", "[0,16]")), Code::FileHeader),
        ("[]".into(), Code::FileHeader),
        (r#"{"a":1}"#.into(), Code::FileHeader),
        (r#"{"__metadata__":{},"__metadata__":{}}"#.into(), Code::FileDuplicate),
        (
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"\u0061":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#.into(),
            Code::FileDuplicate,
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#.into(),
            Code::FileOffsets,
        ),
    ] {
        assert_refused(load_bytes(&file_bytes(header.as_bytes(), &four)), code, &["adapter_model.safetensors"]);
    }
    let mut not_utf8 = entry("F32", "[2,2]", "[0,16]").into_bytes();
    not_utf8[3] = 0xff;
    assert_refused(load_bytes(&file_bytes(&not_utf8, &four)), Code::FileHeader, &["UTF-8"]);
    assert_refused(load_bytes(&[1, 2, 3]), Code::FileTruncated, &["3 bytes"]);
    assert_refused(load_bytes(b"PK\x03\x04 a zip"), Code::WeightsPickle, &["pickle"]);
    assert_refused(load_bytes(b"\x80\x02} a pickle"), Code::WeightsPickle, &["pickle"]);
    assert_refused(load_bytes(&[&99_999_999u64.to_le_bytes()[..], b"{}"].concat()), Code::FileTruncated, &["99999999"]);
}

#[test]
fn a_config_that_is_something_else_is_named() {
    let load_config = |bytes: &[u8]| {
        let dir = tempfile::tempdir().unwrap();
        Files::lora(2).pair(Q0, 2, 8, 6).write(dir.path());
        fs::write(dir.path().join("adapter_config.json"), bytes).unwrap();
        load(dir.path(), None)
    };
    for (bytes, code) in [
        (&b""[..], Code::FileEmpty),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", Code::FileLfsPointer),
        (b"<!DOCTYPE html><html>", Code::FileHtml),
        (b"[]", Code::ConfigJson),
        (b"{", Code::ConfigJson),
        (b"{\"r\": 2}\xff", Code::ConfigJson),
        (b"{\"r\": 2} {}", Code::ConfigJson),
        (b"{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": Infinity}", Code::ConfigAlpha),
    ] {
        assert_refused(load_config(bytes), code, &["adapter_config.json"]);
    }
}

#[cfg(unix)]
#[test]
fn a_pipe_under_a_files_name_does_not_hang() {
    let dir = tempfile::tempdir().unwrap();
    Files::lora(2).pair(Q0, 2, 8, 6).write(dir.path());
    for name in ["adapter_model.safetensors", "adapter_config.json"] {
        let path = dir.path().join(name);
        fs::remove_file(&path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert_refused(load(dir.path(), None), Code::NotFound, &[name]);
    }
}

/// `(path, in, out)` of every linear.
fn shapes(base: &BaseModel) -> Vec<(String, usize, usize)> {
    let shape = |l: &Linear| (l.site.path.to_string(), l.in_features, l.out_features);
    base.linears().iter().map(shape).collect()
}

#[test]
fn a_config_alone_gives_the_linears_that_the_weights_have() {
    for name in ["llama", "llama_tied", "qwen2", "qwen3", "phi3", "gpt2", "mixtral", "qwen3moe", "gptoss", "bert"] {
        let config = json_file(&fixtures().join("_base").join(name).join("config.json"));
        let derived = Files { config, tensors: Vec::new() }.base().unwrap();
        let full = base(name);
        let mut expected = shapes(&full);
        // A task's head is in no config.
        expected.retain(|(path, ..)| path != "classifier");
        assert_eq!(shapes(&derived), expected, "{name}");
    }
}

#[test]
fn a_gemma3_config_describes_its_text_model() {
    let text = json!({
        "model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144
    });
    let flat = Files { config: text.clone(), tensors: Vec::new() }.base().unwrap();
    let q = flat.linear("model.layers.17.self_attn.q_proj").unwrap();
    assert_eq!((q.in_features, q.out_features), (640, 1024));
    let nested =
        json!({"model_type": "gemma3", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}});
    let nested = Files { config: nested, tensors: Vec::new() }.base().unwrap();
    assert_eq!(nested.linear("model.language_model.layers.17.mlp.down_proj").unwrap().in_features, 2048);
    assert_eq!(nested.linears().len(), flat.linears().len());
}

#[test]
fn bases_that_say_nothing_are_refused() {
    let config = |config| Files { config, tensors: Vec::new() }.base().map(|_| ()).unwrap_err();
    assert_eq!(config(json!({"model_type": "brand_new"})).code(), "E_BASE_FAMILY");
    assert_eq!(config(json!({"model_type": "llama", "num_hidden_layers": 2})).code(), "E_BASE_FILE");
    assert_eq!(config(json!({"model_type": "llama", "num_hidden_layers": 1u64 << 40})).code(), "E_BASE_FILE");
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(BaseModel::open(dir.path()).unwrap_err().code(), "E_BASE_FILE");
    assert_eq!(BaseModel::open(dir.path().join("nowhere")).unwrap_err().code(), "E_NOT_FOUND");
    let norms = Files { config: json!({}), tensors: Vec::new() }.tensor("model.norm.weight", &[8]);
    assert_eq!(norms.base().unwrap_err().code(), "E_BASE_FILE");
}

#[test]
fn shards_are_read_by_their_index_and_nothing_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let index = |map: serde_json::Value| {
        let json = json!({"metadata": {}, "weight_map": map});
        fs::write(dir.path().join("model.safetensors.index.json"), serde_json::to_vec(&json).unwrap()).unwrap();
        BaseModel::open(dir.path())
    };
    let shard = |path: &str| Files { config: json!({}), tensors: Vec::new() }.tensor(path, &[6, 8]).bytes();
    let (a, b) = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight");
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    fs::write(dir.path().join(first), shard(a)).unwrap();
    assert_eq!(index(json!({a: first, b: second})).unwrap_err().code(), "E_BASE_FILE");
    fs::write(dir.path().join(second), shard(b)).unwrap();
    let base = index(json!({a: first, b: second})).unwrap();
    assert_eq!(
        shapes(&base),
        [("model.layers.0.mlp.up_proj".into(), 8, 6), ("model.layers.1.mlp.up_proj".into(), 8, 6)]
    );
    assert_eq!(base.linears()[0].site.module, LoraModule::UpProj);
    for outside in ["../x.safetensors", "/etc/x.safetensors", "x.bin", ""] {
        assert_eq!(index(json!({a: outside})).unwrap_err().code(), "E_BASE_FILE", "{outside}");
    }
}

#[test]
fn conv1d_bases_are_stored_the_other_way_round() {
    let gpt2 = base("gpt2");
    let c_attn = gpt2.linear("transformer.h.0.attn.c_attn").unwrap();
    assert_eq!((c_attn.in_features, c_attn.out_features), (48, 144));
    // The same names in a family of plain linears.
    let weights = |model_type| {
        let files = Files { config: json!({"model_type": model_type}), tensors: Vec::new() };
        files.tensor("transformer.h.0.attn.c_attn.weight", &[8, 24]).base().unwrap()
    };
    assert_eq!(weights("gpt2").linears()[0].in_features, 8);
    assert_eq!(weights("gpt_bigcode").linears()[0].in_features, 24);
}

#[test]
fn a_packed_base_takes_its_widths_from_what_tells_them() {
    let files = Files { config: json!({"model_type": "none of the usual"}), tensors: Vec::new() };
    let gptq = files
        .clone()
        .tensor(&format!("{Q0}.qweight"), &[8, 48])
        .tensor(&format!("{Q0}.scales"), &[2, 48])
        .tensor(&format!("{Q0}.g_idx"), &[64]);
    assert_eq!(shapes(&gptq.base().unwrap()), [(Q0.to_owned(), 64, 48)]);
    let awq = files.clone().tensor(&format!("{Q0}.qweight"), &[64, 6]).tensor(&format!("{Q0}.scales"), &[2, 48]);
    assert_eq!(shapes(&awq.base().unwrap()), [(Q0.to_owned(), 64, 48)]);
    // Packed four-bit weights show nothing: said so, and not as a missing linear.
    let mut bnb = files.tensor("lm_head.weight", &[20, 8]).tensor(&format!("{Q0}.weight"), &[512, 1]);
    bnb.tensors[1].1 = "U8";
    bnb.tensors[1].3.truncate(512);
    let bnb = bnb.tensor(&format!("{Q0}.weight.absmax"), &[8]).base().unwrap();
    assert_refused(Files::lora(2).pair(Q0, 2, 64, 48).load(Some(&bnb)), Code::BaseFamily, &[Q0, "packed"]);
}

#[test]
fn an_audit_counts_tensors_and_measures_sites() {
    let dir = tempfile::tempdir().unwrap();
    let files = Files::lora(2)
        .with("modules_to_save", json!(["score"]))
        .pair(Q0, 2, 8, 6)
        .tensor("base_model.model.score.weight", &[3, 8]);
    files.write(dir.path());
    let found = serde_json::to_value(audit(dir.path(), None)).unwrap();
    assert_eq!(found["verdict"], "accept");
    assert_eq!(found["code"], json!(null));
    assert_eq!(found["tensors"], json!({"applied": 2, "total": 3}));
    let site = &found["sites"][0];
    assert_eq!(
        (&site["site"], &site["layer"], &site["module"], &site["rank"], &site["scale"], &site["in"], &site["out"]),
        (&json!(Q0), &json!(0), &json!("q_proj"), &json!(2), &json!(2.0), &json!(8), &json!(6))
    );
    assert_eq!(found["slot_bytes"], 64 + 48);
    assert!(site["norm"].as_f64().unwrap() > 0.0);
    fs::write(dir.path().join("adapter_model.safetensors"), b"").unwrap();
    let found = serde_json::to_value(audit(dir.path(), None)).unwrap();
    assert_eq!(
        (&found["verdict"], &found["code"], &found["sites"]),
        (&json!("reject"), &json!("E_FILE_EMPTY"), &json!([]))
    );
}
