//! Embeddings, heads and token rows: what is served, and what is refused and why.

mod loader_support;

use loader_support::{Files, assert_refused, base, fixture_files, fixtures, pair_at};
use lorapool::DType;
use lorapool::adapter::{Adapter, Code, HostTokens, load};
use serde_json::json;

const EMBED: &str = "model.embed_tokens";
const Q0: &str = "model.layers.0.self_attn.q_proj";

fn tokens_at<'a>(adapter: &'a Adapter, path: &str) -> Option<&'a HostTokens> {
    adapter.tokens.iter().find(|tokens| &*tokens.site.path == path)
}

/// An adapter with `rows` trained tokens of the llama base.
fn trained(rows: usize, ids: serde_json::Value) -> Files {
    let name = format!("base_model.model.{EMBED}.token_adapter.trainable_tokens_delta");
    Files::lora(2).pair(Q0, 2, 48, 48).tensor(&name, &[rows, 48]).with("trainable_token_indices", ids)
}

#[test]
fn trained_rows_are_in_the_order_of_their_ids_and_a_tied_head_has_them_too() {
    let at = |base_name: &str, ids: serde_json::Value| trained(3, ids).load(Some(&base(base_name))).unwrap();
    let row = |i: usize| -> Vec<f32> { (0..48).map(|k| (i * 48 + k) as f32 / 64.0 - 0.25).collect() };
    for ids in [json!([130, 0, 7]), json!({"embed_tokens": [130, 0, 7]}), json!({EMBED: [130, 0, 7]})] {
        let adapter = at("llama", ids.clone());
        let tokens = tokens_at(&adapter, EMBED).unwrap();
        assert_eq!((tokens.ids.as_slice(), tokens.vocabulary), (&[0, 7, 130][..], 131), "{ids}");
        assert_eq!(tokens.rows.values(), [row(1), row(2), row(0)].concat());
        assert!(tokens_at(&adapter, "lm_head").is_none(), "an untied head keeps its rows");
        let tied = at("llama_tied", ids);
        assert_eq!(tokens_at(&tied, "lm_head").unwrap().rows, tokens_at(&tied, EMBED).unwrap().rows);
    }
    // Rows alone are an adapter.
    let name = format!("base_model.model.{EMBED}.token_adapter.trainable_tokens_delta");
    let alone = Files::lora(2).tensor(&name, &[1, 48]).with("trainable_token_indices", json!([4]));
    assert_eq!(alone.load(Some(&base("llama"))).unwrap().tokens.len(), 1);
}

#[test]
fn token_ids_that_do_not_fit_their_rows_are_refused() {
    let llama = base("llama");
    for (files, code, named) in [
        (trained(3, json!([1, 2])), Code::TrainableTokens, "2 token ids"),
        (trained(2, json!([5, 5])), Code::TrainableTokens, "token id 5 twice"),
        (trained(1, json!([131])), Code::Vocabulary, "131"),
        (trained(1, json!({"lm_head": [3]})), Code::TrainableTokens, "no token ids for model.embed_tokens"),
        (trained(1, json!({"embed_tokens": [3], "model.embed_tokens": [3]})), Code::TrainableTokens, "both"),
        (trained(1, serde_json::Value::Null), Code::TrainableTokens, "trainable_token_indices"),
        (
            Files::lora(2).pair(Q0, 2, 48, 48).with("trainable_token_indices", json!([1])),
            Code::TrainableTokens,
            "no rows",
        ),
        (
            Files::lora(2)
                .pair(Q0, 2, 48, 48)
                .tensor("base_model.model.lm_head.token_adapter.trainable_tokens_delta", &[1, 48])
                .with("trainable_token_indices", json!([1])),
            Code::TrainableTokens,
            "input embedding",
        ),
    ] {
        assert_refused(files.load(Some(&llama)), code, &[named]);
    }
    let name = format!("base_model.model.{EMBED}.token_adapter.trainable_tokens_delta");
    let narrow = Files::lora(2).tensor(&name, &[1, 47]).with("trainable_token_indices", json!([1]));
    assert_refused(narrow.load(Some(&llama)), Code::BaseShape, &["47", "48"]);
    let flat = Files::lora(2).tensor(&name, &[48]).with("trainable_token_indices", json!([1]));
    assert_refused(flat.load(Some(&llama)), Code::TensorShape, &["[48]"]);
}

#[test]
fn lora_and_replaced_rows_of_one_table_are_refused() {
    let embedding = |files: Files| {
        files
            .tensor(&format!("base_model.model.{EMBED}.lora_embedding_A"), &[2, 131])
            .tensor(&format!("base_model.model.{EMBED}.lora_embedding_B"), &[48, 2])
    };
    assert_refused(embedding(trained(1, json!([3]))).load(Some(&base("llama"))), Code::TrainableTokens, &[EMBED]);
    // A tied head has the embedding's rows, and LoRA of its own.
    let head = trained(1, json!([3])).pair("lm_head", 2, 48, 131);
    assert_refused(head.clone().load(Some(&base("llama_tied"))), Code::TrainableTokens, &["lm_head"]);
    assert!(head.load(Some(&base("llama"))).is_ok());
}

#[test]
fn a_resized_vocabulary_names_both_numbers() {
    let llama = base("llama");
    let embedding = |vocabulary: usize| {
        Files::lora(2)
            .tensor(&format!("base_model.model.{EMBED}.lora_embedding_A"), &[2, vocabulary])
            .tensor(&format!("base_model.model.{EMBED}.lora_embedding_B"), &[48, 2])
    };
    assert!(pair_at(&embedding(131).load(Some(&llama)).unwrap(), EMBED).embedding);
    for vocabulary in [130, 136] {
        let number = vocabulary.to_string();
        assert_refused(embedding(vocabulary).load(Some(&llama)), Code::Vocabulary, &[&number, "131"]);
        let head = Files::lora(2).pair("lm_head", 2, 48, vocabulary);
        assert_refused(head.load(Some(&llama)), Code::Vocabulary, &[&number, "131"]);
        for table in ["lm_head", EMBED] {
            let whole = Files::lora(2)
                .pair(Q0, 2, 48, 48)
                .tensor(&format!("base_model.model.{table}.weight"), &[vocabulary, 48]);
            assert_refused(whole.load(Some(&llama)), Code::Vocabulary, &[&number, "131"]);
        }
    }
}

#[test]
fn of_a_table_saved_whole_the_rows_that_differ_from_the_base_count_in_the_narrower_type() {
    let llama = base("llama");
    let known = load(fixtures().join("20_modules_to_save"), Some(&llama)).unwrap();
    let mut files = fixture_files("20_modules_to_save");
    // The base's own head, but for one element of row 9; the embedding whole, and equal.
    let own = fixture_files("18_embedding_lora");
    let of_base = |table: &str| {
        let name = format!("base_model.model.{table}.base_layer.weight");
        own.tensors.iter().find(|(found, ..)| *found == name).unwrap().3.clone()
    };
    let mut set = |table: &str, dtype: &'static str, bytes: Vec<u8>| {
        let name = format!("base_model.model.{table}.weight");
        let tensor = files.tensors.iter_mut().find(|(found, ..)| *found == name).unwrap();
        (tensor.1, tensor.3) = (dtype, bytes);
    };
    let mut head = of_base("lm_head");
    head[(9 * 48 + 5) * 4 + 3] ^= 0x80;
    set("lm_head", "F32", head.clone());
    set(EMBED, "F32", of_base(EMBED));
    let adapter = files.clone().load(Some(&llama)).unwrap();
    assert_eq!(tokens_at(&adapter, "lm_head").unwrap().ids, [9]);
    assert!(tokens_at(&adapter, EMBED).is_none(), "an equal table is a copy of the base's");
    assert_ne!(adapter.digest, known.digest);
    // Saved in bf16 the rest is still the base's.
    let mut narrow = Vec::new();
    DType::Bf16.encode(&DType::F32.decode(&head), &mut narrow);
    let mut set = |bytes: Vec<u8>| {
        let tensor = files.tensors.iter_mut().find(|(found, ..)| found.ends_with("lm_head.weight")).unwrap();
        (tensor.1, tensor.3) = ("BF16", bytes);
    };
    set(narrow);
    let adapter = files.load(Some(&llama)).unwrap();
    let tokens = tokens_at(&adapter, "lm_head").unwrap();
    assert_eq!((tokens.ids.as_slice(), tokens.rows.dtype), (&[9][..], DType::Bf16));
}

#[test]
fn a_delta_lands_only_where_keys_say_in_a_tied_model() {
    let tied = base("llama_tied");
    let embedding = load(fixtures().join("26d_embed_lora_tied"), Some(&tied)).unwrap();
    assert!(
        embedding.pairs.iter().any(|pair| pair.embedding) && embedding.pairs.iter().all(|p| &*p.site.path != "lm_head")
    );
    let both = load(fixtures().join("26e_embed_lora_tied_ensure"), Some(&tied)).unwrap();
    assert!(!pair_at(&both, "lm_head").embedding && pair_at(&both, EMBED).embedding);
    // A whole head alone.
    let mut files = fixture_files("26f_modules_to_save_tied_ensure");
    files.tensors.retain(|(name, ..)| !name.contains("embed_tokens"));
    let head = files.load(Some(&tied)).unwrap();
    assert!(tokens_at(&head, "lm_head").is_some() && tokens_at(&head, EMBED).is_none());
}

#[test]
fn an_embedding_s_pair_is_no_linear_s_and_the_reverse() {
    let llama = base("llama");
    let linear = Files::lora(2).pair(EMBED, 2, 131, 48);
    assert_refused(linear.load(Some(&llama)), Code::EmbeddingLora, &[EMBED]);
    let embedding = Files::lora(2)
        .tensor("base_model.model.lm_head.lora_embedding_A", &[2, 131])
        .tensor("base_model.model.lm_head.lora_embedding_B", &[48, 2]);
    assert_refused(embedding.load(Some(&llama)), Code::NotInBase, &["lm_head", "linear"]);
    let half = Files::lora(2)
        .tensor(&format!("base_model.model.{EMBED}.lora_embedding_A"), &[2, 131])
        .tensor(&format!("base_model.model.{EMBED}.lora_B.weight"), &[48, 2]);
    assert!(half.load(None).is_err());
}
