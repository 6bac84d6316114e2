//! Adapters named on the command line, and the base they are for.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use lorapool::DType;
use lorapool::adapter::{self, Adapter, Audit, BaseModel};
use lorapool::pool::{ExpertSpec, PoolSpec};

use super::failure::Failure;

/// An adapter as the command line names it: `PATH`, or several that are merged, `PATH@WEIGHT+PATH@WEIGHT`.
#[derive(Clone, Debug, PartialEq)]
pub enum AdapterPath {
    /// One, as it is.
    One(PathBuf),
    /// The sum of several, or a multiple of one.
    Merged(Vec<(PathBuf, f32)>),
}

/// How adapters are named, for the help of commands that take them.
pub const PATHS: &str = "PATH is a directory as PEFT saved it, on this machine, or a LoRA of llama.cpp's (a GGUF file), which needs --base. An \
    adapter is PATH, or PATH@WEIGHT+PATH@WEIGHT+...: one adapter whose delta is the sum of \
    theirs, each times its weight (PEFT's add_weighted_adapter with \"cat\"; ranks add up). A path that itself ends in \
    @NUMBER is written with a slash behind it.";

impl FromStr for AdapterPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // A weight is what is written like one: `a@b` is a path.
        let numeric = |weight: &str| {
            let digits = weight.trim_start_matches(['-', '+']);
            digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') && weight.parse::<f64>().is_ok()
        };
        let weighted = |piece: &str| piece.rsplit_once('@').filter(|(_, weight)| numeric(weight)).is_some();
        let pieces: Vec<&str> = text.split('+').collect();
        if !pieces.iter().any(|piece| weighted(piece)) {
            return match text {
                "" => Err("expected a path".into()),
                path => Ok(Self::One(path.into())),
            };
        }
        let part = |piece: &&str| {
            let (path, weight) = piece
                .rsplit_once('@')
                .filter(|(path, weight)| !path.is_empty() && numeric(weight))
                .ok_or_else(|| format!("found {piece:?}, expected PATH@WEIGHT, as every part of a sum is written"))?;
            let weight: f32 = weight.parse().map_err(|error| format!("{piece:?}: {error}"))?;
            if !weight.is_finite() {
                return Err(format!("{piece:?}: expected a weight within the range of f32"));
            }
            Ok((PathBuf::from(path), weight))
        };
        pieces.iter().map(part).collect::<Result<_, _>>().map(Self::Merged)
    }
}

impl fmt::Display for AdapterPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(path) => write!(f, "{}", path.display()),
            Self::Merged(parts) => {
                for (index, (path, weight)) in parts.iter().enumerate() {
                    write!(f, "{}{}@{weight}", if index > 0 { "+" } else { "" }, path.display())?;
                }
                Ok(())
            }
        }
    }
}

impl AdapterPath {
    /// Loads it.
    fn load(&self, base: Option<&BaseModel>) -> lorapool::Result<Adapter> {
        match self {
            Self::One(path) => adapter::load(path, base),
            Self::Merged(parts) => adapter::load_merged(parts, base),
        }
    }

    /// Judges it.
    pub fn audit(&self, base: Option<&BaseModel>) -> lorapool::Result<Audit> {
        match self {
            Self::One(path) => Ok(adapter::audit(path, base)),
            Self::Merged(parts) => adapter::audit_merged(parts, base),
        }
    }
}

/// An adapter, and what to call it: `NAME=PATH`.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedPath {
    /// What requests would call it.
    pub name: String,
    /// Where it is.
    pub path: AdapterPath,
}

impl FromStr for NamedPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok(Self { name: name.to_owned(), path: path.parse()? })
            }
            _ => Err("expected NAME=PATH, such as sql=adapters/sql".into()),
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
    dir.map(|dir| BaseModel::open(dir).map_err(|error| Failure::from(error).about("base"))).transpose()
}

/// Loads each adapter; an error names the one it is about.
pub fn load(named: &[NamedPath], base: Option<&BaseModel>) -> Result<Vec<Named>, Failure> {
    for (i, input) in named.iter().enumerate() {
        if named[..i].iter().any(|other| other.name == input.name) {
            return Err(Failure::usage(format!("two adapters are named {:?}: names must differ", input.name)));
        }
    }
    let load = |input: &NamedPath| {
        let adapter =
            input.path.load(base).map_err(|error| Failure::from(error).about(format!("adapter {:?}", input.name)))?;
        Ok(Named { name: input.name.clone(), adapter })
    };
    named.iter().map(load).collect()
}

/// What a pool of experts for these adapters has to have: every routed linear of the base, or without one those that an
/// adapter covers; `None` where there are none.
pub fn expert_spec<'a>(
    base: Option<&BaseModel>,
    adapters: impl IntoIterator<Item = &'a Named>,
    dtype: DType,
) -> Result<Option<ExpertSpec>, Failure> {
    let spec = ExpertSpec::for_adapters(adapters.into_iter().map(|named| &named.adapter), dtype)?;
    Ok(match (base, spec) {
        (Some(base), Some(spec)) => Some(spec.over(base)),
        (Some(base), None) => ExpertSpec::for_base(base, 1, 0),
        (None, spec) => spec,
    })
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
    let vectors = all.iter().flat_map(|named| &named.adapter.pairs).any(|pair| pair.vectors.is_some());
    let rows = all.iter().flat_map(|named| &named.adapter.tokens).map(|tokens| tokens.ids.len());
    let rows = rows.max().unwrap_or(1).max(1) as u32;
    Ok(PoolSpec { vectors, ..PoolSpec::for_base(base, max_rank, max_loras, dtype).with_token_rows(rows) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_is_what_has_weights_and_any_other_text_is_a_path() {
        let one = |text: &str| assert_eq!(text.parse(), Ok(AdapterPath::One(text.into())));
        let sum = |text: &str, parts: &[(&str, f32)]| {
            let parts = parts.iter().map(|(path, weight)| (PathBuf::from(path), *weight)).collect();
            assert_eq!(text.parse(), Ok(AdapterPath::Merged(parts)), "{text}");
        };
        for path in ["a", "a/b", "c++/lora", "a@b", "a@2/", "user@host/x", "a@", "a@inf", "a@nan", "a+b", "@"] {
            one(path);
        }
        sum("a@0.5", &[("a", 0.5)]);
        sum("a@0.7+b@0.3", &[("a", 0.7), ("b", 0.3)]);
        sum("a@-1+a@1e-3+x@y@.5", &[("a", -1.0), ("a", 1e-3), ("x@y", 0.5)]);
        for wrong in ["", "a@0.5+b", "a+b@0.5", "a@0.5+", "+a@0.5", "@0.5", "a@1e99"] {
            assert!(wrong.parse::<AdapterPath>().is_err(), "{wrong}");
        }
        let text = "a@0.7+b@-0.3";
        assert_eq!(text.parse::<AdapterPath>().unwrap().to_string(), text);
        assert!("=a".parse::<NamedPath>().is_err() && "a=".parse::<NamedPath>().is_err());
        assert!("a".parse::<NamedPath>().is_err());
        assert_eq!("n=a@2".parse::<NamedPath>().unwrap().name, "n");
    }
}
