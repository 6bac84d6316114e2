//! An adapter's directory to an [`Adapter`]: every tensor is applied, handed to the host, or named in an error.

use std::path::{Path, PathBuf};

use super::base::BaseModel;
use super::config::PeftAdapterConfig;
use super::file;
use super::gguf;
use super::reading::Reading;
use super::reject::{Code, Loaded, Reject};
use super::source::{Source, WEIGHTS};
use super::weights::{Adapter, Notice};
use crate::error::Result;

/// Loads the adapter in `dir` into host memory, checked against `base` where one is given. A LoRA of llama.cpp's, a GGUF
/// file or a directory with one, needs the base.
///
/// Nothing is kept of an adapter that is refused, and no device is touched. Memory stays within a few times the size
/// of the files.
///
/// # Errors
/// [`Error::Reject`](crate::Error::Reject), with the [`Code`] of the fault and a message that names file, tensor or
/// field, what was found and what was expected.
pub fn load(dir: impl AsRef<Path>, base: Option<&BaseModel>) -> Result<Adapter> {
    Ok(Loader::default().load(dir.as_ref(), base)?)
}

/// The config and the pickled weights (`adapter_model.bin`) of an adapter that has no safetensors: what a conversion
/// starts from. Read the weights with [`StateDict`](super::StateDict).
///
/// # Errors
/// [`Error::Reject`](crate::Error::Reject) where there is no adapter; [`Error::Input`](crate::Error::Input) where there
/// is nothing to convert.
pub fn pickled(dir: impl AsRef<Path>) -> Result<(PathBuf, PathBuf)> {
    let dir = Loader::default().locate(dir.as_ref())?;
    file::open(&dir.join(CONFIG))?;
    if dir.join(WEIGHTS).exists() {
        return Err(crate::Error::Input(format!("{}: has {WEIGHTS}, so nothing is to be converted", dir.display())));
    }
    match pickle_of(&dir) {
        Some(path) if path.extension().is_some_and(|extension| extension == "json") => {
            Err(crate::Error::Input(format!("{}: pickles in shards can't be converted", path.display())))
        }
        Some(path) => Ok((dir.join(CONFIG), path)),
        None => Err(weights_missing(&dir).into()),
    }
}

/// What is known so far: a refused adapter's audit shows it.
#[derive(Debug, Default)]
pub(super) struct Loader {
    pub notices: Vec<Notice>,
    pub config: Option<PeftAdapterConfig>,
    /// Tensors in the file.
    pub total: usize,
}

impl Loader {
    pub fn load(&mut self, dir: &Path, base: Option<&BaseModel>) -> Loaded<Adapter> {
        let (config, source) = match gguf::find(dir)? {
            Some(path) => {
                let (config, source) = gguf::read(&path, base, &mut self.notices)?;
                self.config = Some(config.clone());
                (config, source)
            }
            None => {
                let dir = self.locate(dir)?;
                let config = PeftAdapterConfig::read(&dir.join(CONFIG), &mut self.notices)?;
                self.config = Some(config.clone());
                (config, Source::open(&dir)?.ok_or_else(|| weights_missing(&dir))?)
            }
        };
        self.total = source.tensors.len();
        if source.tensors.is_empty() {
            let message = format!("{}: holds no tensor; the adapter would answer like the base", source.name);
            return Err(Reject::new(Code::NoTensors, message));
        }
        let mut adapter = Reading { source: &source, config: &config, base, notices: &mut self.notices }.adapter()?;
        adapter.notices = std::mem::take(&mut self.notices);
        Ok(adapter)
    }

    /// The directory that holds the files: `dir`, or its only sub-folder that does (PEFT saves adapters that have a
    /// name of their own in a folder of that name).
    fn locate(&mut self, dir: &Path) -> Loaded<PathBuf> {
        let meta = std::fs::metadata(dir).map_err(|e| file::unreadable(dir, &e))?;
        if !meta.is_dir() {
            let message = format!("{}: found a file, expected the adapter's directory or a GGUF file", dir.display());
            return Err(Reject::new(Code::NotADirectory, message));
        }
        if dir.join(CONFIG).exists() {
            return Ok(dir.to_owned());
        }
        let entries = std::fs::read_dir(dir).map_err(|e| file::unreadable(dir, &e))?;
        let mut inner: Vec<_> =
            entries.filter_map(|e| Some(e.ok()?.path())).filter(|path| path.join(CONFIG).is_file()).collect();
        inner.sort();
        match &inner[..] {
            [] => {
                let message = format!("{}: found no {CONFIG}", dir.display());
                Err(Reject::new(Code::ConfigMissing, message))
            }
            [only] => {
                let message = format!("{}: the adapter is in its sub-folder {}", dir.display(), only.display());
                self.notices.push(Notice { code: "N_SUBFOLDER", message });
                Ok(only.clone())
            }
            several => {
                let found: Vec<_> = several.iter().take(8).map(|p| p.display().to_string()).collect();
                let message = format!(
                    "{}: holds {} adapters, expected one; name one of {}",
                    dir.display(),
                    several.len(),
                    found.join(", ")
                );
                Err(Reject::new(Code::SeveralAdapters, message))
            }
        }
    }
}

pub(super) const CONFIG: &str = "adapter_config.json";

/// The pickle that trainers save where they don't save safetensors.
fn pickle_of(dir: &Path) -> Option<PathBuf> {
    let names = [
        "adapter_model.bin",
        "adapter_model.pt",
        "adapter_model.pth",
        "pytorch_model.bin",
        "adapter_model.bin.index.json",
    ];
    names.iter().map(|name| dir.join(name)).find(|path| path.exists())
}

fn weights_missing(dir: &Path) -> Box<Reject> {
    if let Some(path) = pickle_of(dir) {
        let message = format!(
            "{}: the weights are a pickle, which can run code when it is read; convert it with `lorapool convert {} \
             OUT_DIR`, which runs nothing of it",
            path.display(),
            dir.display()
        );
        return Reject::new(Code::WeightsPickle, message);
    }
    let shard = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = entry.ok()?.file_name().into_string().ok()?;
        (name.starts_with("adapter_model-") && name.ends_with(".safetensors")).then_some(name)
    };
    if let Some(shard) = std::fs::read_dir(dir).ok().and_then(|entries| entries.filter_map(shard).min()) {
        let message =
            format!("{}: found the shard {shard}, but no {WEIGHTS}.index.json that names the shards", dir.display());
        return Reject::new(Code::ShardIndex, message);
    }
    Reject::new(Code::WeightsMissing, format!("{}: found no {WEIGHTS}", dir.display()))
}
