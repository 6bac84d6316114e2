//! Linears that the base has in one and the adapter apart, and the reverse: the same numbers, on the right rows.

mod loader_support;

use std::sync::Arc;

use loader_support::{
    Files, assert_refused, base, delta, fixture_files, fixtures, notice_codes, pair_at, read_tensors,
};
use lorapool::adapter::{Adapter, BaseModel, Code};
use lorapool::backend::{self, GpuBackend};
use lorapool::manager::{LoraAdapterInput, LoraWeights};
use lorapool::pool::PoolSpec;
use lorapool::{DType, Error};
use serde_json::json;

/// A fused linear of the Phi-3 fixture and the parts of it, with their rows.
const PARTS: [(&str, &[(&str, usize)]); 2] = [
    ("self_attn.qkv_proj", &[("self_attn.q_proj", 48), ("self_attn.k_proj", 24), ("self_attn.v_proj", 24)]),
    ("mlp.gate_up_proj", &[("mlp.gate_proj", 80), ("mlp.up_proj", 80)]),
];

/// The Phi-3 fixture with the keys and rows that a model with separate linears has.
fn apart() -> Files {
    let mut files = fixture_files("13_fused_qkv_phi3");
    for (name, dtype, shape, bytes) in std::mem::take(&mut files.tensors) {
        let Some((whole, parts)) = PARTS.iter().find(|(whole, _)| name.contains(whole)) else {
            files.tensors.push((name, dtype, shape, bytes));
            continue;
        };
        let mut row = 0;
        for (part, rows) in *parts {
            let (mut shape, mut bytes) = (shape.clone(), bytes.clone());
            if name.contains("lora_B") {
                let width = 4 * shape[1];
                bytes = bytes[row * width..(row + rows) * width].to_vec();
                shape[0] = *rows;
                row += rows;
            }
            files.tensors.push((name.replace(whole, part), dtype, shape, bytes));
        }
    }
    files.with("target_modules", json!(null))
}

/// Some rows of inputs.
fn inputs(width: usize) -> Vec<f64> {
    (0..3 * width).map(|i| f64::from((i as u32).wrapping_mul(2_654_435_761) >> 20) / 2048.0 - 1.0).collect()
}

/// Asserts that `fused`'s deltas, by `whole`, are those of the same adapter unfused, side by side.
fn assert_joined(fused: &Adapter, apart: &Adapter, layer: usize, tolerance: f64) {
    for (whole, parts) in PARTS {
        let path = |module: &str| format!("model.layers.{layer}.{module}");
        let pair = pair_at(fused, &path(whole));
        let x = inputs(pair.in_features());
        let found = delta(pair, pair.scale.into(), &x);
        let outputs: usize = parts.iter().map(|(_, rows)| rows).sum();
        assert_eq!(pair.out_features(), outputs);
        let mut first = 0;
        for (part, rows) in parts {
            let expected = match apart.pairs.iter().find(|pair| *pair.site.path == path(part)) {
                Some(pair) => delta(pair, pair.scale.into(), &x),
                None => vec![0.0; 3 * rows],
            };
            for (row, expected) in expected.chunks(*rows).enumerate() {
                for (f, e) in found[row * outputs + first..].iter().zip(expected) {
                    assert!((f - e).abs() <= tolerance * e.abs().max(1.0), "{whole} {part}: {f} {e}");
                }
            }
            first += rows;
        }
    }
}

#[test]
fn separate_parts_are_joined_at_a_fused_linear_and_give_pefts_outputs() {
    let adapter = apart().load(Some(&base("phi3"))).unwrap();
    assert_eq!(notice_codes(&adapter), ["N_FUSED_JOINED"]);
    for word in ["gate_proj, ", "up_proj", "gate_up_proj (rank 8)", "4 sites"] {
        assert!(adapter.notices[0].message.contains(word), "{}", adapter.notices[0].message);
    }
    let expected = read_tensors(&fixtures().join("13_fused_qkv_phi3/expected.safetensors"));
    let fused = lorapool::adapter::load(fixtures().join("13_fused_qkv_phi3"), Some(&base("phi3"))).unwrap();
    let sites = |adapter: &Adapter| adapter.pairs.iter().map(|pair| pair.site.clone()).collect::<Vec<_>>();
    assert_eq!(sites(&adapter), sites(&fused));
    let mut compared = 0;
    for pair in &adapter.pairs {
        let get = |part: &str| &expected[&format!("{}|{part}", pair.site.path)].values;
        let found = delta(pair, pair.scale.into(), get("x"));
        for ((d, base), y) in found.iter().zip(get("y_base")).zip(get("y")) {
            assert!((base + d - y).abs() < 1e-12, "{}: {} {y}", pair.site.path, base + d);
            compared += 1;
        }
        // The fixture has scale 2 throughout: nothing is folded.
        assert_eq!((pair.scale, pair.b.dtype), (2.0, DType::F32));
    }
    assert!(compared > 2000, "{compared}");
    // Each tensor belongs to a site that is there.
    assert!(adapter.tensors.iter().all(|tensor| adapter.pairs.iter().any(|pair| pair.site.path == tensor.site)));
    assert_eq!((adapter.tensors_applied(), adapter.tensors.len()), (28, 28));
}

#[test]
fn a_fused_adapter_is_split_over_separate_linears() {
    let adapter = lorapool::adapter::load(fixtures().join("13_fused_qkv_phi3"), Some(&base("llama"))).unwrap();
    assert_eq!(notice_codes(&adapter), ["N_FUSED_SPLIT"]);
    // To the bit what the same adapter is with the keys of a Llama.
    let apart = apart().load(Some(&base("llama"))).unwrap();
    assert_eq!((&adapter.pairs, adapter.digest), (&apart.pairs, apart.digest));
    assert!(apart.notices.is_empty());
    assert_eq!(adapter.tensors_applied(), adapter.tensors.len());
}

#[test]
fn parts_of_different_ranks_scales_and_types_keep_their_numbers() {
    // Ranks and alphas by pattern, of a Llama with the widths of the Phi-3.
    for (case, tolerance) in [("07_rank_pattern", 1e-7), ("08_rank_pattern_rslora", 1e-7), ("02_plain_f16", 1e-12)] {
        let files = fixture_files(case);
        let (fused, apart) = (files.load(Some(&base("phi3"))).unwrap(), files.load(Some(&base("llama"))).unwrap());
        for layer in 0..2 {
            let has =
                |module: &str| apart.pairs.iter().any(|p| *p.site.path == format!("model.layers.{layer}.{module}"));
            if PARTS.iter().all(|(_, parts)| parts.iter().any(|(part, _)| has(part))) {
                assert_joined(&fused, &apart, layer, tolerance);
            }
        }
    }
    let one = Files::lora(2)
        .with("alpha_pattern", json!({"k_proj": 1, "v_proj": -64, "up_proj": 0}))
        .with("rank_pattern", json!({"v_proj": 5}))
        .pair("model.layers.0.self_attn.k_proj", 2, 48, 24)
        .pair("model.layers.0.self_attn.v_proj", 5, 48, 24)
        .pair("model.layers.0.mlp.gate_proj", 2, 48, 80)
        .pair("model.layers.0.mlp.up_proj", 2, 48, 80);
    let (fused, apart) = (one.load(Some(&base("phi3"))).unwrap(), one.load(Some(&base("llama"))).unwrap());
    assert_joined(&fused, &apart, 0, 1e-6);
    let qkv = pair_at(&fused, "model.layers.0.self_attn.qkv_proj");
    assert_eq!((qkv.rank(), qkv.scale), (7, -64.0 / 5.0));
    // q is missing: its rows are zero to the bit. The pair of the largest scale is not rounded.
    assert!(qkv.b.bytes[..48 * 7 * 4].iter().all(|byte| *byte == 0));
    let v = pair_at(&apart, "model.layers.0.self_attn.v_proj");
    let last = &qkv.b.values()[95 * 7 + 2..];
    assert_eq!(last, &v.b.values()[23 * 5..]);
    // Types that differ are widened, which is exact.
    let mut mixed = Files::lora(1)
        .pair("model.layers.0.self_attn.q_proj", 1, 48, 48)
        .pair("model.layers.0.self_attn.v_proj", 1, 48, 24)
        .pair("model.layers.0.mlp.up_proj", 1, 48, 80);
    for tensor in &mut mixed.tensors[..2] {
        let values = DType::F32.decode(&tensor.3);
        tensor.1 = "BF16";
        tensor.3.clear();
        DType::Bf16.encode(&values, &mut tensor.3);
    }
    let (fused, apart) = (mixed.load(Some(&base("phi3"))).unwrap(), mixed.load(Some(&base("llama"))).unwrap());
    assert_joined(&fused, &apart, 0, 1e-12);
}

#[test]
fn biases_of_parts_lie_on_the_rows_of_their_parts() {
    let files = fixture_files("16_lora_bias");
    let (fused, apart) = (files.load(Some(&base("phi3"))).unwrap(), files.load(Some(&base("llama"))).unwrap());
    let mut compared = 0;
    for (layer, (whole, parts)) in [(0, PARTS[0]), (1, PARTS[0])] {
        let pair = pair_at(&fused, &format!("model.layers.{layer}.{whole}"));
        let joined = pair.vectors.as_ref().unwrap();
        assert!(joined.gain.iter().all(|gain| *gain == 1.0));
        let mut first = 0;
        for (part, rows) in parts {
            let found = &joined.offset[first..first + rows];
            match apart.pairs.iter().find(|pair| *pair.site.path == format!("model.layers.{layer}.{part}")) {
                Some(pair) => {
                    assert_eq!(found, pair.vectors.as_ref().unwrap().offset, "{part}");
                    assert!(found.iter().any(|offset| *offset != 0.0));
                    compared += 1;
                }
                None => assert!(found.iter().all(|offset| offset.to_bits() == 0), "{part}"),
            }
            first += rows;
        }
    }
    assert!(compared >= 4, "{compared}");
}

#[test]
fn wrapped_paths_are_found_in_a_fused_base_too() {
    let files = Files::lora(2).raw_pair("base_model.model.language_model.model.layers.1.self_attn.k_proj", 2, 48, 24);
    let adapter = files.load(Some(&base("phi3"))).unwrap();
    assert_eq!(notice_codes(&adapter), ["N_PREFIX", "N_FUSED_JOINED"]);
    assert_eq!(&*adapter.pairs[0].site.path, "model.layers.1.self_attn.qkv_proj");
    // GPT-2 keeps q, k and v in a Conv1D; its widths come from n_embd and n_head.
    let files = Files::lora(2).pair("transformer.h.1.attn.v_proj", 2, 48, 48);
    let adapter = files.load(Some(&base("gpt2"))).unwrap();
    let pair = pair_at(&adapter, "transformer.h.1.attn.c_attn");
    assert_eq!(pair.out_features(), 144);
    assert!(pair.b.bytes[..96 * 2 * 4].iter().all(|byte| *byte == 0));
    assert_eq!(pair.b.bytes[96 * 2 * 4..], files.tensors[1].3);
    // Without a base, sites are what the keys say.
    assert_eq!(&*files.load(None).unwrap().pairs[0].site.path, "transformer.h.1.attn.v_proj");
}

/// A base of one linear, or a few.
fn of(config: serde_json::Value, linears: &[(&str, usize, usize)]) -> BaseModel {
    let files = Files { config, tensors: Vec::new() };
    linears.iter().fold(files, |f, (path, i, o)| f.tensor(&format!("{path}.weight"), &[*o, *i])).base().unwrap()
}

#[test]
fn what_is_not_known_to_be_plain_row_ranges_is_refused_by_name() {
    let q = |leaf: &str| Files::lora(2).pair(&format!("model.layers.0.self_attn.{leaf}"), 2, 8, 8);
    let heads = json!({"model_type": "phi3", "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 8});
    let fused = |config: &serde_json::Value, leaf: &str, rows: usize| {
        of(config.clone(), &[(&format!("model.layers.0.self_attn.{leaf}"), 8, rows)])
    };
    assert!(q("q_proj").load(Some(&fused(&heads, "qkv_proj", 16))).is_ok());
    // Head counts that don't add up to the rows; none at all; a model whose order is not known.
    let named = ["q_proj", "qkv_proj", "24 rows", "8, 4 and 4", "2 heads, 1 of"];
    assert_refused(q("q_proj").load(Some(&fused(&heads, "qkv_proj", 24))), Code::FusedMismatch, &named);
    let bare = json!({"model_type": "phi3"});
    assert_refused(
        q("q_proj").load(Some(&fused(&bare, "qkv_proj", 16))),
        Code::FusedMismatch,
        &["qkv_proj", "head counts"],
    );
    let mut other = heads.clone();
    other["model_type"] = json!("codegen");
    assert_refused(
        q("q_proj").load(Some(&fused(&other, "qkv_proj", 16))),
        Code::FusedMismatch,
        &["codegen", "order of rows"],
    );
    for leaf in ["query_key_value", "wqkv", "qkv"] {
        let base = fused(&heads, leaf, 16);
        assert_refused(q("q_proj").load(Some(&base)), Code::FusedMismatch, &[leaf, "q_proj", "interleaved"]);
        let separate = of(
            heads.clone(),
            &[
                ("model.layers.0.self_attn.q_proj", 8, 8),
                ("model.layers.0.self_attn.k_proj", 8, 4),
                ("model.layers.0.self_attn.v_proj", 8, 4),
            ],
        );
        let adapter = Files::lora(2).pair(&format!("model.layers.0.self_attn.{leaf}"), 2, 8, 16);
        assert_refused(adapter.load(Some(&separate)), Code::FusedMismatch, &[leaf, "q_proj", "interleaved"]);
        let adapter = Files::lora(2).pair("model.layers.0.self_attn.W_pack", 2, 8, 16);
        assert_eq!(adapter.load(Some(&separate)).unwrap().pairs.len(), 3);
        // Rows that are not those of the parts together.
        let adapter = Files::lora(2).pair("model.layers.0.self_attn.qkv_proj", 2, 8, 24);
        assert_refused(adapter.load(Some(&separate)), Code::BaseShape, &["24 rows", "expected 16", "qkv_proj"]);
    }
    // A part that is wider than its rows, or reads other inputs.
    let base = fused(&heads, "qkv_proj", 16);
    let wide = Files::lora(2).pair("model.layers.0.self_attn.k_proj", 2, 8, 8);
    assert_refused(wide.load(Some(&base)), Code::BaseShape, &["k_proj", "8 rows", "expected 4"]);
    let long = Files::lora(2).pair("model.layers.0.self_attn.k_proj", 2, 12, 4);
    assert_refused(long.load(Some(&base)), Code::BaseShape, &["k_proj", "12 columns", "expected 8"]);
    // Both the whole and a part of it, or a part by two names.
    let both = q("q_proj").pair("model.layers.0.self_attn.qkv_proj", 2, 8, 16);
    assert_refused(both.load(Some(&base)), Code::TensorDuplicate, &["q_proj", "qkv_proj"]);
    let both = q("q_proj").pair("model.layers.0.self_attn.query", 2, 8, 8);
    assert_refused(both.load(Some(&base)), Code::TensorDuplicate, &["q_proj", "query"]);
    // Halves need an even number of rows.
    let odd = of(heads, &[("model.layers.0.mlp.gate_up_proj", 8, 7)]);
    let up = Files::lora(2).pair("model.layers.0.mlp.up_proj", 2, 8, 4);
    assert_refused(up.load(Some(&odd)), Code::FusedMismatch, &["gate_up_proj", "7 rows", "halves"]);
}

#[test]
fn a_joined_rank_beyond_the_kernels_or_the_pool_names_both_numbers() {
    let parts = |rank: usize| {
        ["q_proj", "k_proj", "v_proj"].iter().zip([48, 24, 24]).fold(Files::lora(rank), |files, (leaf, rows)| {
            files.pair(&format!("model.layers.0.self_attn.{leaf}"), rank, 48, rows)
        })
    };
    let base = base("phi3");
    assert_refused(parts(171).load(Some(&base)), Code::RankLimit, &["q_proj", "171", "513", "512", "qkv_proj"]);
    let adapter = parts(8).load(Some(&base)).unwrap();
    let gpu: Arc<dyn GpuBackend> = backend::open("cpu", 0).unwrap();
    let load = |max_rank: u32| {
        let spec = PoolSpec::for_base(&base, max_rank, 1, DType::F32);
        LoraWeights::load(&gpu, spec, &[LoraAdapterInput { name: "a", adapter: &adapter }])
    };
    match load(16) {
        Err(Error::Limit { found: 24, limit: 16, .. }) => {}
        other => panic!("{:?}", other.map(|_| ())),
    }
    assert!(load(24).is_ok());
}
