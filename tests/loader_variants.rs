//! What trainers other than PEFT's own save: alphas as tensors, wrapped paths, their regexes, configs of old releases.

mod loader_support;

use loader_support::{Files, assert_refused, notice_codes};
use lorapool::adapter::{BaseModel, Code};
use serde_json::json;

const Q: &str = "model.layers.0.self_attn.q_proj";
const K: &str = "model.layers.0.self_attn.k_proj";

/// Two pairs of rank 4 under lora_alpha 8.
fn pairs() -> Files {
    Files::lora(4).pair(Q, 4, 8, 6).pair(K, 4, 8, 6)
}

trait WithAlpha {
    fn alpha(self, module: &str, dtype: &'static str, shape: &[usize], bytes: &[u8]) -> Self;
}

impl WithAlpha for Files {
    fn alpha(mut self, module: &str, dtype: &'static str, shape: &[usize], bytes: &[u8]) -> Self {
        let name = format!("base_model.model.{module}.alpha");
        self.tensors.push((name, dtype, shape.to_vec(), bytes.to_vec()));
        self
    }
}

fn scales(files: &Files) -> (Vec<f32>, Vec<&'static str>) {
    let adapter = files.load(None).unwrap();
    assert_eq!(adapter.tensors_applied(), adapter.tensors.len());
    (adapter.pairs.iter().map(|pair| pair.scale).collect(), notice_codes(&adapter))
}

#[test]
fn an_alpha_tensor_is_its_modules_alpha() {
    // k_proj comes first.
    assert_eq!(scales(&pairs()), (vec![2.0, 2.0], vec![]));
    let q = pairs().alpha(Q, "F32", &[], &4f32.to_le_bytes());
    assert_eq!(scales(&q), (vec![2.0, 1.0], vec!["N_ALPHA_TENSORS"]));
    // Any float, any shape of one element; one that agrees is remarked on too.
    let both = q.alpha(K, "BF16", &[1], &half::bf16::from_f32(8.0).to_le_bytes());
    assert_eq!(scales(&both), (vec![2.0, 1.0], vec!["N_ALPHA_TENSORS"]));
    let message = &both.load(None).unwrap().notices[0].message;
    for word in ["2 modules", "lora_alpha 8", Q, "has 4"] {
        assert!(message.contains(word), "{message}");
    }
    // Zero is a value as any other.
    assert_eq!(scales(&pairs().alpha(Q, "F64", &[1, 1], &0f64.to_le_bytes())).0, [2.0, 0.0]);
    // With a base, under a prefix that has to be mapped.
    let base = Files { config: json!({"model_type": "other"}), tensors: Vec::new() }
        .tensor(&format!("{Q}.weight"), &[6, 8])
        .tensor(&format!("{K}.weight"), &[6, 8])
        .base()
        .unwrap();
    let wrapped = Files::lora(4).pair(&format!("language_model.{Q}"), 4, 8, 6).alpha(
        &format!("language_model.{Q}"),
        "F32",
        &[],
        &4f32.to_le_bytes(),
    );
    let adapter = wrapped.load(Some(&base)).unwrap();
    assert_eq!((adapter.pairs[0].scale, &*adapter.pairs[0].site.path), (1.0, Q));
    assert!(adapter.tensors.iter().all(|tensor| &*tensor.site == Q));
}

#[test]
fn an_alpha_tensor_that_contradicts_the_config_or_belongs_nowhere_is_named() {
    let four = 4f32.to_le_bytes();
    let pattern = pairs().with("alpha_pattern", json!({"q_proj": 16}));
    assert_refused(
        pattern.clone().alpha(Q, "F32", &[], &four).load(None),
        Code::AlphaConflict,
        &[Q, "16", "alpha_pattern"],
    );
    assert_eq!(scales(&pattern.clone().alpha(Q, "F32", &[], &16f32.to_le_bytes())).0, [2.0, 4.0]);
    assert_eq!(scales(&pattern.alpha(K, "F32", &[], &four)).0, [1.0, 4.0]);
    let rslora = pairs().with("use_rslora", json!(true));
    assert_refused(rslora.clone().alpha(Q, "F32", &[], &four).load(None), Code::AlphaConflict, &[Q, "use_rslora"]);
    assert_eq!(scales(&rslora.alpha(Q, "F32", &[], &8f32.to_le_bytes())).0, [4.0, 4.0]);
    assert_refused(pairs().alpha("model.norm", "F32", &[], &four).load(None), Code::Unpaired, &["model.norm.alpha"]);
    assert_refused(pairs().alpha(Q, "F32", &[2], &[four, four].concat()).load(None), Code::TensorShape, &["[2]"]);
    assert_refused(pairs().alpha(Q, "F32", &[0], &[]).load(None), Code::TensorShape, &["[0]"]);
    assert_refused(pairs().alpha(Q, "I32", &[], &4i32.to_le_bytes()).load(None), Code::Dtype, &["I32"]);
    assert_refused(
        pairs().alpha(Q, "F32", &[], &f32::NAN.to_le_bytes()).load(None),
        Code::NotFinite,
        &["alpha", "NaN"],
    );
    let experts = "model.layers.0.mlp.experts.0.w1";
    assert_refused(pairs().alpha(experts, "F32", &[], &four).load(None), Code::Unpaired, &[experts]);
    let mut twice = pairs().alpha(Q, "F32", &[], &four);
    twice.tensors.push((format!("{Q}.alpha"), "F32", vec![], four.to_vec()));
    assert_refused(twice.load(None), Code::TensorDuplicate, &[Q]);
}

fn text() -> BaseModel {
    Files { config: json!({"model_type": "other"}), tensors: Vec::new() }
        .tensor(&format!("{Q}.weight"), &[6, 8])
        .tensor(&format!("{K}.weight"), &[6, 8])
        .base()
        .unwrap()
}

#[test]
fn wrappers_around_and_within_a_path_are_passed_over_with_a_base() {
    let base = text();
    for path in [
        "model.layers.0._fsdp_wrapped_module.self_attn.q_proj",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn.q_proj",
        "_orig_mod.model.layers.0.self_attn.q_proj",
        "model.layers.0._orig_mod.self_attn.q_proj",
        "module.model.layers.0.self_attn.q_proj",
        "base_model.model.base_model.model.model.layers.0.self_attn.q_proj",
        "model.language_model.model.layers.0.self_attn.q_proj",
        "thinker.model.layers.0.self_attn.q_proj",
    ] {
        let files = Files::lora(4).pair(path, 4, 8, 6);
        let adapter = files.load(Some(&base)).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert_eq!((&*adapter.pairs[0].site.path, notice_codes(&adapter)), (Q, vec!["N_PREFIX"]), "{path}");
    }
    // Two that fall together are not picked from; without a base a wrapped path is no site.
    let both = Files::lora(4).pair(Q, 4, 8, 6).pair("model.layers.0._orig_mod.self_attn.q_proj", 4, 8, 6);
    assert_refused(both.load(Some(&base)), Code::Prefix, &["both land on", Q]);
    let wrapped = Files::lora(4).pair("model.layers.0._fsdp_wrapped_module.self_attn.q_proj", 4, 8, 6);
    assert_refused(wrapped.load(None), Code::Prefix, &["_fsdp_wrapped_module", "give the base"]);
}

#[test]
fn the_regexes_of_unsloth_and_ms_swift_are_matched_as_python_does() {
    let unsloth = r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj|linear).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:k_proj|v_proj|q_proj)))";
    let look_around = r"^(?!.*(?:visual|audio)).*(?<=self_attn\.)(?:q_proj|k_proj)(?![\w.])";
    let swift = r"^(model\.language_model(?=\.)|model\.layers)(?!.*lm_head).*\.(q_proj|k_proj)$";
    for regex in [unsloth, look_around, swift] {
        let adapter = pairs().with("target_modules", json!(regex)).load(None).unwrap();
        assert_eq!(notice_codes(&adapter), Vec::<&str>::new(), "{regex}");
    }
    // One that does not name them, and one that is no regex: the tensors count.
    for (regex, notice) in [(r"^(?!model\.layers).*", "N_TARGETS_OUTSIDE"), ("(?<=a*)q_proj(", "N_TARGETS_PATTERN")] {
        let adapter = pairs().with("target_modules", json!(regex)).load(None).unwrap();
        assert_eq!((adapter.pairs.len(), notice_codes(&adapter)), (2, vec![notice]), "{regex}");
    }
    // The same language decides ranks.
    let ranks = Files::lora(2)
        .with("rank_pattern", json!({r"(?<!cross_attn\.)k_proj": 4}))
        .pair(Q, 2, 8, 6)
        .pair(K, 4, 8, 6)
        .load(None)
        .unwrap();
    assert_eq!(ranks.pairs.iter().map(|pair| pair.rank()).collect::<Vec<_>>(), [4, 2]);
}

#[test]
fn configs_of_the_first_releases_are_read() {
    let mut files = pairs();
    files.config = json!({
        "base_model_name_or_path": "x", "bias": "none", "enable_lora": null, "fan_in_fan_out": false,
        "inference_mode": true, "lora_alpha": 8, "lora_dropout": 0.05, "merge_weights": false,
        "modules_to_save": null, "peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "k_proj"],
        "task_type": "CAUSAL_LM"
    });
    assert_eq!(scales(&files), (vec![2.0, 2.0], vec![]));
    // MergedLinear's grouped layout, which that release alone had.
    let grouped = files.with("enable_lora", json!([true, false, true]));
    assert_refused(grouped.load(None), Code::ConfigUnknownField, &["enable_lora"]);
}

#[test]
fn an_audit_remarks_on_weights_that_look_wrong() {
    use lorapool::adapter::audit;
    let audited = |change: &dyn Fn(&mut Files)| {
        let mut files = pairs();
        change(&mut files);
        let dir = tempfile::tempdir().unwrap();
        files.write(dir.path());
        let audit = audit(dir.path(), None);
        assert!(audit.code.is_none(), "{audit:?}");
        audit.notices
    };
    let fill = |value: f32, count: usize| value.to_le_bytes().repeat(count);
    assert!(audited(&|_| {}).is_empty());
    // B of q_proj: zero, of either sign.
    for zero in [0.0, -0.0] {
        let notices = audited(&|files| files.tensors[1].3 = fill(zero, 24));
        assert_eq!(notices.iter().map(|n| n.code).collect::<Vec<_>>(), ["N_B_ZERO"]);
        assert!(notices[0].message.contains(Q) && notices[0].message.contains("1 of 2"), "{}", notices[0].message);
    }
    let notices = audited(&|files| files.tensors[0].3 = fill(7e4, 32));
    assert_eq!(notices.iter().map(|n| n.code).collect::<Vec<_>>(), ["N_NORM_HUGE", "N_F16_OVERFLOW"]);
    // Two elements that are small as f16 and stay so.
    let tiny = audited(&|files| files.tensors[0].3 = fill(1e-30, 32));
    assert!(tiny.is_empty(), "{tiny:?}");
    let notices = audited(&|files| _ = files.config.as_object_mut().unwrap().remove("lora_alpha"));
    assert_eq!(notices.iter().map(|n| n.code).collect::<Vec<_>>(), ["N_CONFIG_NO_ALPHA"]);
}
