//! Several adapters made one, by PEFT's rule for `add_weighted_adapter(combination_type="cat")`: at each site the deltas
//! `weight * scaling * B * A` add up, A's below and B's beside each other, and the rank is the sum of the ranks.
//!
//! PEFT sizes every module for the sum of all `r` and pads with zeros; here a site's rank is that of the adapters that
//! cover it. PEFT multiplies weight and scaling into A in A's own type; here they are the pair's scale, and only where
//! they differ is their ratio folded into B, in f64, rounded once to f32.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use indexmap::IndexMap;

use super::base::BaseModel;
use super::config::{PeftAdapterConfig, Targets};
use super::expert::ExpertPair;
use super::load::load;
use super::reject::{Code, Loaded, Reject};
use super::site::SiteId;
use super::stack::{Block, stack};
use super::weights::{Adapter, HostMatrix, HostPair, Notice, RowVectors};
use crate::contract::MAX_RANK;
use crate::error::{Error, Result};

/// An adapter to be merged: what to call it in messages, its weights, and what its delta is multiplied by.
struct Part<'a> {
    name: String,
    adapter: &'a Adapter,
    weight: f32,
}

/// Loads the adapters at these paths, each as [`load`] does, and merges them as [`Adapter::merge`] does.
///
/// # Errors
/// The loader's refusal of one of them, or the errors of [`Adapter::merge`], naming paths.
pub fn load_merged<P: AsRef<Path>>(parts: &[(P, f32)], base: Option<&BaseModel>) -> Result<Adapter> {
    let loaded: Vec<_> = parts.iter().map(|(path, _)| load(path, base)).collect::<Result<_>>()?;
    let name = |path: &P| path.as_ref().display().to_string();
    let parts = parts.iter().zip(&loaded);
    merge(parts.map(|((path, weight), adapter)| Part { name: name(path), adapter, weight: *weight }).collect())
}

impl Adapter {
    /// One adapter whose delta is the sum of these adapters' deltas, each times its weight: PEFT's
    /// `add_weighted_adapter` with `combination_type="cat"`. Ranks add up, site by site.
    ///
    /// # Errors
    /// [`Error::Input`] for no adapter at all or a weight that is not finite; [`Error::Reject`] with [`Code::Merge`] for
    /// parts that don't add up, such as a task's head, [`Code::BaseConflict`] for adapters of different bases,
    /// [`Code::RankLimit`] for ranks that add up to more than the kernels do.
    pub fn merge(parts: &[(&Adapter, f32)]) -> Result<Adapter> {
        let name = |index: usize| format!("adapter {}", index + 1);
        let parts = parts.iter().enumerate();
        merge(parts.map(|(i, (adapter, weight))| Part { name: name(i), adapter, weight: *weight }).collect())
    }
}

fn merge(parts: Vec<Part<'_>>) -> Result<Adapter> {
    if parts.is_empty() {
        return Err(Error::Input("no adapter to merge".into()));
    }
    for part in &parts {
        if !part.weight.is_finite() {
            return Err(Error::Input(format!("{}: weight {}, expected a finite number", part.name, part.weight)));
        }
        let replaced = part.adapter.tokens.first().map(|tokens| &tokens.site);
        if let Some(site) = replaced.or(part.adapter.raw_tokens.first().map(|raw| &raw.site)) {
            let message = format!(
                "{}: replaces rows of {}, which don't add up; {} Expected lora_A and lora_B alone",
                part.name,
                site.path,
                Code::Merge.describe()
            );
            return Err(Reject::new(Code::Merge, message).into());
        }
        if let Some(tensor) = part.adapter.unapplied.first() {
            let message = format!(
                "{}: has {}, which the host applies whole; {} Expected lora_A and lora_B alone",
                part.name,
                tensor.name,
                Code::Merge.describe()
            );
            return Err(Reject::new(Code::Merge, message).into());
        }
    }
    let mut sites: BTreeMap<&str, Vec<(&Part<'_>, &HostPair)>> = BTreeMap::new();
    for part in &parts {
        for pair in &part.adapter.pairs {
            sites.entry(&pair.site.path).or_default().push((part, pair));
        }
    }
    let ids = ids(&sites);
    let mut pairs = Vec::with_capacity(sites.len());
    for (addends, site) in sites.values().zip(ids) {
        pairs.push(add(site, addends)?);
    }
    let mut notices: Vec<Notice> = Vec::new();
    for part in &parts {
        notices.extend(part.adapter.notices.iter().cloned());
    }
    let config = config(&parts, &pairs);
    let mut merged = Adapter::new(config, 0.0, pairs, Vec::new()).with_experts(experts(&parts)?);
    merged.scale = merged.config.scaling() as f32;
    let named = |part: &Part<'_>| format!("{} times {}", part.name, part.weight);
    let message = format!(
        "the sum of {}; ranks add up, to {} at most",
        parts.iter().map(named).collect::<Vec<_>>().join(", "),
        merged.max_rank()
    );
    notices.push(Notice { code: "N_MERGED", message });
    let bases: HashSet<_> = parts.iter().filter_map(|p| p.adapter.config.base_model_name_or_path.as_deref()).collect();
    if bases.len() > 1 {
        let mut bases: Vec<_> = bases.into_iter().collect();
        bases.sort_unstable();
        let message = format!("the adapters' configs name different bases: {}", bases.join(", "));
        notices.push(Notice { code: "N_MERGED_BASES", message });
    }
    merged.notices = notices;
    merged.tensors = parts.iter().flat_map(|part| part.adapter.tensors.iter().cloned()).collect();
    Ok(merged)
}

/// The sites, named as the adapters name them where no two fall together.
fn ids(sites: &BTreeMap<&str, Vec<(&Part<'_>, &HostPair)>>) -> Vec<SiteId> {
    let own: Vec<SiteId> = sites.values().map(|addends| addends[0].1.site.clone()).collect();
    let distinct: HashSet<_> = own.iter().map(|site| (site.layer, &site.module)).collect();
    match distinct.len() == own.len() {
        true => own,
        false => SiteId::of_paths(sites.keys().copied()),
    }
}

/// One adapter's pair at a place where several add up.
struct Addend<'a> {
    part: &'a Part<'a>,
    a: &'a HostMatrix,
    b: &'a HostMatrix,
    scale: f32,
    embedding: bool,
}

/// The sum of the deltas at one place, which messages call `what`: A, B and scale.
fn sum(what: &str, addends: &[Addend<'_>]) -> Loaded<(HostMatrix, HostMatrix, f32)> {
    let first = &addends[0];
    let widths = |addend: &Addend<'_>| (addend.a.cols, addend.b.rows);
    if let Some(odd) = addends.iter().find(|other| widths(other) != widths(first)) {
        let (one, two) = (widths(first), widths(odd));
        let message = format!(
            "{what}: {} has {} inputs and {} outputs, {} has {} and {}; they are for different bases",
            first.part.name, one.0, one.1, odd.part.name, two.0, two.1
        );
        return Err(Reject::new(Code::BaseConflict, message));
    }
    if let Some(other) = addends.iter().find(|other| other.embedding != first.embedding) {
        let (one, two) = (&first.part.name, &other.part.name);
        let message = format!("{what}: an embedding to one of {one} and {two} and a linear to the other");
        return Err(Reject::new(Code::BaseConflict, message));
    }
    let rank: usize = addends.iter().map(|addend| addend.a.rows).sum();
    if rank > MAX_RANK as usize {
        let ranks: Vec<_> = addends.iter().map(|addend| format!("{} of {}", addend.a.rows, addend.part.name)).collect();
        let message = format!("{what}: ranks add up to {rank} ({}), expected at most {MAX_RANK}", ranks.join(", "));
        return Err(Reject::new(Code::RankLimit, message));
    }
    let scale = |addend: &Addend<'_>| f64::from(addend.part.weight) * f64::from(addend.scale);
    if let Some(addend) = addends.iter().find(|addend| !(scale(addend) as f32).is_finite()) {
        let message = format!(
            "{what}: weight {:e} of {} times its scale {:e} is beyond the range of f32",
            addend.part.weight, addend.part.name, addend.scale
        );
        return Err(Reject::new(Code::Merge, message));
    }
    let blocks: Vec<_> =
        addends.iter().map(|one| Block { a: one.a, b: one.b, first_row: 0, scale: scale(one) }).collect();
    Ok(stack(&blocks, first.b.rows))
}

/// The sum of one site's deltas.
fn add(site: SiteId, addends: &[(&Part<'_>, &HostPair)]) -> Loaded<HostPair> {
    let of = addends.iter().map(|(part, pair)| {
        let HostPair { a, b, scale, embedding, .. } = pair;
        Addend { part, a, b, scale: *scale, embedding: *embedding }
    });
    let (a, b, scale) = sum(&site.path, &of.collect::<Vec<_>>())?;
    let vectors = offsets(&site.path, addends)?;
    Ok(HostPair { embedding: addends[0].1.embedding, vectors, ..HostPair::new(site, a, b, scale) })
}

/// Biases of lora_B are a part of the delta and add up with it.
fn offsets(path: &str, addends: &[(&Part<'_>, &HostPair)]) -> Loaded<Option<RowVectors>> {
    let mut sum: Option<Vec<f64>> = None;
    for (part, pair) in addends {
        let Some(RowVectors { gain, offset }) = &pair.vectors else { continue };
        if gain.iter().any(|gain| *gain != 1.0) {
            let message = format!(
                "{path}: {} rescales rows of the base (DoRA), which can't be added up; merge adapters without use_dora",
                part.name
            );
            return Err(Reject::new(Code::Merge, message));
        }
        let sum = sum.get_or_insert_with(|| vec![0.0; offset.len()]);
        sum.iter_mut().zip(offset).for_each(|(sum, o)| *sum += f64::from(part.weight) * f64::from(*o));
    }
    let Some(sum) = sum else { return Ok(None) };
    let offset: Vec<f32> = sum.iter().map(|offset| *offset as f32).collect();
    match offset.iter().position(|offset| !offset.is_finite()) {
        None => Ok(Some(RowVectors { gain: vec![1.0; offset.len()], offset })),
        Some(row) => {
            let message =
                format!("{path}: the sum of the biases of row {row} is {:e}, beyond the range of f32", sum[row]);
            Err(Reject::new(Code::Merge, message))
        }
    }
}

/// The sums of experts' pairs, expert by expert.
fn experts(parts: &[Part<'_>]) -> Loaded<Vec<ExpertPair>> {
    let mut by_expert: BTreeMap<(&str, u32), Vec<(&Part<'_>, &ExpertPair)>> = BTreeMap::new();
    for part in parts {
        for pair in &part.adapter.experts {
            by_expert.entry((&pair.site.path, pair.expert)).or_default().push((part, pair));
        }
    }
    let mut sums = Vec::with_capacity(by_expert.len());
    for ((path, expert), addends) in by_expert {
        let of = addends.iter().map(|(part, pair)| {
            let ExpertPair { a, b, scale, .. } = pair;
            Addend { part, a, b, scale: *scale, embedding: false }
        });
        let (a, b, scale) = sum(&format!("expert {expert} of {path}"), &of.collect::<Vec<_>>())?;
        let experts = addends.iter().map(|(_, pair)| pair.experts).max().unwrap_or(0);
        sums.push(ExpertPair { site: addends[0].1.site.clone(), expert, experts, a, b, scale });
    }
    Ok(sums)
}

/// What an adapter with these pairs would say of itself: one rank and one alpha, and patterns for sites that differ.
fn config(parts: &[Part<'_>], pairs: &[HostPair]) -> PeftAdapterConfig {
    let first = &parts[0].adapter.config;
    let r = pairs.iter().map(HostPair::rank).max().unwrap_or(1);
    let alpha = |pair: &HostPair, rank: usize| f64::from(pair.scale) * rank as f64;
    let lora_alpha = pairs.first().map_or(r as f64, |pair| alpha(pair, r));
    let mut config = PeftAdapterConfig {
        peft_version: None,
        r,
        lora_alpha,
        use_rslora: false,
        rank_pattern: IndexMap::new(),
        alpha_pattern: IndexMap::new(),
        target_modules: Targets::None,
        exclude_modules: Targets::None,
        layers_to_transform: None,
        layers_pattern: Vec::new(),
        lora_bias: pairs.iter().any(|pair| pair.vectors.is_some()),
        use_dora: false,
        ..first.clone()
    };
    config.name_exceptions(pairs.iter().map(|pair| (&*pair.site.path, pair.rank(), alpha(pair, pair.rank()))));
    config
}

impl PeftAdapterConfig {
    /// Fills the patterns for modules whose rank or alpha is not the config's own: `(path, rank, alpha)`.
    pub(super) fn name_exceptions<'p>(&mut self, modules: impl Iterator<Item = (&'p str, usize, f64)>) {
        for (path, rank, alpha) in modules {
            // A path and nothing that ends in it.
            let pattern = || format!("^{}", fancy_regex::escape(path));
            if rank != self.r {
                self.rank_pattern.insert(pattern(), rank);
            }
            if alpha != self.lora_alpha {
                self.alpha_pattern.insert(pattern(), alpha);
            }
        }
    }
}
