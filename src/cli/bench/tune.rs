//! The cases in every way in which the device can run its kernels, beside the way that is chosen for it.

use std::collections::BTreeMap;
use std::sync::Arc;

use lorapool::backend::{Caps, GpuBackend};
use lorapool::{DType, Result};
use serde::Serialize;

use super::super::console::{render, table};
use super::super::progress::Progress;
use super::case::Case;
use super::shapes::Shapes;

/// One case.
#[derive(Debug, Serialize)]
struct Line {
    #[serde(flatten)]
    case: Case,
    /// As the measured table has it.
    chosen_us: f64,
    /// By variant.
    variants_us: BTreeMap<&'static str, f64>,
    /// The variant with the least time.
    fastest: &'static str,
    /// What is chosen, over the least time.
    chosen_over_fastest: f64,
}

/// The document.
#[derive(Debug, Serialize)]
pub struct Report {
    backend: &'static str,
    device: String,
    driver: String,
    api: String,
    shapes: String,
    dtype: DType,
    variants: Vec<&'static str>,
    results: Vec<Line>,
}

/// Times `cases`, sorted by rank, in each variant and in the chosen one.
pub fn run(
    gpu: &Arc<dyn GpuBackend>,
    shapes: &Shapes,
    cases: &[Case],
    dtype: DType,
    samples: usize,
    seed: u64,
) -> Result<Report> {
    let variants = gpu.variants();
    let mut progress = Progress::new("cases", cases.len() * (variants.len() + 1));
    let mut times = |gpu: &Arc<dyn GpuBackend>| -> Result<Vec<f64>> {
        let mut medians = Vec::with_capacity(cases.len());
        for cases in cases.chunk_by(|a, b| a.rank == b.rank) {
            let slots = cases.iter().map(|case| case.adapters).max().unwrap_or(1);
            progress.start("filling the pool");
            let filled = shapes.fill(gpu, cases[0].rank, slots, dtype)?;
            for case in cases {
                progress.start(&case.name);
                medians.push(filled.run(case, samples, seed)?.0.quantile(0.5));
                progress.done();
            }
        }
        Ok(medians)
    };
    let chosen = times(gpu)?;
    let mut by_variant = Vec::new();
    for variant in &variants {
        by_variant.push((*variant, times(&gpu.limited_to(variant)?)?));
    }
    let line = |(i, case): (usize, &Case)| {
        let variants_us: BTreeMap<_, _> = by_variant.iter().map(|(variant, medians)| (*variant, medians[i])).collect();
        let least = variants_us.iter().min_by(|a, b| a.1.total_cmp(b.1));
        let (fastest, least_us) = least.map_or(("chosen", chosen[i]), |(variant, us)| (*variant, *us));
        let (chosen_us, chosen_over_fastest) = (chosen[i], chosen[i] / least_us);
        Line { case: case.clone(), chosen_us, variants_us, fastest, chosen_over_fastest }
    };
    let results = cases.iter().enumerate().map(line).collect();
    let Caps { backend, device, driver, api, .. } = gpu.caps().clone();
    let shapes = shapes.name.clone();
    Ok(Report { backend, device, driver, api, shapes, dtype, variants, results })
}

impl Report {
    /// For people.
    pub fn text(&self) -> String {
        let mut out = format!(
            "{} on {} ({}, {})\n{}, {}\n\n",
            self.backend, self.device, self.driver, self.api, self.shapes, self.dtype
        );
        let columns: Vec<String> = self.variants.iter().map(|variant| format!("{variant} us")).collect();
        let mut header = vec!["case", "op", "chosen us"];
        header.extend(columns.iter().map(String::as_str));
        header.extend(["fastest", "chosen/fastest"]);
        let numbers: Vec<usize> = (2..3 + self.variants.len()).chain([4 + self.variants.len()]).collect();
        let mut table = table(&header, &numbers);
        for line in &self.results {
            let mut row =
                vec![line.case.name.clone(), line.case.op.name().to_owned(), format!("{:.1}", line.chosen_us)];
            row.extend(self.variants.iter().map(|variant| format!("{:.1}", line.variants_us[variant])));
            row.extend([line.fastest.to_owned(), format!("{:.2}", line.chosen_over_fastest)]);
            table.add_row(row);
        }
        out += &render(&table);
        if self.variants.is_empty() {
            out += "\n\nthis backend has one way to run a kernel: there is nothing to choose";
        }
        out
    }
}
