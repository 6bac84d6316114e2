//! Linears that a base keeps in one and an adapter keeps apart, or the reverse: `qkv_proj` against `q_proj`, `k_proj` and
//! `v_proj`, `gate_up_proj` against `gate_proj` and `up_proj`.
//!
//! Only where the rows of the one linear are those of the others in order. Models that interleave rows by heads, and
//! names whose order is not known, are refused: a delta on the wrong rows would load and answer nonsense.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::base::{BaseModel, Linear};
use super::json::excerpt;
use super::reading::{Reading, listed};
use super::reject::{Code, Loaded, Reject};
use super::stack::{Block, stack};
use super::weights::{HostMatrix, HostPair, RowVectors};
use crate::contract::MAX_RANK;

/// One linear in place of several.
struct Fusion {
    /// Names of the one, and the model types whose rows are known to be the parts' in order; `None`: whatever the model.
    wholes: &'static [(&'static str, Option<&'static [&'static str]>)],
    /// Names of the several, in the order of their rows, by every way they are called.
    parts: &'static [&'static [&'static str]],
    /// Names of the one whose rows are not the parts' in order in some model, and why.
    mixed: &'static [&'static str],
}

const PHI3: &[&str] = &["phi3", "phi3_v", "phi4mm", "phi4_multimodal"];

const FUSIONS: &[Fusion] = &[
    Fusion {
        wholes: &[
            ("qkv_proj", Some(PHI3)),
            ("W_pack", Some(&["baichuan"])),
            ("c_attn", Some(&["gpt2", "qwen", "gpt_bigcode", "decision_transformer"])),
            ("Wqkv", Some(&["mpt", "modernbert", "nomic_bert", "phi-msft", "mixformer-sequential"])),
        ],
        parts: &[&["q_proj", "k_proj", "v_proj"], &["query", "key", "value"], &["q_lin", "k_lin", "v_lin"]],
        mixed: &["query_key_value", "wqkv", "qkv", "in_proj"],
    },
    Fusion {
        wholes: &[("gate_up_proj", None)],
        parts: &[&["gate_proj", "up_proj"]],
        mixed: &["gate_and_up_proj", "up_gate_proj", "w13"],
    },
];

/// Where an adapter's linear lies in a base that has it otherwise.
#[derive(Debug)]
pub(super) enum Place<'b> {
    /// Rows of one linear.
    Rows(&'b Linear, Range<usize>),
    /// The rows of several, in order.
    Over(Vec<&'b Linear>),
}

impl Place<'_> {
    /// Widths of input and output.
    pub fn widths(&self) -> (usize, usize) {
        match self {
            Place::Rows(linear, rows) => (linear.in_features, rows.len()),
            Place::Over(parts) => {
                (parts.first().map_or(0, |linear| linear.in_features), parts.iter().map(|l| l.out_features).sum())
            }
        }
    }
}

/// The place of a path that `base` has no linear at, but fused or split.
///
/// # Errors
/// [`Code::FusedMismatch`] where the base has the path's rows in an order that is not known.
pub(super) fn place<'b>(base: &'b BaseModel, path: &str) -> Loaded<Option<Place<'b>>> {
    let (_, leaf) = split(path);
    let beside = |name: &str| base.linear(&sibling(path, name));
    for fusion in FUSIONS {
        let part = fusion.parts.iter().find_map(|names| names.iter().position(|name| *name == leaf));
        if let Some(part) = part {
            if let Some((linear, models)) = fusion.wholes.iter().find_map(|(name, of)| Some((beside(name)?, *of))) {
                return rows(base, path, linear, part, models).map(|rows| Some(Place::Rows(linear, rows)));
            }
            if let Some(linear) = fusion.mixed.iter().find_map(|name| beside(name)) {
                return Err(mixed(base, path, linear));
            }
        }
        let known = fusion.wholes.iter().any(|(name, _)| *name == leaf);
        if known || fusion.mixed.contains(&leaf) {
            let parts = |names: &&[&str]| names.iter().map(|name| beside(name)).collect::<Option<Vec<_>>>();
            let Some(parts) = fusion.parts.iter().find_map(parts) else { continue };
            if !known {
                return Err(mixed(base, path, parts[0]));
            }
            if let Some(other) = parts.iter().find(|linear| linear.in_features != parts[0].in_features) {
                let message = format!(
                    "{}: {} has {} inputs and {} has {}; {path} of the adapter has one width",
                    base.source(),
                    parts[0].site.path,
                    parts[0].in_features,
                    other.site.path,
                    other.in_features
                );
                return Err(Reject::new(Code::FusedMismatch, message));
            }
            return Ok(Some(Place::Over(parts)));
        }
    }
    Ok(None)
}

/// Paths that [`place`] may find for adapters that have the base's fused linears apart, or its separate ones fused.
pub(super) fn aliases(base: &BaseModel) -> Vec<String> {
    let mut paths = Vec::new();
    for linear in base.linears() {
        let (_, leaf) = split(&linear.site.path);
        let mut add = |name: &str| paths.push(sibling(&linear.site.path, name));
        for fusion in FUSIONS {
            let wholes = || fusion.wholes.iter().map(|(name, _)| name).chain(fusion.mixed);
            if wholes().any(|name| *name == leaf) {
                fusion.parts.iter().copied().flatten().for_each(|name| add(name));
            }
            if fusion.parts.iter().any(|names| names[0] == leaf) {
                wholes().for_each(|name| add(name));
            }
        }
    }
    paths.retain(|path| base.linear(path).is_none());
    paths
}

fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}

fn sibling(path: &str, name: &str) -> String {
    match split(path) {
        ("", _) => name.to_owned(),
        (parent, _) => format!("{parent}.{name}"),
    }
}

fn mixed(base: &BaseModel, path: &str, linear: &Linear) -> Box<Reject> {
    let message = format!(
        "{}: has {} in the place of {}; rows of such a linear are interleaved by heads or in an order that is not \
         known, so neither can be made the other",
        base.source(),
        linear.site.path,
        excerpt(path)
    );
    Reject::new(Code::FusedMismatch, message)
}

/// The rows of part `part` in a fused linear.
fn rows(base: &BaseModel, path: &str, linear: &Linear, part: usize, models: Option<&[&str]>) -> Loaded<Range<usize>> {
    let (whole, found) = (&linear.site.path, linear.out_features);
    let refuse = |why: String| {
        let message = format!("{}: has {whole} in the place of {}, {why}", base.source(), excerpt(path));
        Err(Reject::new(Code::FusedMismatch, message))
    };
    let Some(models) = models else {
        // Gate and up are always of one width.
        return match found % 2 {
            0 => Ok(part * found / 2..(part + 1) * found / 2),
            _ => refuse(format!("with {found} rows, expected two equal halves")),
        };
    };
    let Some(attention) = base.attention() else {
        return refuse("and no config.json whose head counts say which of its rows those are".into());
    };
    let known = models.contains(&attention.model_type.as_str())
        && (attention.model_type != "gpt_bigcode" || attention.multi_query);
    if !known {
        let model = excerpt(&attention.model_type);
        return refuse(format!("in an order of rows that is not known for model_type {model:?}"));
    }
    let widths = [attention.query, attention.key_value, attention.key_value];
    let sum: usize = widths.iter().sum();
    if sum != found {
        let [q, k, v] = widths;
        return refuse(format!(
            "with {found} rows, but config.json gives q, k and v {q}, {k} and {v} rows ({} heads, {} of keys and \
             values), {sum} in all",
            attention.heads, attention.key_value_heads
        ));
    }
    let start = widths[..part].iter().sum();
    Ok(start..start + widths[part])
}

impl Reading<'_> {
    /// Makes pairs that the base has fused or apart those of the base's own linears.
    pub(super) fn refit(&mut self, pairs: Vec<HostPair>) -> Loaded<Vec<HostPair>> {
        let Some(base) = self.base else { return Ok(pairs) };
        // With the paths that they come from.
        let mut fitted: Vec<(Arc<str>, HostPair)> = Vec::with_capacity(pairs.len());
        let mut joined: BTreeMap<Arc<str>, Vec<(HostPair, Range<usize>)>> = BTreeMap::new();
        let mut apart = Vec::new();
        for pair in pairs {
            let place = match base.linear(&pair.site.path) {
                Some(_) => None,
                None => place(base, &pair.site.path)?,
            };
            match place {
                None => fitted.push((pair.site.path.clone(), pair)),
                Some(Place::Rows(linear, rows)) => {
                    joined.entry(linear.site.path.clone()).or_default().push((pair, rows));
                }
                Some(Place::Over(linears)) => {
                    let mut first_row = 0;
                    for linear in linears {
                        let rows = first_row..first_row + linear.out_features;
                        first_row = rows.end;
                        let (a, b) = (pair.a.clone(), slice(&pair.b, rows.clone()));
                        let vectors = pair.vectors.as_ref().map(|vectors| vectors.rows(rows));
                        let part = HostPair { vectors, ..HostPair::new(linear.site.clone(), a, b, pair.scale) };
                        fitted.push((pair.site.path.clone(), part));
                    }
                    apart.push(pair.site.path);
                }
            }
        }
        let mut joins = Vec::new();
        for (whole, mut parts) in joined {
            parts.sort_by_key(|(_, rows)| rows.start);
            if let Some([(one, _), (two, _)]) = parts.array_windows().find(|[(_, one), (_, two)]| one.end > two.start) {
                return Err(self.twice(&one.site.path, &two.site.path, &whole));
            }
            let rank: usize = parts.iter().map(|(pair, _)| pair.rank()).sum();
            let names: Vec<_> = parts.iter().map(|(pair, _)| &*pair.site.path).collect();
            if rank > MAX_RANK as usize {
                let ranks: Vec<_> = parts.iter().map(|(pair, _)| pair.rank().to_string()).collect();
                let message = format!(
                    "{}: {} have ranks {} and {whole} of {} is one linear, so that their ranks add up to {rank}, \
                     expected at most {MAX_RANK}",
                    self.source.name,
                    names.join(", "),
                    ranks.join(", "),
                    base.source()
                );
                return Err(Reject::new(Code::RankLimit, message));
            }
            let Some(linear) = base.linear(&whole) else { continue };
            let blocks: Vec<_> = parts.iter().map(Block::from).collect();
            let (a, b, scale) = stack(&blocks, linear.out_features);
            joins.push(format!("{} into {whole} (rank {rank})", names.join(", ")));
            let vectors = RowVectors::join(&parts, linear.out_features);
            let site = linear.site.clone();
            fitted.push((parts[0].0.site.path.clone(), HostPair { vectors, ..HostPair::new(site, a, b, scale) }));
        }
        let mut taken: BTreeMap<&str, &str> = BTreeMap::new();
        for (from, pair) in &fitted {
            if let Some(other) = taken.insert(&pair.site.path, from) {
                return Err(self.twice(other, from, &pair.site.path));
            }
        }
        if let Some(first) = joins.first() {
            let message = format!(
                "{} has linears in one that the adapter has apart; joined, ranks added up, at {} sites: {first}",
                base.source(),
                joins.len()
            );
            self.note("N_FUSED_JOINED", message);
        }
        if !apart.is_empty() {
            let names: Vec<_> = apart.iter().map(|path| &**path).collect();
            let message = format!(
                "{} has linears apart that the adapter has in one; B's rows were split at {} sites: {}",
                base.source(),
                apart.len(),
                listed(&names)
            );
            self.note("N_FUSED_SPLIT", message);
        }
        Ok(fitted.into_iter().map(|(_, pair)| pair).collect())
    }

    /// The base's linear that a part goes to; of a path that is none's, or several's, the path itself.
    pub(super) fn home(&self, path: &str) -> Arc<str> {
        match self.base.filter(|base| base.linear(path).is_none()).map(|base| place(base, path)) {
            Some(Ok(Some(Place::Rows(linear, _)))) => linear.site.path.clone(),
            _ => path.into(),
        }
    }

    fn twice(&self, one: &str, two: &str, site: &str) -> Box<Reject> {
        let message = format!("{}: modules {one} and {two} both have a part at {site}, expected one", self.source.name);
        Reject::new(Code::TensorDuplicate, message)
    }
}

impl<'p> From<&'p (HostPair, Range<usize>)> for Block<'p> {
    fn from((pair, rows): &'p (HostPair, Range<usize>)) -> Self {
        Self { a: &pair.a, b: &pair.b, first_row: rows.start, scale: pair.scale.into() }
    }
}

impl RowVectors {
    /// Those of some of the outputs.
    fn rows(&self, rows: Range<usize>) -> Self {
        Self { gain: self.gain[rows.clone()].to_vec(), offset: self.offset[rows].to_vec() }
    }

    /// Those of `outputs` outputs of which each part has some; none if no part has any. Outputs without stay as they are.
    fn join(parts: &[(HostPair, Range<usize>)], outputs: usize) -> Option<Self> {
        let mut joined = Self { gain: vec![1.0; outputs], offset: vec![0.0; outputs] };
        let mut any = false;
        for (pair, rows) in parts {
            let Some(vectors) = &pair.vectors else { continue };
            joined.gain[rows.clone()].copy_from_slice(&vectors.gain);
            joined.offset[rows.clone()].copy_from_slice(&vectors.offset);
            any = true;
        }
        any.then_some(joined)
    }
}

/// Rows of a matrix.
fn slice(matrix: &HostMatrix, rows: Range<usize>) -> HostMatrix {
    let row = matrix.cols * matrix.dtype.size() as usize;
    let bytes = matrix.bytes[rows.start * row..rows.end * row].to_vec();
    HostMatrix { dtype: matrix.dtype, rows: rows.len(), cols: matrix.cols, bytes }
}
