//! Which modules a base's weights and config show, and what each of them is.

use std::collections::HashMap;

use safetensors::Dtype;

use super::header::TensorInfo;
use super::json::Json;

/// What else may lie at a path that an adapter names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Other {
    /// `[rows][width]`, gathered by token.
    Embedding(usize, usize),
    /// Three or more dimensions: a convolution.
    Conv,
    /// One dimension: a norm.
    Vector,
    /// A quantised linear whose widths its files don't show.
    Packed,
}

/// A module of the base by its weight.
pub(super) enum Module {
    /// Widths of input and output.
    Linear(usize, usize),
    Other(Other),
}

/// Parameters by name.
pub(super) type Weights = HashMap<String, TensorInfo>;

/// Whether a two-dimensional weight is gathered by token or position and not multiplied.
fn is_embedding(path: &str) -> bool {
    let leaf = path.rsplit('.').next().unwrap_or(path);
    (leaf.contains("embed") && leaf != "embed_out" && !leaf.ends_with("_proj"))
        || matches!(leaf, "wte" | "wpe" | "shared" | "relative_attention_bias" | "emb")
}

/// The linears of GPT-2 and its kin that transformers keeps as `Conv1D`.
pub(super) fn is_conv1d(path: &str) -> bool {
    matches!(path.rsplit('.').next(), Some("c_attn" | "c_proj" | "c_fc" | "q_attn"))
}

/// Whether those linears store their weight `[in][out]`. GPT-BigCode and Nemotron use the same names for plain linears.
pub(super) fn stored_in_out(config: Option<&Json>, weights: &Weights) -> bool {
    match config.and_then(|c| c.get("model_type")).and_then(Json::as_str) {
        Some(model_type) => matches!(model_type, "gpt2" | "openai-gpt" | "imagegpt" | "decision_transformer" | "clvp"),
        // Without a config: q, k and v lie side by side in the output.
        None => weights.iter().any(|(name, tensor)| {
            name.ends_with(".c_attn.weight") && matches!(*tensor.shape, [rows, cols] if cols == 3 * rows)
        }),
    }
}

/// The modules that hold these weights.
pub(super) fn modules<'a>(config: Option<&Json>, weights: &'a Weights) -> impl Iterator<Item = (&'a str, Module)> {
    let conv1d = stored_in_out(config, weights);
    weights.iter().filter_map(move |(name, tensor)| {
        if let Some(found) = quantised(name, tensor, weights) {
            return Some(found);
        }
        let path = name.strip_suffix(".weight")?;
        Some((
            path,
            match *tensor.shape {
                [rows, cols] if is_embedding(path) => Module::Other(Other::Embedding(rows, cols)),
                [rows, cols] if conv1d && is_conv1d(path) => Module::Linear(rows, cols),
                [rows, cols] => Module::Linear(cols, rows),
                [_] | [] => Module::Other(Other::Vector),
                _ => Module::Other(Other::Conv),
            },
        ))
    })
}

/// A linear whose weight is quantised and packed, with its widths where its other tensors tell them.
fn quantised<'a>(name: &'a str, tensor: &TensorInfo, weights: &Weights) -> Option<(&'a str, Module)> {
    let packed = Module::Other(Other::Packed);
    if let Some(path) = name.strip_suffix(".qweight") {
        // GPTQ packs inputs into words, AWQ outputs: the scales, [groups][out], tell them apart.
        let shape = |tensor: &str| weights.get(&format!("{path}.{tensor}")).map(|tensor| &*tensor.shape);
        return Some((
            path,
            match (&*tensor.shape, shape("scales"), shape("g_idx")) {
                ([rows, words], Some([_, outputs]), _) if words < outputs => Module::Linear(*rows, *outputs),
                ([_, cols], Some([_, outputs]), Some([inputs])) if cols == outputs => Module::Linear(*inputs, *outputs),
                _ => packed,
            },
        ));
    }
    if let Some(path) = name.strip_suffix(".weight_packed") {
        return Some((path, packed));
    }
    let path = name.strip_suffix(".weight")?;
    (tensor.dtype == Dtype::U8 && weights.contains_key(&format!("{name}.absmax"))).then_some((path, packed))
}

/// Whether a path is a head's.
pub(super) fn is_head(path: &str) -> bool {
    matches!(path.rsplit('.').next(), Some("lm_head" | "embed_out" | "decoder"))
}

/// Whether the embedding at a path is the tokens' own.
pub(super) fn is_input(path: &str) -> bool {
    matches!(path.rsplit('.').next(), Some("embed_tokens" | "wte" | "embed_in" | "shared" | "word_embeddings"))
}

/// What the config says about a head that shares the embedding's weight. Where it says nothing, transformers ties it in
/// models that have a head; the config classes whose default is another write theirs down.
pub(super) fn tie(config: Option<&Json>) -> Option<bool> {
    let config = config?;
    if let Some(said) = config.get("tie_word_embeddings").and_then(Json::as_bool) {
        return Some(said);
    }
    names_head(Some(config)).then_some(true)
}

/// Whether the config's architecture is one with a head over the vocabulary.
fn names_head(config: Option<&Json>) -> bool {
    let Some(Json::Array(architectures)) = config.and_then(|config| config.get("architectures")) else { return false };
    let head = |name: &str| name.ends_with("ForCausalLM") || name.ends_with("LMHeadModel");
    architectures.iter().filter_map(Json::as_str).any(head)
}

/// The output head of a model that ties it to the input embedding and so does not store it.
pub(super) fn tied_head(
    config: Option<&Json>,
    shapes: &HashMap<String, (usize, usize)>,
    others: &HashMap<String, Other>,
) -> Option<(String, (usize, usize), String)> {
    if tie(config) != Some(true) || shapes.keys().any(|path| is_head(path)) {
        return None;
    }
    // BERT and its kin call their embedding so, and most of them have no such head.
    let apart = |path: &str| path.ends_with("word_embeddings") && !names_head(config);
    let input = |(path, _): &(&String, &Other)| is_input(path) && !apart(path);
    let embedding = others.iter().filter(input).min_by_key(|(path, _)| path.len())?;
    match embedding.1 {
        Other::Embedding(vocabulary, width) => Some(("lm_head".to_owned(), (*width, *vocabulary), embedding.0.clone())),
        _ => None,
    }
}
