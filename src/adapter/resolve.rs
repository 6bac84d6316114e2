//! From the module paths of tensor keys to the base's own.
//!
//! Wrappers rename modules: a vision-language model puts `language_model.` before a text model's layers, an adapter trained on
//! an adapter has its prefix twice, a converted one has none. Guessing wrong means an adapter that loads and does
//! nothing, so a path is only mapped when every one of the file's lands on exactly one linear of the base.

use std::borrow::Cow;
use std::collections::HashMap;

use super::base::BaseModel;
use super::base_modules::Other;
use super::fused;
use super::json::excerpt;
use super::keys::{Key, PREFIX};
use super::reject::{Code, Loaded, Reject};
use super::weights::Notice;

/// Leading parts of a path that only say how a model is wrapped.
const WRAPPERS: &[&str] = &[
    "base_model",
    "model",
    "language_model",
    "text_model",
    "transformer",
    "backbone",
    "gpt_neox",
    "llm",
    "thinker",
    "bert",
    "roberta",
    "distilbert",
    "module",
    "_orig_mod",
];

/// Parts that wrappers of single modules put into the middle of a path (FSDP, activation checkpointing, torch.compile);
/// no model names a module so.
const INFIXES: &[&str] = &["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module"];

/// A key that needs a place in the base.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    /// The key as the file has it.
    pub name: &'a str,
    /// The key taken apart.
    pub key: Key<'a>,
    /// What it must be in the base.
    pub home: Home,
}

/// What a module that a key names must be in the base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    /// A linear.
    Linear,
    /// An embedding.
    Embedding,
    /// An embedding, or a head.
    Table,
}

impl Home {
    /// Whether the base has it at this very path; a linear that is fused there aside.
    fn is_at(self, base: &BaseModel, path: &str) -> bool {
        let (linear, embedding) = (base.linear(path).is_some(), base.embedding(path).is_some());
        match self {
            Home::Linear => linear,
            Home::Embedding => embedding,
            Home::Table => linear || embedding,
        }
    }
}

/// The base's path for each module path of the keys.
pub(super) fn resolve<'a>(
    file: &str,
    wanted: &[Wanted<'a>],
    base: Option<&BaseModel>,
    notices: &mut Vec<Notice>,
) -> Loaded<HashMap<&'a str, String>> {
    let odd = wanted.iter().find(|w| {
        !w.key.prefixed || w.key.module.starts_with("base_model.") || matches!(bare(w.key.module), Cow::Owned(_))
    });
    let Some(base) = base else {
        if let Some(odd) = odd {
            let message = format!(
                "{file}: tensor {:?} does not start with {PREFIX:?} and a path of the base; give the base so that \
                 its place can be found",
                excerpt(odd.name)
            );
            return Err(Reject::new(Code::Prefix, message));
        }
        return Ok(wanted.iter().map(|w| (w.key.module, w.key.module.to_owned())).collect());
    };
    let mut as_written = true;
    for w in wanted {
        as_written &= w.home.is_at(base, w.key.module)
            || (w.home == Home::Linear && named(file, w, fused::place(base, w.key.module))?.is_some());
    }
    let mut paths: HashMap<&str, String> = HashMap::new();
    if as_written {
        paths.extend(wanted.iter().map(|w| (w.key.module, w.key.module.to_owned())));
    } else {
        let mut by_tail: HashMap<&str, Vec<&str>> = HashMap::new();
        for linear in base.linears() {
            by_tail.entry(unwrapped(&linear.site.path)).or_default().push(&linear.site.path);
        }
        let aliases = fused::aliases(base);
        let mut fused_by_tail: HashMap<&str, Vec<&str>> = HashMap::new();
        for alias in &aliases {
            fused_by_tail.entry(unwrapped(alias)).or_default().push(alias);
        }
        let mut embeddings_by_tail: HashMap<&str, Vec<&str>> = HashMap::new();
        for embedding in base.embeddings() {
            embeddings_by_tail.entry(unwrapped(&embedding.site.path)).or_default().push(&embedding.site.path);
        }
        let mut taken: HashMap<&str, &str> = HashMap::new();
        for w in wanted {
            let bare = bare(w.key.module);
            let tail = unwrapped(&bare);
            let linears = || by_tail.get(tail);
            let found = match w.home {
                Home::Linear => linears().or_else(|| fused_by_tail.get(tail)),
                Home::Embedding => embeddings_by_tail.get(tail),
                Home::Table => embeddings_by_tail.get(tail).or_else(linears),
            };
            let found = found.map_or(&[][..], Vec::as_slice);
            let path = match found {
                [path] if w.home.is_at(base, path) || named(file, w, fused::place(base, path))?.is_some() => *path,
                [] | [_] => return Err(missing(file, w, base)),
                [first, second, ..] => {
                    let message = format!(
                        "{file}: tensor {:?} could be for {first} or {second} of {}, expected one place",
                        excerpt(w.name),
                        base.source()
                    );
                    return Err(Reject::new(Code::Prefix, message));
                }
            };
            if let Some(other) = taken.insert(path, w.key.module)
                && other != w.key.module
            {
                let message = format!(
                    "{file}: modules {:?} and {:?} both land on {path} of {}, expected one",
                    excerpt(other),
                    excerpt(w.key.module),
                    base.source()
                );
                return Err(Reject::new(Code::Prefix, message));
            }
            paths.insert(w.key.module, path.to_owned());
        }
    }
    let changed = wanted.iter().find(|w| !w.key.prefixed || paths[w.key.module] != w.key.module);
    if let Some(w) = changed {
        let message = format!(
            "{file}: keys are not PEFT's for this base: {:?} was taken for {}; all {} modules of the file have exactly \
             one place in {}",
            excerpt(w.name),
            paths[w.key.module],
            paths.len(),
            base.source()
        );
        notices.push(Notice { code: "N_PREFIX", message });
    }
    Ok(paths)
}

/// A path without [`INFIXES`].
fn bare(path: &str) -> Cow<'_, str> {
    match path.split('.').any(|segment| INFIXES.contains(&segment)) {
        false => Cow::Borrowed(path),
        true => path.split('.').filter(|segment| !INFIXES.contains(segment)).collect::<Vec<_>>().join(".").into(),
    }
}

/// A path without the parts that say how the model is wrapped.
pub(super) fn unwrapped(path: &str) -> &str {
    let mut rest = path;
    while let Some((first, after)) = rest.split_once('.') {
        if !WRAPPERS.contains(&first) {
            break;
        }
        rest = after;
    }
    rest
}

/// A refusal of a fused or split linear, with the tensor that asked for it.
fn named<T>(file: &str, wanted: &Wanted<'_>, place: Loaded<T>) -> Loaded<T> {
    place.map_err(|mut reject| {
        reject.message = format!("{file}: tensor {:?}: {}", excerpt(wanted.name), reject.message);
        reject
    })
}

/// Says why a module has no place in the base.
fn missing(file: &str, wanted: &Wanted<'_>, base: &BaseModel) -> Box<Reject> {
    let module = wanted.key.module;
    let at = format!("{file}: tensor {:?}", excerpt(wanted.name));
    if wanted.home != Home::Linear {
        let message = match base.linear(module) {
            Some(_) => format!("{at} is for {module}, which is a linear in {}, no embedding", base.source()),
            None => format!("{at}: no embedding {module} in {}", base.source()),
        };
        return Reject::new(Code::NotInBase, message);
    }
    match base.other(module) {
        Some(Other::Embedding(..)) => Reject::new(
            Code::EmbeddingLora,
            format!("{at} is for {module}, which is an embedding in {}", base.source()),
        ),
        Some(Other::Conv) => {
            Reject::new(Code::ConvLora, format!("{at} is for {module}, which is a convolution in {}", base.source()))
        }
        Some(Other::Packed) => Reject::new(
            Code::BaseFamily,
            format!("{at} is for {module}, whose widths the packed weights of {} don't show", base.source()),
        ),
        Some(Other::Vector) => Reject::new(
            Code::NotInBase,
            format!("{at} is for {module}, whose weight in {} has one dimension, expected a linear", base.source()),
        ),
        None => {
            let layers = base.linears().iter().map(|l| l.site.layer + 1).max().unwrap_or(0);
            Reject::new(
                Code::NotInBase,
                format!(
                    "{at}: no linear {module} in {}, which has {} linears in {layers} layers",
                    base.source(),
                    base.linears().len()
                ),
            )
        }
    }
}
