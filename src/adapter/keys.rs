//! Tensor keys: which part of which module a tensor is.
//!
//! PEFT saves `base_model.model.` + module path + part, with the adapter's name left out; training scripts that save a raw
//! state dict leave it in (`lora_A.default.weight`).

/// What PEFT puts before the base's own module path.
pub(super) const PREFIX: &str = "base_model.model.";

/// What a tensor is of its module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Part {
    /// `lora_A.weight`
    A,
    /// `lora_B.weight`
    B,
    /// `alpha`: a scalar beside the pair.
    Alpha,
    /// `lora_B.bias`
    BiasOfB,
    /// `lora_embedding_A`
    EmbeddingA,
    /// `lora_embedding_B`
    EmbeddingB,
    /// `lora_magnitude_vector`, by any of its spellings: DoRA.
    Magnitude,
    /// `token_adapter.trainable_tokens_delta`: rows of trained tokens.
    TokenRows,
    /// What else a `token_adapter` has.
    Tokens,
    /// `base_layer.weight`: a copy of the base's.
    BaseWeight,
    /// `base_layer.bias`: the base's bias, perhaps trained.
    BaseBias,
    /// `weight` or `bias` of a whole module.
    Whole,
    /// `original_module.*`: the base's module beside a saved one.
    Original,
    /// A part of another method, by its name there.
    Foreign(&'static str),
    /// Nothing that has a name here.
    Unknown,
}

/// A tensor's key, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key<'a> {
    /// The module's path, [`PREFIX`] taken off once.
    pub module: &'a str,
    /// Which part.
    pub part: Part,
    /// The adapter's name, where the key has it.
    pub adapter: Option<&'a str>,
    /// Whether the key starts with [`PREFIX`].
    pub prefixed: bool,
}

impl<'a> Key<'a> {
    pub fn parse(key: &'a str) -> Self {
        let (path, prefixed) = match key.strip_prefix(PREFIX) {
            Some(path) => (path, true),
            None => (key, false),
        };
        let (module, part, adapter) = split(path);
        Self { module, part, adapter, prefixed }
    }
}

/// Marks of parts that follow a module's path, and what may follow the mark.
fn split(path: &str) -> (&str, Part, Option<&str>) {
    // The last mark counts: `experts.base_layer.lora_A.weight` is an A.
    let mut end = path.len();
    loop {
        let start = path[..end].rfind('.').map_or(0, |dot| dot + 1);
        let segment = &path[start..end];
        let module = path[..start].strip_suffix('.').unwrap_or("");
        let tail = path[end..].strip_prefix('.').unwrap_or("");
        if let Some((part, adapter)) = marked(segment, tail) {
            // Token rows have two marks in a row.
            return (module.strip_suffix(".token_adapter").unwrap_or(module), part, adapter);
        }
        if start == 0 {
            break;
        }
        end = start - 1;
    }
    match path.rsplit_once('.') {
        Some((module, "weight" | "bias")) => (module, Part::Whole, None),
        _ => (path, Part::Unknown, None),
    }
}

fn marked<'a>(segment: &str, tail: &'a str) -> Option<(Part, Option<&'a str>)> {
    let unknown = Some((Part::Unknown, None));
    match segment {
        "lora_A" | "lora_B" => {
            let (name, leaf) = match tail.rsplit_once('.') {
                Some((name, leaf)) => (Some(name), leaf),
                None => (None, tail),
            };
            match (segment, leaf) {
                _ if name.is_some_and(|name| name.contains('.')) => unknown,
                ("lora_A", "weight") => Some((Part::A, name)),
                ("lora_B", "weight") => Some((Part::B, name)),
                ("lora_B", "bias") => Some((Part::BiasOfB, name)),
                (_, "") => Some((Part::Foreign("AdaLoRA"), None)),
                _ => unknown,
            }
        }
        "lora_embedding_A" | "lora_embedding_B" => {
            let part = if segment.ends_with('A') { Part::EmbeddingA } else { Part::EmbeddingB };
            match tail.strip_suffix("weight").map_or(tail, |name| name.trim_end_matches('.')) {
                "" => Some((part, None)),
                name if !name.contains('.') => Some((part, Some(name))),
                _ => unknown,
            }
        }
        "lora_magnitude_vector" | "lora_magnitude" | "magnitude" => {
            match tail.strip_suffix("weight").map_or(tail, |name| name.trim_end_matches('.')) {
                "" => Some((Part::Magnitude, None)),
                name if !name.contains('.') => Some((Part::Magnitude, Some(name))),
                _ => unknown,
            }
        }
        "dora_scale" => Some((Part::Foreign("LyCORIS' DoRA"), None)),
        "trainable_tokens_delta" if tail.is_empty() => Some((Part::TokenRows, None)),
        "trainable_tokens_delta" if !tail.contains('.') => Some((Part::TokenRows, Some(tail))),
        "token_adapter" | "trainable_tokens_delta" | "trainable_tokens_index" => Some((Part::Tokens, None)),
        "base_layer" => match tail {
            "weight" => Some((Part::BaseWeight, None)),
            "bias" => Some((Part::BaseBias, None)),
            _ => unknown,
        },
        "modules_to_save" => match tail.split_once('.') {
            Some((name, "weight" | "bias")) => Some((Part::Whole, Some(name))),
            None if matches!(tail, "weight" | "bias") => Some((Part::Whole, None)),
            _ => unknown,
        },
        "alpha" if tail.is_empty() => Some((Part::Alpha, None)),
        "original_module" => Some((Part::Original, None)),
        "lora_E" | "ranknum" => Some((Part::Foreign("AdaLoRA"), None)),
        "lora_diag" => Some((Part::Foreign("KaSA"), None)),
        "lora_down" | "lora_up" => Some((Part::Foreign("kohya or diffusers (lora_down, lora_up)"), None)),
        "ia3_l" => Some((Part::Foreign("IA3"), None)),
        "prompt_embeddings" | "prompt_encoder" => Some((Part::Foreign("prompt tuning"), None)),
        s if s.starts_with("hada_w") || s.starts_with("hada_t") => Some((Part::Foreign("LoHa"), None)),
        s if s.starts_with("lokr_") => Some((Part::Foreign("LoKr"), None)),
        s if s.starts_with("vera_") => Some((Part::Foreign("VeRA"), None)),
        s if s.starts_with("oft_") || s.starts_with("boft_") => Some((Part::Foreign("OFT"), None)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peft_keys_fall_into_module_and_part() {
        let q = "model.layers.0.self_attn.q_proj";
        for (tail, part, adapter) in [
            ("lora_A.weight", Part::A, None),
            ("lora_B.weight", Part::B, None),
            ("lora_A.default.weight", Part::A, Some("default")),
            ("lora_B.bias", Part::BiasOfB, None),
            ("lora_B.ranking.bias", Part::BiasOfB, Some("ranking")),
            ("alpha", Part::Alpha, None),
            ("lora_magnitude_vector", Part::Magnitude, None),
            ("lora_magnitude_vector.weight", Part::Magnitude, None),
            ("lora_magnitude_vector.default.weight", Part::Magnitude, Some("default")),
            ("lora_magnitude_vector.default", Part::Magnitude, Some("default")),
            ("magnitude", Part::Magnitude, None),
            ("dora_scale", Part::Foreign("LyCORIS' DoRA"), None),
            ("lora_embedding_A", Part::EmbeddingA, None),
            ("lora_embedding_B.default", Part::EmbeddingB, Some("default")),
            ("token_adapter.trainable_tokens_delta", Part::TokenRows, None),
            ("token_adapter.trainable_tokens_delta.default", Part::TokenRows, Some("default")),
            ("token_adapter.trainable_tokens_index", Part::Tokens, None),
            ("base_layer.weight", Part::BaseWeight, None),
            ("base_layer.bias", Part::BaseBias, None),
            ("modules_to_save.default.weight", Part::Whole, Some("default")),
            ("weight", Part::Whole, None),
            ("lora_A", Part::Foreign("AdaLoRA"), None),
            ("lora_A.a.b.weight", Part::Unknown, None),
        ] {
            let key = format!("base_model.model.{q}.{tail}");
            assert_eq!(Key::parse(&key), Key { module: q, part, adapter, prefixed: true }, "{key}");
        }
    }

    #[test]
    fn a_key_without_prefix_or_dots_is_taken_apart_too() {
        assert_eq!(Key::parse("a.lora_A.weight"), Key { module: "a", part: Part::A, adapter: None, prefixed: false });
        assert_eq!(Key::parse("lora_A.weight").module, "");
        assert_eq!(Key::parse("").part, Part::Unknown);
        assert_eq!(Key::parse("..").part, Part::Unknown);
        assert_eq!(Key::parse("x.experts.base_layer.lora_B.weight").module, "x.experts.base_layer");
    }
}
