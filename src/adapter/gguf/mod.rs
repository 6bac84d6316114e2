//! LoRA adapters as llama.cpp keeps them: a GGUF file, read as if PEFT had saved it.
//!
//! The file says less than PEFT's config: one alpha, so that every scale is alpha / rank, and no rsLoRA. Its names are
//! llama.cpp's, and for some architectures the rows of q and k stand in another order; the base says what they were.

mod file;
mod names;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use mmap_io::MemoryMappedFile;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};

use self::file::{Gguf, Meta};
use self::names::{Architecture, Place};
use super::base::BaseModel;
use super::config::PeftAdapterConfig;
use super::file as files;
use super::header::TensorInfo;
use super::json::excerpt;
use super::keys::{Key, PREFIX};
use super::reject::{Code, Loaded, Reject};
use super::source::{Source, bytes_of};
use super::weights::Notice;
use crate::error::{Error, Result};

/// The GGUF file that `path` names: itself, or the only one in a directory that has no other weights.
pub(super) fn find(path: &Path) -> Loaded<Option<PathBuf>> {
    let meta = std::fs::metadata(path).map_err(|e| files::unreadable(path, &e))?;
    let gguf = |path: &Path| path.extension().is_some_and(|extension| extension == "gguf");
    if !meta.is_dir() {
        return Ok((gguf(path) || files::starts_with(path, b"GGUF")).then(|| path.to_owned()));
    }
    let entries = std::fs::read_dir(path).map_err(|e| files::unreadable(path, &e))?;
    let names: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    // Whatever holds PEFT's own tensors says more.
    let other = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        (name.starts_with("adapter_model") || name == "pytorch_model.bin") && !gguf(path)
    };
    if names.iter().any(other) {
        return Ok(None);
    }
    let mut found: Vec<_> = names.into_iter().filter(|path| gguf(path)).collect();
    found.sort();
    match &found[..] {
        [] => Ok(None),
        [only] => Ok(Some(only.clone())),
        [first, second, ..] => {
            let message = format!(
                "{}: holds {} GGUF files, expected one; name {} or {}",
                path.display(),
                found.len(),
                first.display(),
                second.display()
            );
            Err(Reject::new(Code::SeveralAdapters, message))
        }
    }
}

/// Rank and scale of a module, as the file gives them.
pub(super) type Rated = HashMap<Box<str>, (usize, f64)>;

/// A file as if PEFT had saved it.
pub(super) fn read(
    path: &Path,
    base: Option<&BaseModel>,
    notices: &mut Vec<Notice>,
) -> Loaded<(PeftAdapterConfig, Source)> {
    let name = path.display().to_string();
    let map = files::map(path)?;
    let len = map.len();
    let bytes = map.as_slice_bytes(0, len).map_err(|e| files::unreadable(path, &e))?;
    let Gguf { meta, tensors } = Gguf::parse(path, bytes)?;
    let alpha = check_meta(&name, &meta)?;
    let Some(base) = base else {
        let message =
            format!("{name}: a GGUF file has llama.cpp's names of modules; give the base whose paths they stand for");
        return Err(Reject::new(Code::WeightsGguf, message));
    };
    let architecture = Architecture::of(&name, meta.architecture.unwrap_or_default(), base)?;
    let mut source = Source { name: name.clone(), ..Source::default() };
    let mut permuted = 0;
    for mut tensor in tensors {
        let place = architecture.place(&name, &tensor.name)?;
        let Place { key, rewrite } = place;
        if let Some(rewrite) = rewrite {
            let found = bytes_of(&map, &tensor)?;
            let (shape, bytes) = rewrite.apply(&name, &tensor, found)?;
            permuted += usize::from(matches!(rewrite, names::Rewrite::Heads(_)));
            tensor.shape = shape;
            source.rewritten.insert(key.clone().into(), bytes);
        }
        let written = std::mem::replace(&mut tensor.name, key.into());
        source.written.insert(tensor.name.clone(), written);
        source.tensors.push(tensor);
    }
    source.rated = Some(rate(&source.tensors, alpha));
    let config = config(&source, &meta, alpha);
    let scale = match alpha {
        Some(alpha) => format!("alpha / rank, alpha being {alpha}"),
        None => "1, as llama.cpp takes it where a file has no alpha".to_owned(),
    };
    let rows = match permuted {
        0 => String::new(),
        n => format!("; the rows of q and k of {n} linears were put back into the base's order"),
    };
    let message = format!(
        "{name}: a GGUF file keeps one alpha and neither rsLoRA nor alpha_pattern: every scale is {scale}, whatever the \
         adapter was that it was made from{rows}"
    );
    notices.push(Notice { code: "N_GGUF", message });
    if path.parent().is_some_and(|dir| dir.join("adapter_config.json").exists()) {
        let message = format!("{name}: the adapter_config.json beside it is not read");
        notices.push(Notice { code: "N_GGUF_CONFIG", message });
    }
    source.keep(path, map);
    Ok((config, source))
}

/// What the metadata must say; the alpha, none where llama.cpp would scale by 1.
fn check_meta(name: &str, meta: &Meta<'_>) -> Loaded<Option<f64>> {
    let expect = |key: &str, found: Option<&str>, expected: &str| match found {
        Some(found) if found == expected => Ok(()),
        found => {
            let found = found.map_or("absent".to_owned(), |found| format!("{:?}", excerpt(found)));
            let message = format!("{name}: {key} is {found}, expected {expected:?}: not a LoRA adapter of llama.cpp's");
            Err(Reject::new(Code::WeightsGguf, message))
        }
    };
    expect("general.type", meta.kind, "adapter")?;
    expect("adapter.type", meta.adapter, "lora")?;
    if meta.invocation {
        let message = format!("{name}: adapter.alora.invocation_tokens is set: {}", Code::Alora.describe());
        return Err(Reject::new(Code::Alora, message));
    }
    match meta.alpha {
        Some(alpha) if !alpha.is_finite() => {
            let message = format!("{name}: adapter.lora.alpha is {alpha}, expected a finite number");
            Err(Reject::new(Code::ConfigAlpha, message))
        }
        alpha => Ok(alpha.filter(|alpha| *alpha != 0.0)),
    }
}

/// Rank and scale by module: lora_B's columns, as llama.cpp has it.
fn rate(tensors: &[TensorInfo], alpha: Option<f64>) -> Rated {
    let ranked = tensors.iter().filter_map(|tensor| {
        let rank = match *tensor.shape {
            [_, rank] if tensor.name.contains(".lora_B") || tensor.name.contains(".lora_embedding_B") => rank,
            _ => return None,
        };
        Some((Key::parse(&tensor.name).module.into(), (rank, alpha.map_or(1.0, |alpha| alpha / rank as f64))))
    });
    ranked.collect()
}

/// The config that PEFT would have saved with these tensors.
fn config(source: &Source, meta: &Meta<'_>, alpha: Option<f64>) -> PeftAdapterConfig {
    let rated = source.rated.iter().flatten();
    let r = rated.clone().map(|(_, (rank, _))| *rank).max().unwrap_or(1).max(1);
    let mut config = PeftAdapterConfig {
        r,
        lora_alpha: alpha.unwrap_or(r as f64),
        base_model_name_or_path: meta.base_name.map(str::to_owned),
        ..PeftAdapterConfig::default()
    };
    let mut others: Vec<_> = rated.filter(|(_, (rank, _))| *rank != r).collect();
    others.sort_unstable_by(|a, b| a.0.cmp(b.0));
    config.name_exceptions(others.into_iter().map(|(path, (rank, _))| (&**path, *rank, alpha.unwrap_or(*rank as f64))));
    config
}

/// A LoRA adapter in a GGUF file, with the names, rows and config that PEFT would have saved: what a conversion writes.
#[derive(Debug)]
pub struct GgufAdapter {
    config: PeftAdapterConfig,
    source: Source,
    path: PathBuf,
}

impl GgufAdapter {
    /// The GGUF adapter at `path`, if there is one: a file, or a directory that has one and no other weights.
    ///
    /// # Errors
    /// [`Error::Reject`] for a file that is none, or that [`load`](super::load) would refuse for its names; `base` says
    /// what the names stand for.
    pub fn open(path: impl AsRef<Path>, base: Option<&BaseModel>) -> Result<Option<Self>> {
        let Some(path) = find(path.as_ref())? else { return Ok(None) };
        let (config, source) = read(&path, base, &mut Vec::new())?;
        Ok(Some(Self { config, source, path }))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.source.tensors.len()
    }

    /// Whether there is no tensor.
    pub fn is_empty(&self) -> bool {
        self.source.tensors.is_empty()
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.source.tensors.iter().map(|tensor| tensor.end - tensor.start).sum()
    }

    /// Writes `adapter_config.json` and `adapter_model.safetensors` into `dir`.
    ///
    /// # Errors
    /// [`Error::Io`], naming the file.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let io = |path: &Path, error: &dyn std::fmt::Display| Error::Io {
            path: path.display().to_string(),
            source: std::io::Error::other(error.to_string()),
        };
        let mut views = Vec::with_capacity(self.len());
        for tensor in &self.source.tensors {
            let view = TensorView::new(tensor.dtype, tensor.shape.to_vec(), self.source.bytes(tensor)?)
                .map_err(|error| io(&self.path, &error))?;
            views.push((&*tensor.name, view));
        }
        let weights = dir.join("adapter_model.safetensors");
        safetensors::serialize_to_file(views, None, &weights).map_err(|error| io(&weights, &error))?;
        let config = dir.join("adapter_config.json");
        let text = serde_json::to_vec_pretty(&self.config()).map_err(|error| io(&config, &error))?;
        std::fs::write(&config, text).map_err(|source| Error::Io { path: config.display().to_string(), source })
    }

    /// The config in the words of PEFT's own file.
    fn config(&self) -> Value {
        let mut modules: Vec<_> = self.source.tensors.iter().map(|tensor| Key::parse(&tensor.name).module).collect();
        modules.sort_unstable();
        modules.dedup();
        let number = |value: f64| match value.fract() {
            0.0 if value.abs() < 9e15 => json!(value as i64),
            _ => json!(value),
        };
        let alphas: Map<_, _> = self.config.alpha_pattern.iter().map(|(k, v)| (k.clone(), number(*v))).collect();
        json!({
            "peft_type": "LORA",
            "base_model_name_or_path": self.config.base_model_name_or_path,
            "task_type": "CAUSAL_LM",
            "inference_mode": true,
            "r": self.config.r,
            "lora_alpha": number(self.config.lora_alpha),
            "rank_pattern": self.config.rank_pattern,
            "alpha_pattern": alphas,
            "target_modules": modules,
            "bias": "none",
            "fan_in_fan_out": false,
            "init_lora_weights": true,
            "lora_dropout": 0.0,
            "use_rslora": false,
        })
    }
}

/// PEFT's key of a part of a module.
fn key(module: &str, part: &str) -> String {
    format!("{PREFIX}{module}.{part}")
}

/// Keeps a map for as long as its tensors.
impl Source {
    fn keep(&mut self, path: &Path, map: MemoryMappedFile) {
        if let Some(tensor) = self.tensors.first() {
            self.maps.insert(tensor.file.clone(), map);
        } else {
            self.maps.insert(path.into(), map);
        }
    }
}
