//! `lorapool convert`: `adapter_model.bin`, without running what the pickle says, and llama.cpp's GGUF, to safetensors.

use std::path::{Path, PathBuf};

use clap::Args;
use lorapool::Error;
use lorapool::adapter::{Code, GgufAdapter, StateDict, Verdict, audit, pickled};
use serde::Serialize;

use super::adapters::open_base;
use super::console::{Console, bad, bytes, good};
use super::failure::{Failure, Status};

/// Rewrite adapter_model.bin or a GGUF file as safetensors, running nothing of a pickle
///
/// A pickle is read as data: only tensors by name, as torch.save writes a state dict, and nothing in it is
/// run. Anything else in it is refused by name. A LoRA of llama.cpp's gets the names, row order and config that PEFT
/// would have saved; the base says what they are. OUT_DIR appears whole or not at all; the source is left as it is.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    lorapool convert adapters/old adapters/new\n  \
    lorapool convert sql.gguf adapters/sql --base models/llama\n  \
    lorapool audit adapters/new")]
pub struct Convert {
    /// Directory with adapter_config.json and adapter_model.bin, or a GGUF file, or a directory with one
    #[arg(value_name = "ADAPTER")]
    adapter: PathBuf,

    /// Directory to make, with adapter_config.json and adapter_model.safetensors
    #[arg(value_name = "OUT_DIR")]
    out: PathBuf,

    /// Directory of the base model, with its config.json, its safetensors (only headers are read) or both; a GGUF file
    /// needs it
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
}

/// The document.
#[derive(Debug, Serialize)]
struct Document {
    adapter: String,
    source: String,
    out: String,
    /// How many were written.
    tensors: usize,
    /// Their bytes.
    bytes: u64,
    /// What `audit` says of the result, against the base where one is given.
    verdict: Verdict,
    code: Option<Code>,
    message: Option<String>,
}

impl Convert {
    /// Converts the adapter.
    pub fn run(self, console: &Console) -> Result<Status, Failure> {
        let base = open_base(self.base.as_deref())?;
        let (source, tensors, bytes) = match GgufAdapter::open(&self.adapter, base.as_ref())? {
            Some(gguf) => self.gguf(&gguf)?,
            None => self.pickle()?,
        };
        let findings = audit(&self.out, base.as_ref());
        let document = Document {
            adapter: self.adapter.display().to_string(),
            source: source.display().to_string(),
            out: self.out.display().to_string(),
            tensors,
            bytes,
            verdict: findings.verdict,
            code: findings.code,
            message: findings.message,
        };
        console.result(&document, |document| text(document, self.base.as_deref()));
        Ok(Status::Done)
    }

    /// Writes what a GGUF file says; the file, its number of tensors and their bytes.
    fn gguf(&self, gguf: &GgufAdapter) -> Result<(PathBuf, usize, u64), Failure> {
        if gguf.is_empty() {
            return Err(Error::Input(format!("{}: holds no tensor", gguf.path().display())).into());
        }
        publish(&self.out, |dir| {
            gguf.write(dir)?;
            as_readable(gguf.path(), &dir.join("adapter_model.safetensors"))
        })?;
        Ok((gguf.path().to_owned(), gguf.len(), gguf.bytes()))
    }

    /// Writes what a pickle says.
    fn pickle(&self) -> Result<(PathBuf, usize, u64), Failure> {
        let (config, weights) = pickled(&self.adapter)?;
        let state = StateDict::open(&weights)?;
        if state.is_empty() {
            return Err(Error::Input(format!("{}: holds no tensor", weights.display())).into());
        }
        publish(&self.out, |dir| {
            let copy = dir.join("adapter_config.json");
            std::fs::copy(&config, &copy).map_err(|error| Failure::io(config.display(), error))?;
            let written = dir.join("adapter_model.safetensors");
            state.write(&written)?;
            as_readable(&weights, &written)
        })?;
        Ok((weights, state.len(), state.bytes()))
    }
}

/// Makes a file as readable as what it was made from: the writer's own file is its owner's alone.
fn as_readable(from: &Path, written: &Path) -> Result<(), Failure> {
    let permissions = std::fs::metadata(from).map(|meta| meta.permissions());
    permissions
        .and_then(|permissions| std::fs::set_permissions(written, permissions))
        .map_err(|error| Failure::io(written.display(), error))
}

/// Fills a directory beside `out` and gives it that name when all is written.
fn publish(out: &Path, fill: impl FnOnce(&Path) -> Result<(), Failure>) -> Result<(), Failure> {
    let taken = match std::fs::read_dir(out) {
        Ok(mut entries) => entries.next().is_some(),
        Err(_) => out.symlink_metadata().is_ok(),
    };
    if taken {
        return Err(
            Error::Input(format!("{}: is already there, expected a new or empty directory", out.display())).into()
        );
    }
    let io = |error| Failure::io(out.display(), error);
    let parent = match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(parent).map_err(io)?;
    let staging = tempfile::Builder::new().prefix(".lorapool-convert-").tempdir_in(parent).map_err(io)?;
    // A directory of its own within: the staging one is readable by its owner alone.
    let whole = staging.path().join("adapter");
    std::fs::create_dir(&whole).map_err(io)?;
    fill(&whole)?;
    for entry in std::fs::read_dir(&whole).map_err(io)? {
        std::fs::File::open(entry.map_err(io)?.path()).and_then(|file| file.sync_all()).map_err(io)?;
    }
    std::fs::rename(&whole, out).map_err(io)
}

fn text(document: &Document, base: Option<&Path>) -> String {
    let Document { source, out, tensors, .. } = document;
    let size = bytes(document.bytes);
    let mut text = format!("{source}\n{out}: {tensors} tensors, {size}\n");
    match document.verdict {
        Verdict::Accept => {
            let against = base.map_or("without a base".to_owned(), |base| format!("against {}", base.display()));
            text += &format!("{} by audit, {against}", good("accept"));
        }
        Verdict::Reject => {
            let code = document.code.map_or("", |code| code.as_str());
            text += &format!("{} {code}: {}", bad("reject"), document.message.as_deref().unwrap_or_default());
        }
    }
    text
}
