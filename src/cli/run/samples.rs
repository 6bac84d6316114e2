//! Adapters that ship with the command: saved by PEFT itself for a tiny random Llama.

use std::path::Path;

use lorapool::adapter::{self, BaseModel};

use super::super::adapters::Named;
use super::super::failure::Failure;

/// A file and its place below the samples' directory.
type File = (&'static str, &'static [u8]);

/// The files of an adapter.
macro_rules! sample {
    ($name:literal) => {
        [
            (
                concat!($name, "/adapter_config.json"),
                include_bytes!(concat!("../../../tests/fixtures/", $name, "/adapter_config.json")),
            ),
            (
                concat!($name, "/adapter_model.safetensors"),
                include_bytes!(concat!("../../../tests/fixtures/", $name, "/adapter_model.safetensors")),
            ),
        ]
    };
}

/// By slot; the last one waits on disk until it is swapped in. Types f32, f16 and bf16; ranks 1 to 72;
/// rsLoRA; a rank_pattern; some cover every site, some a few.
const SAMPLES: [(&str, [File; 2]); 7] = [
    ("plain-f32", sample!("01_plain_f32")),
    ("plain-f16", sample!("02_plain_f16")),
    ("plain-bf16", sample!("03_plain_bf16")),
    ("rslora-r6", sample!("04_rslora_r6")),
    ("rank-pattern", sample!("07_rank_pattern")),
    ("rank-72", sample!("06_r72_over_hidden")),
    ("rank-1", sample!("05_r1")),
];

/// The base's config: all that its shapes need.
const BASE: File = ("base/config.json", include_bytes!("../../../tests/fixtures/_base/llama/config.json"));

/// The base and its adapters, read from files like anyone else's.
pub fn load() -> Result<(BaseModel, Vec<Named>), Failure> {
    let dir = tempfile::tempdir().map_err(|error| Failure::io("a temporary directory for the samples", error))?;
    let write = |(path, bytes): &File| -> Result<(), Failure> {
        let path = dir.path().join(path);
        path.parent()
            .map_or(Ok(()), std::fs::create_dir_all)
            .and_then(|()| std::fs::write(&path, bytes))
            .map_err(|error| Failure::io(path.display(), error))
    };
    write(&BASE)?;
    let base = BaseModel::open(dir.path().join("base"))?;
    let named = SAMPLES.iter().map(|(name, files)| {
        files.iter().try_for_each(&write)?;
        let folder = Path::new(files[0].0).parent().unwrap_or(Path::new(""));
        let adapter = adapter::load(dir.path().join(folder), Some(&base))?;
        Ok(Named { name: (*name).to_owned(), adapter })
    });
    let named = named.collect::<Result<_, Failure>>()?;
    Ok((base, named))
}
