//! What `lorapool bench` prints.

use lorapool::DType;
use lorapool::backend::Caps;
use serde::Serialize;

use super::super::console::{bytes, render, table};
use super::case::Case;
use super::rig::{Step, Times};
use super::shapes::Shapes;

/// One case's times. Microseconds.
#[derive(Debug, Serialize)]
pub struct Line {
    /// What was timed.
    #[serde(flatten)]
    pub case: Case,
    /// Adapters that the batch has.
    pub adapters_used: u32,
    /// Different pairs of an adapter and an expert that its rows have, over all layers, where experts are timed.
    #[serde(skip_serializing_if = "Option::is_none")]
    expert_pairs: Option<u64>,
    pool_bytes: u64,
    /// The median.
    pub median_us: f64,
    min_us: f64,
    p10_us: f64,
    p90_us: f64,
    max_us: f64,
    samples: usize,
    /// Replays that each sample is the mean of.
    burst: usize,
    floor_bytes: u64,
    /// The least that the device's bandwidth allows.
    pub floor_us: f64,
    over_floor: f64,
    /// The base model's own products for these rows, by the vendor's library; absent where there is none.
    base_us: Option<f64>,
    /// What the step adds to them.
    adds_percent: Option<f64>,
}

impl Line {
    /// From sorted times, the floor's bytes, and bytes per second of a copy.
    pub fn new(case: &Case, step: &Step, pool_bytes: u64, times: &Times, bandwidth: f64, base_us: Option<f64>) -> Self {
        let floor_us = step.floor_bytes as f64 / bandwidth * 1e6;
        let median_us = times.quantile(0.5);
        Self {
            case: case.clone(),
            adapters_used: step.adapters,
            expert_pairs: step.expert_pairs,
            pool_bytes,
            median_us,
            min_us: times.quantile(0.0),
            p10_us: times.quantile(0.1),
            p90_us: times.quantile(0.9),
            max_us: times.quantile(1.0),
            samples: times.micros.len(),
            burst: times.burst,
            floor_bytes: step.floor_bytes,
            floor_us,
            over_floor: median_us / floor_us,
            base_us,
            adds_percent: base_us.map(|base| median_us / base * 100.0),
        }
    }
}

/// The document.
#[derive(Debug, Serialize)]
pub struct Report {
    version: &'static str,
    backend: &'static str,
    device: String,
    driver: String,
    api: String,
    shapes: String,
    sites: usize,
    /// Experts that each token is sent to, where experts are timed.
    #[serde(skip_serializing_if = "Option::is_none")]
    top_k: Option<u32>,
    dtype: DType,
    /// Bytes read and written per second by a copy.
    copy_bytes_per_second: f64,
    /// Bytes that were copied.
    copy_bytes: u64,
    /// Why there is no time of the base model's own products.
    pub no_base: Option<String>,
    /// Linears of the base's routed experts, which are in none of the times.
    experts_left_out: usize,
    /// The cases.
    #[serde(rename = "results")]
    pub lines: Vec<Line>,
}

impl Report {
    /// Without results yet.
    pub fn new(caps: &Caps, shapes: &Shapes, dtype: DType, bandwidth: f64, copied: u64) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            backend: caps.backend,
            device: caps.device.clone(),
            driver: caps.driver.clone(),
            api: caps.api.clone(),
            shapes: shapes.name.clone(),
            sites: shapes.sites(),
            top_k: shapes.top_k(),
            dtype,
            copy_bytes_per_second: bandwidth,
            copy_bytes: copied,
            no_base: None,
            experts_left_out: shapes.experts_left_out,
            lines: Vec::new(),
        }
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.backend
    }

    /// Name of the device.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// What the shapes are called.
    pub fn shapes(&self) -> &str {
        &self.shapes
    }

    /// For people.
    pub fn text(&self) -> String {
        let top_k = self.top_k.map_or(String::new(), |top_k| format!(" of experts, {top_k} experts a token"));
        let mut out = format!(
            "{} on {} ({}, {})\n{}: {} sites{top_k}, {}; copy {:.2} TB/s read and written ({})\n\n",
            self.backend,
            self.device,
            self.driver,
            self.api,
            self.shapes,
            self.sites,
            self.dtype,
            self.copy_bytes_per_second / 1e12,
            bytes(self.copy_bytes),
        );
        let rows = if self.top_k.is_some() { "tokens" } else { "rows" };
        let mut header = vec!["case", "op", rows, "adapters", "rank", "median us", "p10", "p90", "floor us", "x floor"];
        let pairs = self.lines.iter().any(|line| line.expert_pairs.is_some());
        let base = !pairs || self.lines.iter().any(|line| line.base_us.is_some());
        if pairs {
            header.push("pairs");
        }
        if base {
            header.extend(["base us", "adds"]);
        }
        let mut table = table(&header, &(2..header.len()).collect::<Vec<_>>());
        for line in &self.lines {
            let mut row = vec![
                line.case.name.clone(),
                line.case.op.name().to_owned(),
                line.case.rows.to_string(),
                line.adapters_used.to_string(),
                line.case.rank.to_string(),
                format!("{:.1}", line.median_us),
                format!("{:.1}", line.p10_us),
                format!("{:.1}", line.p90_us),
                format!("{:.1}", line.floor_us),
                format!("{:.2}", line.over_floor),
            ];
            if pairs {
                row.push(line.expert_pairs.map_or("-".to_owned(), |pairs| pairs.to_string()));
            }
            if base {
                row.push(line.base_us.map_or("-".to_owned(), |us| format!("{us:.0}")));
                row.push(line.adds_percent.map_or("-".to_owned(), |percent| format!("{percent:.1} %")));
            }
            table.add_row(row);
        }
        out += &render(&table);
        if let Some(reason) = &self.no_base {
            out += &format!("\n\nno time of the base model's own products: {reason}");
        }
        if self.experts_left_out > 0 {
            let linears = self.experts_left_out;
            out += &format!("\n\nnot in these times: {linears} linears of routed experts (--experts times them)");
        }
        out
    }
}
