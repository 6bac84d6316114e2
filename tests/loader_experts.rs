//! Adapters of routed experts and of routers: each expert's pair is PEFT's own, and what does not fit is refused by name.

mod loader_support;

use std::collections::BTreeMap;

use loader_support::{Files, Tensor, assert_refused, base, fixtures, notice_codes, pair_at, read_tensors};
use lorapool::adapter::{Adapter, BaseModel, Code, ExpertPair, HostMatrix, audit, load};
use serde_json::json;

/// `scale * B * A`, `[out][in]`.
fn product(a: &HostMatrix, b: &HostMatrix, scale: f64) -> Vec<f64> {
    let (av, bv) = (a.values(), b.values());
    let dot = |o: usize, i: usize| -> f64 {
        (0..a.rows).map(|r| f64::from(bv[o * a.rows + r]) * f64::from(av[r * a.cols + i])).sum()
    };
    (0..b.rows).flat_map(|o| (0..a.cols).map(move |i| (o, i))).map(|(o, i)| scale * dot(o, i)).collect()
}

fn delta(pair: &ExpertPair) -> Vec<f64> {
    product(&pair.a, &pair.b, pair.scale.into())
}

fn expected(case: &str) -> BTreeMap<String, Tensor> {
    read_tensors(&fixtures().join(case).join("expected.safetensors"))
}

fn same(case: &str, site: &str, found: &[f64], wanted: &[f64]) {
    assert_eq!(found.len(), wanted.len(), "{case} {site}");
    let worst = found.iter().zip(wanted).map(|(f, w)| (f - w).abs()).fold(0.0, f64::max);
    assert!(worst < 1e-10, "{case} {site}: off by {worst:e}");
}

#[test]
fn parameters_of_all_experts_give_pefts_change_of_each() {
    for (case, model, ranks, scales) in [
        ("24_moe_target_params_mixtral", "mixtral", [4, 4], [2.0, 2.0]),
        ("25_moe_target_params_qwen3", "qwen3moe", [2, 3], [2.0, 4.0]),
        ("26b_moe_gptoss_transposed", "gptoss", [3, 3], [2.0, 2.0]),
    ] {
        let truth = expected(case);
        for with in [Some(base(model)), None] {
            let adapter = load(fixtures().join(case), with.as_ref()).unwrap();
            assert_eq!(adapter.experts.len(), 2 * 2 * 4, "{case}");
            assert!(notice_codes(&adapter).is_empty(), "{case}: {:?}", adapter.notices);
            for pair in &adapter.experts {
                let which = usize::from(pair.site.path.ends_with("down_proj"));
                assert_eq!((pair.rank(), pair.scale, pair.experts), (ranks[which], scales[which], 4), "{case}");
                let all = &truth[&format!("{}|delta_w", pair.site.path)];
                let (rows, cols) = (pair.out_features(), pair.in_features());
                let one = &all.values[pair.expert as usize * rows * cols..][..rows * cols];
                let wanted: Vec<f64> = match model == "gptoss" {
                    false => one.to_vec(),
                    true => (0..rows).flat_map(|o| (0..cols).map(move |i| one[i * rows + o])).collect(),
                };
                same(case, &pair.site.path, &delta(pair), &wanted);
            }
        }
    }
}

#[test]
fn linears_of_single_experts_are_joined_where_the_base_has_them_in_one_and_stay_apart_without_it() {
    let case = "41_moe_v4_per_expert_keys";
    let truth = expected(case);
    let of = |layer: usize, expert: u32, name: &str| {
        truth[&format!("model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}|delta_w")].values.clone()
    };
    let joined = load(fixtures().join(case), Some(&base("mixtral"))).unwrap();
    assert_eq!(notice_codes(&joined), ["N_EXPERTS_MOVED", "N_FUSED_JOINED"]);
    assert_eq!(joined.experts.len(), 2 * 2 * 4);
    for pair in &joined.experts {
        let layer = pair.site.layer;
        let wanted = match pair.site.path.ends_with("down_proj") {
            true => of(layer, pair.expert, "w2"),
            false => [of(layer, pair.expert, "w1"), of(layer, pair.expert, "w3")].concat(),
        };
        assert_eq!(pair.rank(), if pair.site.path.ends_with("down_proj") { 2 } else { 4 });
        same(case, &pair.site.path, &delta(pair), &wanted);
    }
    let apart = load(fixtures().join(case), None).unwrap();
    assert_eq!(apart.experts.len(), 2 * 3 * 4);
    for pair in &apart.experts {
        let name = pair.site.path.rsplit('.').next().unwrap();
        same(case, &pair.site.path, &delta(pair), &of(pair.site.layer, pair.expert, name));
    }
}

#[test]
fn a_router_is_a_linear_whose_patterns_name_its_parameter() {
    let case = "26_moe_router";
    let truth = expected(case);
    for with in [Some(base("mixtral")), None] {
        let adapter = load(fixtures().join(case), with.as_ref()).unwrap();
        assert!(adapter.experts.is_empty() && notice_codes(&adapter).is_empty());
        for layer in 0..2 {
            let path = format!("model.layers.{layer}.mlp.gate");
            let pair = pair_at(&adapter, &path);
            let wanted = &truth[&format!("{path}.weight|delta_w")].values;
            same(case, &path, &product(&pair.a, &pair.b, pair.scale.into()), wanted);
        }
    }
}

const EXPERTS: &str = "model.layers.0.mlp.experts";

/// An adapter of rank 2 on both parameters of three experts, 8 wide inside and 6 outside.
fn parameters() -> Files {
    let at = |name: &str| format!("base_model.model.{EXPERTS}{name}");
    Files::lora(2)
        .with("target_parameters", json!(["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
        .tensor(&at(".base_layer.lora_A.weight"), &[6, 6])
        .tensor(&at(".base_layer.lora_B.weight"), &[16, 6])
        .tensor(&at(".lora_A.weight"), &[6, 8])
        .tensor(&at(".lora_B.weight"), &[6, 6])
}

/// A base of three experts in parameters of these names and shapes.
fn model(model_type: &str, parameters: &[(&str, [usize; 3])]) -> BaseModel {
    let files = Files { config: json!({"model_type": model_type, "hidden_size": 6}), tensors: Vec::new() };
    let add = |files: Files, (name, shape): &(&str, [usize; 3])| files.tensor(&format!("{EXPERTS}.{name}"), shape);
    parameters.iter().fold(files.tensor("model.layers.0.mlp.gate.weight", &[3, 6]), add).base().unwrap()
}

/// The same with a linear for each expert.
fn singles() -> BaseModel {
    let mut files = Files { config: json!({"model_type": "qwen3_moe", "hidden_size": 6}), tensors: Vec::new() };
    for expert in 0..3 {
        for (name, shape) in [("gate_proj", [8, 6]), ("up_proj", [8, 6]), ("down_proj", [6, 8])] {
            files = files.tensor(&format!("{EXPERTS}.{expert}.{name}.weight"), &shape);
        }
    }
    files.base().unwrap()
}

fn at<'a>(adapter: &'a Adapter, name: &str, expert: u32) -> &'a ExpertPair {
    let path = format!("{EXPERTS}.{name}");
    adapter.experts.iter().find(|pair| *pair.site.path == path && pair.expert == expert).unwrap()
}

#[test]
fn a_base_with_gate_and_up_apart_takes_the_rows_of_each() {
    let fused = model("mixtral", &[("gate_up_proj", [3, 16, 6]), ("down_proj", [3, 6, 8])]);
    let whole = parameters().load(Some(&fused)).unwrap();
    for apart in
        [model("mixtral", &[("gate_proj", [3, 8, 6]), ("up_proj", [3, 8, 6]), ("down_proj", [3, 6, 8])]), singles()]
    {
        assert_eq!(apart.experts().len(), 3);
        assert!(apart.linears().iter().all(|linear| !linear.site.path.contains("experts")));
        let adapter = parameters().load(Some(&apart)).unwrap();
        assert_eq!(notice_codes(&adapter), ["N_FUSED_SPLIT"]);
        for expert in 0..3 {
            let both = [delta(at(&adapter, "gate_proj", expert)), delta(at(&adapter, "up_proj", expert))].concat();
            same("split", EXPERTS, &both, &delta(at(&whole, "gate_up_proj", expert)));
            same("split", EXPERTS, &delta(at(&adapter, "down_proj", expert)), &delta(at(&whole, "down_proj", expert)));
        }
    }
}

#[test]
fn pairs_exchanged_as_older_peft_saved_them_are_turned_round() {
    let base = model("mixtral", &[("gate_up_proj", [3, 16, 6]), ("down_proj", [3, 6, 8])]);
    let path = |name: &str| format!("base_model.model.{EXPERTS}{name}");
    let old = Files::lora(2)
        .with("target_parameters", json!(["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
        .tensor(&path(".base_layer.lora_A.weight"), &[6, 16])
        .tensor(&path(".base_layer.lora_B.weight"), &[6, 6])
        .tensor(&path(".lora_A.weight"), &[6, 6])
        .tensor(&path(".lora_B.weight"), &[8, 6]);
    let read = |name: &str, row: usize, column: usize, cols: usize| {
        let (_, _, _, bytes) = old.tensors.iter().find(|(n, ..)| *n == path(name)).unwrap();
        f64::from(f32::from_le_bytes(bytes[(row * cols + column) * 4..][..4].try_into().unwrap()))
    };
    let adapter = old.load(Some(&base)).unwrap();
    for expert in 0..3usize {
        // delta[e][i][o] = sum_r B[o][r * 3 + e] A[e * 2 + r][i], where i counts the parameter's rows.
        let mut wanted = Vec::new();
        for i in 0..16 {
            for o in 0..6 {
                let term = |r: usize| {
                    read(".base_layer.lora_B.weight", o, r * 3 + expert, 6)
                        * read(".base_layer.lora_A.weight", expert * 2 + r, i, 16)
                };
                wanted.push(2.0 * (term(0) + term(1)));
            }
        }
        same("old", EXPERTS, &delta(at(&adapter, "gate_up_proj", expert as u32)), &wanted);
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let base = model("mixtral", &[("gate_up_proj", [3, 16, 6]), ("down_proj", [3, 6, 8])]);
    let with = |base: &BaseModel, files: &Files| files.load(Some(base));
    let lone = |name: &str, shape: &[usize]| {
        let mut files = parameters();
        files.tensors.retain(|(n, ..)| !n.ends_with(name));
        files.tensor(&format!("base_model.model.model.layers.0{name}"), shape)
    };
    assert!(with(&base, &parameters()).is_ok());
    for (files, code, named) in [
        // Four experts where the base has three.
        (lone(".mlp.experts.lora_A.weight", &[8, 8]), Code::TensorShape, vec!["lora_A", "8 rows", "6 columns"]),
        (parameters().with("r", json!(4)), Code::RankMismatch, vec!["6 rows", "rank 4"]),
        (parameters().with("r", json!(3)), Code::BaseShape, vec!["2 experts", "expected 3"]),
        (
            parameters().with("target_parameters", json!(["mlp.experts.down_proj"])),
            Code::ExpertLora,
            vec!["2 parameters", "down_proj"],
        ),
        (parameters().with("target_parameters", json!([])), Code::ExpertLora, vec!["target_parameters", "none"]),
        (Files::lora(2).pair(&format!("{EXPERTS}.3.w1"), 2, 6, 8), Code::BaseShape, vec!["expert 3", "3 experts"]),
        (Files::lora(2).pair(&format!("{EXPERTS}.1.w1"), 2, 6, 9), Code::BaseShape, vec!["9 rows", "8"]),
        (Files::lora(2).pair(&format!("{EXPERTS}.1.w9"), 2, 6, 8), Code::ExpertLora, vec!["experts.1.w9"]),
        (
            Files::lora(2).pair("model.layers.7.mlp.experts.1.w1", 2, 6, 8),
            Code::NotInBase,
            vec!["model.layers.7.mlp.experts"],
        ),
        (
            Files::lora(2).pair(&format!("{EXPERTS}.1.w1"), 2, 6, 8).pair(&format!("{EXPERTS}.1.gate_proj"), 2, 6, 8),
            Code::TensorDuplicate,
            vec!["expert 1"],
        ),
    ] {
        assert_refused(with(&base, &files), code, &named);
    }
    let files = Files::lora(2).tensor(&format!("base_model.model.{EXPERTS}.1.w1.lora_A.weight"), &[2, 6]);
    assert_refused(with(&base, &files), Code::Unpaired, &["experts.1.w1"]);
    let interleaved = model("gpt_oss", &[("gate_up_proj", [3, 6, 16]), ("down_proj", [3, 8, 6])]);
    let files = Files::lora(2).pair(&format!("{EXPERTS}.1.w1"), 2, 6, 8);
    assert_refused(with(&interleaved, &files), Code::FusedMismatch, &["gate_up_proj", "element by element"]);
}

#[test]
fn the_digest_covers_experts_and_the_audit_lists_them() {
    let case = fixtures().join("24_moe_target_params_mixtral");
    let adapter = load(&case, None).unwrap();
    let mut other = adapter.experts.clone();
    other[3].b.bytes[5] ^= 1;
    let pairs = Adapter::from_pairs(adapter.pairs.clone());
    let digests = [pairs.clone(), pairs.clone().with_experts(adapter.experts.clone()), pairs.with_experts(other)];
    assert!(digests[0].digest != digests[1].digest && digests[1].digest != digests[2].digest);
    assert_eq!(digests[1].digest, adapter.digest);
    let audit = audit(&case, Some(&base("mixtral")));
    let lines: Vec<_> =
        audit.experts.iter().map(|line| (&*line.site.path, line.adapted, line.experts, line.rank)).collect();
    assert_eq!(lines.len(), 4);
    assert_eq!(lines[0], ("model.layers.0.mlp.experts.down_proj", 4, 4, 4));
    assert_eq!(audit.tensors.applied, audit.tensors.total);
}
