//! The base model as the loader needs it: which linears it has, under which paths, how wide. Shapes come from
//! headers; no weight is read but where an adapter holds a copy of one, or is relative to it (DoRA).

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::Dtype;

use super::base_modules::{
    Module, Other, Weights, is_conv1d, is_head, is_input, modules, stored_in_out, tie, tied_head,
};
use super::base_weights::BaseWeights;
use super::family::{self, Attention};
use super::file;
use super::header::{Header, TensorInfo};
use super::json::{Json, Limits, excerpt};
use super::reject::{Code, Loaded, Reject};
use super::routed::Routed;
use super::site::{SiteId, natural};
use super::weights::Adapter;
use crate::dtype::DType;
use crate::error::Result;

/// config.json.
const CONFIG_LIMITS: Limits = Limits { bytes: 8 << 20, values: 1 << 18 };
/// model.safetensors.index.json names every tensor of a model.
const INDEX_LIMITS: Limits = Limits { bytes: 256 << 20, values: 1 << 23 };

/// A linear of the base: a site that an adapter may adapt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Linear {
    /// Where it is.
    pub site: SiteId,
    /// Width of its input.
    pub in_features: usize,
    /// Width of its output.
    pub out_features: usize,
}

/// An embedding of the base: a table whose rows are picked by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Embedding {
    /// Where it is.
    pub site: SiteId,
    /// Number of rows.
    pub vocabulary: usize,
    /// Elements of a row.
    pub width: usize,
}

/// A base model's modules.
#[derive(Clone, Debug, Default)]
pub struct BaseModel {
    /// Where it was read from, for messages.
    source: String,
    linears: Vec<Linear>,
    by_path: HashMap<Arc<str>, usize>,
    embeddings: Vec<Embedding>,
    others: HashMap<String, Other>,
    /// Parameters as the files name them.
    weights: Weights,
    /// The head that is not stored, and the embedding whose weight it shares.
    tied: Option<(String, String)>,
    /// What config.json says of its attention.
    attention: Option<Attention>,
    /// Whether its `Conv1D` linears are stored `[in][out]`.
    conv1d: bool,
    /// Weights of the host's.
    pub(super) values: Option<Arc<dyn BaseWeights>>,
    pub(super) routed: Routed,
}

impl BaseModel {
    /// Reads a base from a directory with `config.json`, safetensors (one file, or shards and their index), or both.
    /// Where both say something about a linear, the safetensors count.
    ///
    /// # Errors
    /// [`Code::NotFound`], [`Code::BaseFile`] and the codes of damaged files; [`Code::BaseFamily`] where there are no
    /// weights and the shapes of this `model_type` can't be derived from its config.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Ok(Self::read(dir.as_ref())?)
    }

    /// The base that these adapters were made for, as far as they show it: the union of their linears.
    ///
    /// # Errors
    /// [`Code::BaseConflict`] where two of them give one site different widths.
    pub fn infer<'a>(adapters: impl IntoIterator<Item = &'a Adapter>) -> Result<Self> {
        let adapters: Vec<&Adapter> = adapters.into_iter().collect();
        let mut shapes: HashMap<&str, (usize, usize)> = HashMap::new();
        for pair in adapters.iter().flat_map(|adapter| &adapter.pairs).filter(|pair| !pair.embedding) {
            let shape = (pair.in_features(), pair.out_features());
            let known = *shapes.entry(&pair.site.path).or_insert(shape);
            if known != shape {
                let message = format!(
                    "{}: one adapter has {} inputs and {} outputs, another {} and {}; they are for different bases",
                    pair.site.path, known.0, known.1, shape.0, shape.1
                );
                return Err(Reject::new(Code::BaseConflict, message).into());
            }
        }
        let shapes = shapes.into_iter().map(|(path, (inputs, outputs))| (path.to_owned(), inputs, outputs)).collect();
        let routed = Routed::infer(adapters.iter().flat_map(|adapter| &adapter.experts))?;
        Ok(Self { routed, ..Self::of_linears("the adapters themselves".to_owned(), shapes) })
    }

    fn of_linears(source: String, mut shapes: Vec<(String, usize, usize)>) -> Self {
        shapes.sort_by(|a, b| natural(&a.0, &b.0));
        let sites = SiteId::of_paths(shapes.iter().map(|(path, ..)| path.as_str()));
        let linears: Vec<_> = sites
            .into_iter()
            .zip(&shapes)
            .map(|(site, (_, in_features, out_features))| Linear {
                site,
                in_features: *in_features,
                out_features: *out_features,
            })
            .collect();
        let by_path = linears.iter().enumerate().map(|(index, l)| (l.site.path.clone(), index)).collect();
        Self { source, linears, by_path, ..Self::default() }
    }

    /// Its linears, in natural order of their paths.
    pub fn linears(&self) -> &[Linear] {
        &self.linears
    }

    /// The linear at a module path.
    pub fn linear(&self, path: &str) -> Option<&Linear> {
        self.by_path.get(path).map(|index| &self.linears[*index])
    }

    /// Where it was read from, for messages.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Its embeddings, in natural order of their paths.
    pub fn embeddings(&self) -> &[Embedding] {
        &self.embeddings
    }

    /// The embedding at a module path.
    pub fn embedding(&self, path: &str) -> Option<&Embedding> {
        self.embeddings.iter().find(|embedding| &*embedding.site.path == path)
    }

    /// The embedding of the tokens.
    pub fn input_embedding(&self) -> Option<&Embedding> {
        let input = |e: &&Embedding| is_input(&e.site.path);
        self.embeddings.iter().filter(input).min_by_key(|e| e.site.path.len())
    }

    /// The linear that turns the last hidden state into logits, one for each row of the input embedding.
    pub fn head(&self) -> Option<&Linear> {
        let input = self.input_embedding()?;
        let head = |l: &&Linear| is_head(&l.site.path) && l.out_features == input.vocabulary;
        self.linears.iter().filter(head).min_by_key(|l| l.site.path.len())
    }

    /// The head that shares the weight of the embedding at this path.
    pub fn tied_head(&self, embedding: &str) -> Option<&Linear> {
        let (head, of) = self.tied.as_ref()?;
        (of == embedding).then(|| self.linear(head))?
    }

    /// Type of the weight of the module at a path, where its files are there and it is one of the three.
    pub fn dtype(&self, path: &str) -> Option<DType> {
        match self.weight(&format!("{path}.weight"))?.dtype {
            Dtype::F32 => Some(DType::F32),
            Dtype::F16 => Some(DType::F16),
            Dtype::BF16 => Some(DType::Bf16),
            _ => None,
        }
    }

    pub(super) fn other(&self, path: &str) -> Option<Other> {
        self.others.get(path).copied()
    }

    pub(super) fn attention(&self) -> Option<&Attention> {
        self.attention.as_ref()
    }

    /// A parameter's declaration; of a tied head, the embedding's.
    pub(super) fn weight(&self, name: &str) -> Option<&TensorInfo> {
        self.weights.get(name).or_else(|| {
            let (head, embedding) = self.tied.as_ref()?;
            (name.strip_suffix(".weight")? == head).then(|| self.weights.get(&format!("{embedding}.weight")))?
        })
    }

    /// Whether the linear at a path is stored `[in][out]`.
    pub(super) fn is_transposed(&self, path: &str) -> bool {
        self.conv1d && is_conv1d(path)
    }

    fn read(dir: &Path) -> Loaded<Self> {
        let source = dir.display().to_string();
        let meta = std::fs::metadata(dir).map_err(|e| file::unreadable(dir, &e))?;
        if !meta.is_dir() {
            let message = format!("{source}: found a file, expected the directory of a base model");
            return Err(Reject::new(Code::NotADirectory, message));
        }
        let config_path = dir.join("config.json");
        let config = match config_path.exists() {
            true => {
                let (text, _) = file::read_text(&config_path, CONFIG_LIMITS)?;
                Some(Json::parse(&config_path.display().to_string(), &text, CONFIG_LIMITS)?)
            }
            false => None,
        };
        let mut weights = Weights::new();
        for path in weight_files(dir)? {
            for tensor in Header::read(&path)?.tensors {
                if let Some(again) = weights.insert(tensor.name.to_string(), tensor) {
                    let message = format!("{source}: tensor {:?} is in two files", excerpt(&again.name));
                    return Err(Reject::new(Code::BaseFile, message));
                }
            }
        }
        let routed = Routed::new(config.as_ref(), weights.iter().map(|(name, tensor)| (name.as_str(), &*tensor.shape)));
        let derived = config.as_ref().map(|config| family::linears(&config_path, config));
        let attention = config.as_ref().and_then(|config| family::attention(&config_path, config).ok());
        let mut shapes: HashMap<String, (usize, usize)> = HashMap::new();
        let mut others = HashMap::new();
        let mut tied = None;
        match (weights.is_empty(), derived) {
            (true, None) => {
                let message = format!("{source}: found neither config.json nor safetensors, expected a base model");
                return Err(Reject::new(Code::BaseFile, message));
            }
            (true, Some(derived)) => {
                let derived = derived?;
                let input = derived.embeddings.keys().find(|path| is_input(path));
                if let (Some(true), Some(input)) = (tie(config.as_ref()), input) {
                    tied = derived.linears.keys().find(|path| is_head(path)).map(|head| (head.clone(), input.clone()));
                }
                shapes.extend(derived.linears);
                others.extend(derived.embeddings.into_iter().map(|(path, (n, d))| (path, Other::Embedding(n, d))));
            }
            (false, derived) => {
                // Widths of packed weights are not in their shapes; those of the config stand in.
                let derived = derived.and_then(Result::ok).unwrap_or_default();
                for (path, module) in modules(config.as_ref(), &weights) {
                    if routed.is_part(path) {
                        continue;
                    }
                    match (module, derived.linears.get(path)) {
                        (Module::Linear(inputs, outputs), _) => _ = shapes.insert(path.to_owned(), (inputs, outputs)),
                        (Module::Other(Other::Packed), Some(shape)) => _ = shapes.insert(path.to_owned(), *shape),
                        (Module::Other(other), _) => _ = others.insert(path.to_owned(), other),
                    }
                }
                if let Some((path, shape, embedding)) = tied_head(config.as_ref(), &shapes, &others) {
                    shapes.insert(path.clone(), shape);
                    tied = Some((path, embedding));
                }
            }
        }
        let shapes = shapes.into_iter().map(|(path, (inputs, outputs))| (path, inputs, outputs)).collect();
        let mut embeddings: Vec<_> = others
            .iter()
            .filter_map(|(path, other)| match *other {
                Other::Embedding(vocabulary, width) => {
                    Some(Embedding { site: SiteId::from_path(path), vocabulary, width })
                }
                _ => None,
            })
            .collect();
        embeddings.sort_by(|a, b| natural(&a.site.path, &b.site.path));
        let conv1d = stored_in_out(config.as_ref(), &weights);
        let base =
            Self { others, weights, tied, attention, embeddings, conv1d, routed, ..Self::of_linears(source, shapes) };
        if base.linears.is_empty() && base.experts().is_empty() {
            let found = match dir.join("adapter_config.json").exists() {
                true => "an adapter",
                false => "no linear",
            };
            let message =
                format!("{}: found {found} in it, expected a base model's two-dimensional weights", base.source);
            return Err(Reject::new(Code::BaseFile, message));
        }
        Ok(base)
    }
}

/// The safetensors of a model: one file, or those that its index names, or all there are.
fn weight_files(dir: &Path) -> Loaded<Vec<PathBuf>> {
    let single = dir.join("model.safetensors");
    if single.exists() {
        return Ok(vec![single]);
    }
    let index = dir.join("model.safetensors.index.json");
    if index.exists() {
        let name = index.display().to_string();
        let (text, _) = file::read_text(&index, INDEX_LIMITS)?;
        let json = Json::parse(&name, &text, INDEX_LIMITS)?;
        let Some(Json::Object(map)) = json.get("weight_map") else {
            return Err(Reject::new(Code::BaseFile, format!("{name}: expected an object weight_map")));
        };
        let mut shards = Vec::new();
        for (tensor, shard) in map {
            // A file beside the index and nowhere else.
            let plain = |s: &&str| !s.contains(['/', '\\', '\0']) && s.ends_with(".safetensors");
            let Some(shard) = shard.as_str().filter(plain) else {
                let message = format!(
                    "{name}: tensor {:?} is in {shard}, expected the name of a safetensors file",
                    excerpt(tensor)
                );
                return Err(Reject::new(Code::BaseFile, message));
            };
            shards.push(dir.join(shard));
        }
        shards.sort();
        shards.dedup();
        if let Some(missing) = shards.iter().find(|path| !path.exists()) {
            let message = format!("{name}: names {}, which is not there", missing.display());
            return Err(Reject::new(Code::BaseFile, message));
        }
        return Ok(shards);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|e| file::unreadable(dir, &e))? {
        let path = entry.map_err(|e| file::unreadable(dir, &e))?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if name.ends_with(".safetensors") && !name.starts_with("adapter_") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
