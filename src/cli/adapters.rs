//! Adapters named on the command line, and the base they are for.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use lorapool::DType;
use lorapool::adapter::{self, Adapter, BaseModel};
use lorapool::pool::PoolSpec;

use super::failure::Failure;

/// A directory with an adapter, and what to call it: `NAME=DIR`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedDir {
    /// What requests would call it.
    pub name: String,
    /// Where `adapter_config.json` and `adapter_model.safetensors` are.
    pub dir: PathBuf,
}

impl FromStr for NamedDir {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, dir)) if !name.is_empty() && !dir.is_empty() => {
                Ok(Self { name: name.to_owned(), dir: dir.into() })
            }
            _ => Err("expected NAME=DIR, such as sql=adapters/sql".into()),
        }
    }
}

/// An adapter in host memory under its name.
#[derive(Clone, Debug)]
pub struct Named {
    /// What requests would call it.
    pub name: String,
    /// Its weights.
    pub adapter: Adapter,
}

/// The base's directory, opened.
pub fn open_base(dir: Option<&Path>) -> Result<Option<BaseModel>, Failure> {
    dir.map(|dir| BaseModel::open(dir).map_err(|error| Failure::from(error).about(format!("base {}", dir.display()))))
        .transpose()
}

/// Loads each adapter; an error names the one it is about.
pub fn load(named: &[NamedDir], base: Option<&BaseModel>) -> Result<Vec<Named>, Failure> {
    for (i, input) in named.iter().enumerate() {
        if named[..i].iter().any(|other| other.name == input.name) {
            return Err(Failure::usage(format!("two adapters are named {:?}: names must differ", input.name)));
        }
    }
    let load = |input: &NamedDir| {
        let adapter = adapter::load(&input.dir, base)
            .map_err(|error| Failure::from(error).about(format!("adapter {:?}", input.name)))?;
        Ok(Named { name: input.name.clone(), adapter })
    };
    named.iter().map(load).collect()
}

/// What a pool for `resident` in slots and `next` in host memory has to have: every site of the base, or
/// without one every site that an adapter covers.
pub fn pool_spec<'a>(
    base: Option<&BaseModel>,
    adapters: impl IntoIterator<Item = &'a Named> + Clone,
    max_loras: u32,
    dtype: DType,
) -> Result<PoolSpec, Failure> {
    let all: Vec<&Named> = adapters.into_iter().collect();
    let Some(base) = base else {
        // Adds one at a time, so that the error can name the first that doesn't fit the others.
        for count in 1..=all.len() {
            let some = all[..count].iter().map(|named| &named.adapter);
            if let Err(error) = PoolSpec::for_adapters(some, max_loras, dtype) {
                let name = &all[count - 1].name;
                return Err(
                    Failure::from(error).about(format!("adapter {name:?} is for another base than those before it"))
                );
            }
        }
        return Ok(PoolSpec::for_adapters(all.iter().map(|named| &named.adapter), max_loras, dtype)?);
    };
    let ranks = all.iter().flat_map(|named| &named.adapter.pairs).map(|pair| pair.rank());
    let max_rank = ranks.max().unwrap_or(1) as u32;
    Ok(PoolSpec::for_base(base, max_rank, max_loras, dtype))
}
