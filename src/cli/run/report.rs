//! What `lorapool run` prints.

use std::collections::BTreeSet;
use std::time::Duration;

use lorapool::DType;
use lorapool::adapter::{Adapter, Notice};
use lorapool::conformance::oracle::{Check, Mismatch};
use lorapool::ops::Op;
use serde::Serialize;

use super::super::adapters::Named;
use super::super::console::{bad, bold, bytes, dim, good, grouped, remark, render, scalar, table};
use super::mix::Mix;

/// The document.
#[derive(Debug, Serialize)]
pub struct Report {
    pub backend: &'static str,
    pub device: String,
    pub driver: String,
    pub api: String,
    pub dtype: DType,
    pub mix: Mix,
    pub adapters: Vec<AdapterLine>,
    pub rows: u32,
    /// Rows without an adapter.
    pub base_rows: usize,
    /// Of linears, embeddings, and linears of routed layers.
    pub sites: usize,
    /// Those of routed layers among them.
    pub expert_sites: usize,
    pub slots: u32,
    pub max_rank: u32,
    pub pool_bytes: u64,
    pub elements_checked: u64,
    pub mismatches: u64,
    pub worst_error_over_bound: f64,
    /// Median time of a decode step: bgmv at every site but those of routed experts, replayed to completion.
    pub step_us: f64,
    /// Time to allocate the pool and fill its slots.
    pub load_us: f64,
    pub swapped: bool,
    pub swap: Swap,
    /// Each op before and after the swap.
    pub passes: Vec<Pass>,
    /// Some of the elements outside their bound.
    pub first_mismatches: Vec<Mismatch>,
}

/// An adapter.
#[derive(Debug, Serialize)]
pub struct AdapterLine {
    pub name: String,
    /// Linears, embeddings, and linears of routed layers.
    pub sites: usize,
    /// Pairs of routed experts.
    pub experts: usize,
    pub rank_max: usize,
    /// Its own scale; patterns may give modules others.
    pub scale: f32,
    /// Bytes of its matrices.
    pub bytes: usize,
    pub notices: Vec<Notice>,
}

impl AdapterLine {
    /// What to say of `named`.
    pub fn new(named: &Named) -> Self {
        let Adapter { pairs, experts, scale, notices, .. } = &named.adapter;
        let routed: BTreeSet<&str> = experts.iter().map(|pair| &*pair.site.path).collect();
        let matrices = pairs.iter().map(|pair| [&pair.a, &pair.b]).chain(experts.iter().map(|pair| [&pair.a, &pair.b]));
        Self {
            name: named.name.clone(),
            sites: pairs.len() + routed.len(),
            experts: experts.len(),
            rank_max: matrices.clone().map(|[a, _]| a.rows).max().unwrap_or(0),
            scale: *scale,
            bytes: matrices.flatten().map(|matrix| matrix.bytes.len()).sum(),
            notices: notices.clone(),
        }
    }
}

/// The swap in the middle.
#[derive(Debug, Serialize)]
pub struct Swap {
    pub slot: usize,
    pub out: String,
    #[serde(rename = "in")]
    pub into: AdapterLine,
    /// From host memory to visible, submitted.
    pub swap_us: f64,
}

/// One op over all sites.
#[derive(Debug, Serialize)]
pub struct Pass {
    pub op: &'static str,
    pub after_swap: bool,
    pub elements_checked: u64,
    pub mismatches: u64,
    pub worst_error_over_bound: f64,
    pub step_us: f64,
}

impl Pass {
    /// `time`: the median step.
    pub fn new(op: Op, after_swap: bool, check: &Check, time: Duration) -> Self {
        Self {
            op: op.name(),
            after_swap,
            elements_checked: check.elements,
            mismatches: check.mismatches,
            worst_error_over_bound: check.worst,
            step_us: micros(time),
        }
    }
}

/// Microseconds.
pub fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1000.0
}

impl Report {
    /// The document for people.
    pub fn text(&self) -> String {
        let mut out =
            format!("{} {} {}\n", bold(self.backend), self.device, dim(format!("{}, {}", self.driver, self.api)));
        out += &format!(
            "{} rows ({} of the base), mix {}, {}; {} sites{}; {} of rank {} at most, {}, loaded in {}\n\n",
            grouped(self.rows.into()),
            grouped(self.base_rows as u64),
            self.mix_name(),
            self.dtype,
            self.sites,
            match self.expert_sites {
                0 => String::new(),
                routed => format!(", {routed} of them of routed experts: checked, but no part of a step's time"),
            },
            if self.slots == 1 { "1 slot".into() } else { format!("{} slots", self.slots) },
            self.max_rank,
            bytes(self.pool_bytes),
            time(self.load_us),
        );
        let mut adapters = table(&["slot", "adapter", "sites", "rank", "scale", "weights"], &[0, 2, 3, 4, 5]);
        for (slot, line) in self.adapters.iter().enumerate() {
            adapters.add_row(line.cells(&slot.to_string()));
        }
        adapters.add_row(self.swap.into.cells("->0"));
        out += &format!("{}\n\n", render(&adapters));
        let mut passes =
            table(&["op", "slot 0", "elements checked", "mismatches", "worst error/bound", "step"], &[2, 3, 4, 5]);
        for pass in &self.passes {
            let holds = if pass.after_swap { &self.swap.into.name } else { &self.swap.out };
            passes.add_row([
                pass.op.to_owned(),
                holds.clone(),
                grouped(pass.elements_checked),
                grouped(pass.mismatches),
                format!("{:.3}", pass.worst_error_over_bound),
                time(pass.step_us),
            ]);
        }
        out += &format!("{}\n\n", render(&passes));
        for line in &self.adapters {
            line.notices.iter().for_each(|notice| out += &remark(&line.name, notice));
        }
        for mismatch in &self.first_mismatches {
            out += &format!("{} {mismatch}\n", bad("wrong:"));
        }
        let checked = grouped(self.elements_checked);
        out += &match self.mismatches {
            0 => format!(
                "{} all {checked} elements within the bound, base rows to the bit, \
                 before and after swapping slot 0 in {}",
                good("ok"),
                time(self.swap.swap_us)
            ),
            wrong => format!("{} {} of {checked} elements are outside the bound", bad("mismatch"), grouped(wrong)),
        };
        out
    }

    fn mix_name(&self) -> String {
        let name = serde_json::to_value(self.mix).unwrap_or_default();
        name.as_str().unwrap_or_default().to_owned()
    }
}

impl AdapterLine {
    fn cells(&self, slot: &str) -> [String; 6] {
        [
            slot.to_owned(),
            self.name.clone(),
            self.sites.to_string(),
            self.rank_max.to_string(),
            scalar(self.scale),
            bytes(self.bytes as u64),
        ]
    }
}

fn time(micros: f64) -> String {
    match micros {
        us if us < 1000.0 => format!("{us:.1} us"),
        us if us < 1e6 => format!("{:.2} ms", us / 1e3),
        us => format!("{:.2} s", us / 1e6),
    }
}
