//! LoRA adapters of llama.cpp's: the same weights to the bit as the adapter that they were made from, or a refusal that
//! says why not.

mod loader_support;

use std::fs;
use std::path::Path;

use loader_support::gguf::Gguf;
use loader_support::{Files, assert_refused, base, fixture_files, fixtures, notice_codes, pair_at};
use lorapool::adapter::{Adapter, BaseModel, Code, GgufAdapter, load};
use lorapool::{DType, Result};
use serde_json::json;

fn read(gguf: &Gguf, base: Option<&BaseModel>) -> Result<Adapter> {
    raw(&gguf.bytes(), base)
}

fn raw(bytes: &[u8], base: Option<&BaseModel>) -> Result<Adapter> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("sql.gguf"), bytes).unwrap();
    load(dir.path().join("sql.gguf"), base)
}

/// Models of the mixture kind keep their attention as others do.
#[test]
fn attention_of_mixture_models_is_read_and_their_experts_are_refused() {
    let base = base("qwen3moe");
    let q = base.linear("model.layers.1.self_attn.q_proj").unwrap();
    let (inputs, outputs) = (q.in_features as u64, q.out_features as u64);
    let gguf = Gguf::lora("qwen3moe", 4.0).pair("blk.1.attn_q", 2, inputs, outputs);
    let adapter = read(&gguf, Some(&base)).unwrap();
    let pair = pair_at(&adapter, "model.layers.1.self_attn.q_proj");
    assert_eq!((pair.scale, &pair.b.bytes), (2.0, &gguf.tensors[1].3));
    let experts = gguf.clone().pair("blk.0.ffn_up_exps", 2, inputs, 8);
    assert_refused(read(&experts, Some(&base)), Code::ExpertLora, &["ffn_up_exps"]);
    let router = gguf.pair("blk.0.ffn_gate_inp", 2, inputs, 8);
    assert_refused(read(&router, Some(&base)), Code::ExpertLora, &["ffn_gate_inp"]);
}

/// Fixtures whose scale is alpha / rank throughout, with the architecture of their base, and heads of q and k where
/// llama.cpp's converter reorders rows.
const CASES: [(&str, &str, &str, Option<[usize; 2]>); 7] = [
    ("01_plain_f32", "llama", "llama", Some([4, 2])),
    ("02_plain_f16", "llama", "llama", Some([4, 2])),
    ("03_plain_bf16", "llama", "llama", Some([4, 2])),
    ("05_r1", "llama", "llama", Some([4, 2])),
    ("06_r72_over_hidden", "llama", "llama", Some([4, 2])),
    ("13_fused_qkv_phi3", "phi3", "phi3", None),
    ("d_f64", "llama", "llama", Some([4, 2])),
];

#[test]
fn a_converted_adapter_is_the_one_that_it_was_made_from_to_the_bit() {
    for (case, model, architecture, heads) in CASES {
        let base = base(model);
        let gguf = Gguf::converted(&fixture_files(case), architecture, heads);
        let expected = load(fixtures().join(case), Some(&base)).unwrap();
        for version in [2, 3] {
            for (alignment, padded) in [(32, true), (32, false), (8, true), (64, false)] {
                let mut gguf = Gguf { version, alignment, padded, ..gguf.clone() };
                if alignment != 32 {
                    gguf = gguf.meta("general.alignment", 4, &(alignment as u32).to_le_bytes());
                }
                let adapter = read(&gguf, Some(&base)).unwrap_or_else(|error| panic!("{case}: {error}"));
                assert_eq!(adapter.digest, expected.digest, "{case}");
                assert_eq!(adapter.tensors_applied(), expected.tensors_applied());
                assert_eq!(adapter.notices[0].code, "N_GGUF");
            }
        }
    }
    // Written by gguf-py, with its own map of names.
    let adapter = load(fixtures().join("_gguf/05_r1.gguf"), Some(&base("llama"))).unwrap();
    assert_eq!(adapter.digest, load(fixtures().join("05_r1"), None).unwrap().digest);
    assert_eq!(load(fixtures().join("_gguf"), Some(&base("llama"))).unwrap().digest, adapter.digest);
    // The rows are put back because of the head counts: without, k's of two heads would be others.
    let adapter = read(&Gguf::converted(&fixture_files("01_plain_f32"), "llama", None), Some(&base("llama"))).unwrap();
    assert_ne!(adapter.digest, load(fixtures().join("01_plain_f32"), None).unwrap().digest);
}

#[test]
fn ranks_are_the_tensors_own_and_scales_are_alpha_over_rank() {
    // Ranks by pattern; alphas by pattern are lost in the file.
    let files = fixture_files("07_rank_pattern");
    let base = base("llama");
    let adapter = read(&Gguf::converted(&files, "llama", Some([4, 2])), Some(&base)).unwrap();
    let original = load(fixtures().join("07_rank_pattern"), Some(&base)).unwrap();
    let alpha = original.config.lora_alpha;
    assert_eq!(adapter.config.lora_alpha, alpha);
    for (pair, from) in adapter.pairs.iter().zip(&original.pairs) {
        assert_eq!((&pair.a, &pair.b), (&from.a, &from.b));
        assert_eq!(pair.scale, (alpha / pair.rank() as f64) as f32);
        let by_config = adapter.config.scales().unwrap().of(&pair.site.path).unwrap();
        assert_eq!((by_config.0, by_config.1 as f32), (pair.rank(), pair.scale));
    }
    assert!(adapter.notices[0].message.contains("alpha being"), "{}", adapter.notices[0].message);
    // No alpha, or 0: llama.cpp scales by 1.
    let gguf = Gguf::converted(&files, "llama", Some([4, 2]));
    for gguf in [gguf.clone().without("adapter.lora.alpha"), gguf.meta("adapter.lora.alpha", 6, &[0; 4])] {
        let adapter = read(&gguf, Some(&base)).unwrap();
        assert!(adapter.pairs.iter().all(|pair| pair.scale == 1.0));
        assert!(adapter.notices[0].message.contains("every scale is 1"), "{}", adapter.notices[0].message);
        let scales = adapter.config.scales().unwrap();
        assert!(adapter.pairs.iter().all(|pair| scales.of(&pair.site.path).unwrap() == (pair.rank(), 1.0)));
    }
}

#[test]
fn a_gguf_file_fits_fused_wrapped_and_tied_bases_as_any_adapter() {
    // Separate parts at a base that has them fused.
    let gguf = Gguf::lora("phi3", 4.0).pair("blk.1.attn_q", 2, 48, 48).pair("output", 2, 48, 131);
    let adapter = read(&gguf, Some(&base("phi3"))).unwrap();
    assert_eq!(notice_codes(&adapter), ["N_GGUF", "N_FUSED_JOINED"]);
    assert_eq!(pair_at(&adapter, "model.layers.1.self_attn.qkv_proj").out_features(), 96);
    assert_eq!(pair_at(&adapter, "lm_head").scale, 2.0);
    // A text model within a larger one.
    let text = json!({"model_type": "qwen2", "num_attention_heads": 2, "hidden_size": 8});
    let wrapped = Files { config: json!({"model_type": "x", "text_config": text}), tensors: Vec::new() }
        .tensor("model.language_model.layers.0.mlp.up_proj.weight", &[6, 8])
        .base()
        .unwrap();
    let gguf = Gguf::lora("qwen2", 4.0).pair("blk.0.ffn_up", 2, 8, 6);
    let adapter = read(&gguf, Some(&wrapped)).unwrap();
    assert_eq!(&*adapter.pairs[0].site.path, "model.language_model.layers.0.mlp.up_proj");
    assert_eq!(notice_codes(&adapter), ["N_GGUF", "N_PREFIX"]);
    assert_eq!(adapter.tensors[0].name, "blk.0.ffn_up.weight.lora_a");
}

#[test]
fn an_embedding_is_turned_back_from_the_transposed_form() {
    let base = base("llama");
    let original = load(fixtures().join("19_embedding_lora_nobase"), Some(&base)).unwrap();
    let files = fixture_files("19_embedding_lora_nobase");
    let embedding = |(name, ..): &&(String, &str, Vec<usize>, Vec<u8>)| name.contains("lora_embedding");
    let linears = Files { tensors: files.tensors.iter().filter(|t| !embedding(t)).cloned().collect(), ..files.clone() };
    let mut gguf = Gguf::converted(&linears, "llama", Some([4, 2]));
    for (name, _, shape, bytes) in files.tensors.iter().filter(embedding) {
        let [rows, cols] = shape[..] else { panic!() };
        gguf = match name.ends_with('A') {
            // token_embd's A is [vocabulary][rank].
            true => {
                let element = |i: usize| &bytes[4 * ((i % rows) * cols + i / rows)..][..4];
                let turned: Vec<u8> = (0..rows * cols).flat_map(element).copied().collect();
                gguf.tensor("token_embd.weight.lora_a", &[rows as u64, cols as u64], 0, &turned)
            }
            false => gguf.tensor("token_embd.weight.lora_b", &[cols as u64, rows as u64], 0, bytes),
        };
    }
    let adapter = read(&gguf, Some(&base)).unwrap();
    assert_eq!(adapter.pairs, original.pairs);
    assert_eq!(adapter.digest, original.digest);
}

#[test]
fn a_directory_with_one_gguf_file_and_no_other_weights_is_that_adapter() {
    let base = base("llama");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("adapter-f16.gguf");
    fs::write(&file, Gguf::converted(&fixture_files("05_r1"), "llama", Some([4, 2])).bytes()).unwrap();
    let digest = |path: &Path| load(path, Some(&base)).unwrap().digest;
    assert_eq!(digest(dir.path()), digest(&file));
    // A config beside it is not read, and said so.
    fs::copy(fixtures().join("04_rslora_r6/adapter_config.json"), dir.path().join("adapter_config.json")).unwrap();
    let beside = load(dir.path(), Some(&base)).unwrap();
    assert_eq!((beside.digest, notice_codes(&beside)), (digest(&file), vec!["N_GGUF", "N_GGUF_CONFIG"]));
    // PEFT's own weights say more, and a pickle is what it is.
    fs::write(dir.path().join("adapter_model.bin"), b"x").unwrap();
    assert_refused(load(dir.path(), Some(&base)), Code::WeightsPickle, &["adapter_model.bin"]);
    fixture_files("06_r72_over_hidden").write(dir.path());
    assert_eq!(digest(dir.path()), load(fixtures().join("06_r72_over_hidden"), Some(&base)).unwrap().digest);
    // Two are not picked from. Under another name it is named; as a file by itself it is read whatever its name.
    let two = tempfile::tempdir().unwrap();
    fs::copy(&file, two.path().join("a.gguf")).unwrap();
    fs::copy(&file, two.path().join("b.gguf")).unwrap();
    assert_refused(load(two.path(), Some(&base)), Code::SeveralAdapters, &["a.gguf", "b.gguf"]);
    fs::copy(&file, dir.path().join("adapter_model.safetensors")).unwrap();
    assert_refused(load(dir.path(), Some(&base)), Code::WeightsGguf, &["adapter_model.safetensors"]);
    assert_eq!(digest(&dir.path().join("adapter_model.safetensors")), digest(&file));
}

#[test]
fn what_can_not_be_turned_back_is_refused_by_name() {
    let llama = base("llama");
    let good = Gguf::converted(&fixture_files("05_r1"), "llama", Some([4, 2]));
    assert!(read(&good, Some(&llama)).is_ok());
    let refused = |gguf: &Gguf, code: Code, named: &[&str]| {
        assert_refused(read(gguf, Some(&llama)), code, &[&["sql.gguf"], named].concat());
    };
    // No base; a base of another model; a base without head counts.
    assert_refused(read(&good, None), Code::WeightsGguf, &["sql.gguf", "give the base"]);
    assert_refused(read(&good, Some(&base("phi3"))), Code::WeightsGguf, &["llama", "phi3", "model_type"]);
    let bare = Files { config: json!({"model_type": "llama"}), tensors: Vec::new() }
        .tensor("model.layers.0.self_attn.q_proj.weight", &[8, 8])
        .base()
        .unwrap();
    assert_refused(read(&good, Some(&bare)), Code::WeightsGguf, &["head counts"]);
    // No LoRA, or another kind.
    refused(&good.clone().without("general.type"), Code::WeightsGguf, &["general.type", "absent"]);
    refused(&good.clone().text("general.type", "model"), Code::WeightsGguf, &["general.type", "\"model\"", "adapter"]);
    refused(&good.clone().text("adapter.type", "control_vector"), Code::WeightsGguf, &["adapter.type", "lora"]);
    for architecture in ["gpt2", "falcon", "gptneox", "bloom", "mamba", ""] {
        let gguf = good.clone().text("general.architecture", architecture);
        refused(&gguf, Code::WeightsGguf, &["general.architecture", architecture, "safetensors"]);
    }
    let tokens = [&4u32.to_le_bytes()[..], &1u64.to_le_bytes(), &[7, 0, 0, 0]].concat();
    refused(&good.clone().meta("adapter.alora.invocation_tokens", 9, &tokens), Code::Alora, &["invocation_tokens"]);
    for alpha in [f32::NAN, f32::INFINITY] {
        let gguf = good.clone().meta("adapter.lora.alpha", 6, &alpha.to_le_bytes());
        refused(&gguf, Code::ConfigAlpha, &["adapter.lora.alpha"]);
    }
    refused(&Gguf { version: 1, ..good.clone() }, Code::WeightsGguf, &["version 1", "2 or 3"]);
    refused(&Gguf { version: 3 << 24, ..good.clone() }, Code::WeightsGguf, &["byte order"]);
    // Types, kinds and names of tensors.
    let with = |name: &str, dims: &[u64], kind: u32, len: usize| good.clone().tensor(name, dims, kind, &vec![0; len]);
    let a = "blk.0.ffn_up.weight.lora_a";
    refused(&with(a, &[32, 1], 8, 34), Code::WeightsGguf, &[a, "Q8_0", "--outtype"]);
    refused(&with(a, &[32, 1], 12, 34), Code::WeightsGguf, &[a, "Q4_K"]);
    refused(&with(a, &[32, 1], 99, 34), Code::WeightsGguf, &[a, "99"]);
    for name in ["blk.0.attn_norm.weight", "blk.0.ffn_up.weight", "rope_freqs.weight", "x", ""] {
        refused(&with(name, &[48], 0, 192), Code::UnknownTensor, &[name]);
    }
    for name in ["blk.0.ssm_in", "blk.x.attn_q", "blk.01.attn_q", "blk..attn_q", "v.blk.0.attn_q", "blk.0.attn_qkv"] {
        refused(&with(&format!("{name}.weight.lora_a"), &[48, 1], 0, 192), Code::UnknownTensor, &[name]);
    }
    refused(&with("blk.0.ffn_gate_exps.weight.lora_a", &[48, 1], 0, 192), Code::ExpertLora, &["ffn_gate_exps"]);
    refused(&with("blk.9.ffn_up.weight.lora_a", &[48, 1], 0, 192), Code::Unpaired, &["blk.9.ffn_up"]);
    let beyond = good.clone().pair("blk.9.ffn_up", 1, 48, 80);
    refused(&beyond, Code::NotInBase, &["blk.9.ffn_up.weight.lora_a", "model.layers.9.mlp.up_proj"]);
    let wide = good.clone().pair("blk.0.ffn_up", 1, 48, 81);
    refused(&wide, Code::BaseShape, &["blk.0.ffn_up.weight.lora_b", "81 rows"]);
    let odd = Gguf::lora("llama", 1.0).pair("blk.0.attn_q", 1, 48, 46);
    refused(&odd, Code::BaseShape, &["blk.0.attn_q.weight.lora_b", "46 rows", "4 heads"]);
    refused(&with(a, &[48, 1, 1], 0, 192), Code::Unpaired, &[a]);
    let cube = with(a, &[48, 1, 1], 0, 192).tensor("blk.0.ffn_up.weight.lora_b", &[1, 80], 0, &[0; 320]);
    refused(&cube, Code::ConvLora, &[a, "[1, 1, 48]"]);
    let mut nan = good.clone();
    nan.tensors[0].3[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    refused(&nan, Code::NotFinite, &["blk.0.", "lora_a"]);
    refused(&Gguf::lora("llama", 1.0), Code::NoTensors, &["no tensor"]);
}

#[test]
fn a_damaged_file_is_named_with_what_is_wrong() {
    let llama = base("llama");
    let good = Gguf::converted(&fixture_files("05_r1"), "llama", Some([4, 2]));
    let bytes = good.bytes();
    let refused = |bytes: &[u8], code: Code, named: &[&str]| {
        assert_refused(raw(bytes, Some(&llama)), code, &[&["sql.gguf"], named].concat());
    };
    let at = |at: usize, with: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + with.len()].copy_from_slice(with);
        bytes
    };
    refused(&[], Code::FileEmpty, &[]);
    refused(&bytes[..3], Code::FileHeader, &[]);
    refused(b"GGML\x03\0\0\0", Code::FileHeader, &["GGUF"]);
    for len in [4, 7, 20, 24, 30, 200, bytes.len() - 100] {
        refused(&bytes[..len], Code::FileTruncated, &[]);
    }
    refused(&[&bytes[..], &[0; 32]].concat(), Code::FileTrailing, &["32 bytes"]);
    refused(&at(8, &u64::MAX.to_le_bytes()), Code::FileTruncated, &["tensors"]);
    refused(&at(16, &(1u64 << 40).to_le_bytes()), Code::FileTruncated, &["metadata entries"]);
    refused(&at(24, &u64::MAX.to_le_bytes()), Code::FileTruncated, &[]);
    refused(&at(32, &[0xff]), Code::FileHeader, &["UTF-8"]);
    refused(&at(24 + 8 + "general.architecture".len(), &[77]), Code::FileHeader, &["general.architecture", "77"]);
    let wrong = |offset: (usize, u64)| Gguf { offsets: vec![offset], ..good.clone() }.bytes();
    for offset in [(1, 0), (1, 33), (1, u64::MAX), (0, 32)] {
        refused(&wrong(offset), Code::FileOffsets, &[&good.tensors[offset.0].0]);
    }
    let mut twice = good.clone();
    twice.tensors[1].0 = twice.tensors[0].0.clone();
    refused(&twice.bytes(), Code::FileDuplicate, &[&twice.tensors[0].0]);
    let mut again = good.clone();
    again.meta.push(again.meta[1].clone());
    refused(&again.bytes(), Code::FileDuplicate, &[&again.meta[1].0]);
    for dims in [vec![], vec![1; 5]] {
        let mut shaped = good.clone();
        shaped.tensors[0].1 = dims;
        refused(&shaped.bytes(), Code::FileHeader, &["dimensions", &shaped.tensors[0].0]);
    }
    let mut empty = good.clone();
    empty.tensors[0].1 = vec![0, 4];
    refused(&empty.bytes(), Code::TensorEmpty, &[&empty.tensors[0].0]);
    let mut huge = good.clone();
    huge.tensors[0].1 = vec![1 << 33, 1 << 33];
    refused(&huge.bytes(), Code::FileHeader, &["overflows", &huge.tensors[0].0]);
    huge.tensors[0].1 = vec![1 << 30, 1 << 20];
    refused(&huge.bytes(), Code::FileTruncated, &[&huge.tensors[0].0]);
    for alignment in [0u32, 3, 4, 1 << 30] {
        let gguf = good.clone().meta("general.alignment", 4, &alignment.to_le_bytes());
        refused(&gguf.bytes(), Code::FileHeader, &["general.alignment"]);
    }
    let nested = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes(), &[0; 12]].concat();
    refused(&good.clone().meta("x", 9, &nested).bytes(), Code::FileHeader, &["\"x\""]);
    let long = [&8u32.to_le_bytes()[..], &(1u64 << 60).to_le_bytes()].concat();
    refused(&good.clone().meta("x", 9, &long).bytes(), Code::FileTruncated, &["strings"]);
    // Values of every type are passed over.
    let every = (0..8).chain(10..13).fold(good.clone(), |gguf, kind| {
        let size = [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8][kind as usize];
        let list = [&(kind as u32).to_le_bytes()[..], &3u64.to_le_bytes(), &vec![1; 3 * size]].concat();
        gguf.meta(&format!("a{kind}"), kind as u32, &vec![1; size]).meta(&format!("b{kind}"), 9, &list)
    });
    let strings = [&8u32.to_le_bytes()[..], &2u64.to_le_bytes(), &[0; 8], &1u64.to_le_bytes(), b"x"].concat();
    assert!(read(&every.meta("strings", 9, &strings), Some(&llama)).is_ok());
}

#[test]
fn a_conversion_writes_what_peft_would_have_saved() {
    let base = base("llama");
    for case in ["01_plain_f32", "07_rank_pattern", "02_plain_f16"] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.gguf");
        let gguf = Gguf::converted(&fixture_files(case), "llama", Some([4, 2]));
        fs::write(&file, gguf.bytes()).unwrap();
        let out = dir.path().join("out");
        fs::create_dir(&out).unwrap();
        let adapter = GgufAdapter::open(&file, Some(&base)).unwrap().unwrap();
        assert_eq!(adapter.len(), gguf.tensors.len());
        adapter.write(&out).unwrap();
        let written = load(&out, None).unwrap();
        assert_eq!(written.digest, load(&file, Some(&base)).unwrap().digest, "{case}");
        assert!(written.notices.is_empty(), "{:?}", written.notices);
        assert_eq!(written.pairs[0].a.dtype, if case == "02_plain_f16" { DType::F16 } else { DType::F32 });
    }
    assert!(GgufAdapter::open(fixtures().join("05_r1"), Some(&base)).unwrap().is_none());
}
