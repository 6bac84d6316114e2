//! `lorapool audit`: what an adapter is, what would be applied where, and the verdict. No device needed.

use std::path::PathBuf;

use clap::Args;
use lorapool::adapter::{Audit as Findings, AuditSite, Fate, Verdict, audit};
use serde::Serialize;

use super::adapters::open_base;
use super::console::{Console, bad, bold, bytes, dim, good, remark, render, scalar, table};
use super::failure::{Failure, Status};

/// Judge an adapter: what would be applied where, and whether every tensor has its place
///
/// With --base, the adapter is checked against the base's linears: their paths and widths. Without it, the
/// adapter must name them itself, as PEFT's keys do. Prints each site's rank, scale, widths, bytes and the
/// Frobenius norm of scale * B * A.
#[derive(Debug, Args)]
#[command(after_help = "Exit code 0: accepted, 2: rejected.\n\n\
    Examples:\n  \
    lorapool audit adapters/sql\n  \
    lorapool audit adapters/sql --base models/llama --json | jq .verdict")]
pub struct Audit {
    /// Directory with adapter_config.json and adapter_model.safetensors
    #[arg(value_name = "ADAPTER")]
    adapter: PathBuf,

    /// Directory with the base's config.json and/or safetensors (only headers are read)
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
}

/// The document.
#[derive(Debug, Serialize)]
struct Document {
    adapter: String,
    base: Option<String>,
    #[serde(flatten)]
    findings: Findings,
}

impl Audit {
    /// Judges the adapter.
    pub fn run(self, console: &Console) -> Result<Status, Failure> {
        let base = open_base(self.base.as_deref())?;
        let document = Document {
            adapter: self.adapter.display().to_string(),
            base: self.base.as_ref().map(|dir| dir.display().to_string()),
            findings: audit(&self.adapter, base.as_ref()),
        };
        console.result(&document, text);
        Ok(match document.findings.verdict {
            Verdict::Accept => Status::Done,
            Verdict::Reject => Status::Refused,
        })
    }
}

fn text(document: &Document) -> String {
    let Document { adapter, findings, .. } = document;
    let mut out = format!("{}\n", bold(adapter));
    if let Some(config) = &findings.config {
        let base = config.base_model_name_or_path.as_deref().unwrap_or("an unnamed base");
        let peft = config.peft_version.as_deref().map_or(String::new(), |version| format!(", PEFT {version}"));
        let kind = if config.use_rslora { ", rsLoRA" } else { "" };
        out += &format!("{} for {base}, r {}, alpha {}{kind}{peft}\n", config.peft_type, config.r, config.lora_alpha);
    }
    if !findings.sites.is_empty() {
        out += &format!("\n{}\n", sites(&findings.sites));
    }
    let elsewhere = findings.fates.iter().filter(|tensor| tensor.fate != Fate::Applied);
    for tensor in elsewhere {
        let fate = match tensor.fate {
            Fate::ForHost => "for the host to apply",
            Fate::BaseCopy => "a copy of the base's own weight",
            _ => "not applied",
        };
        out += &format!("{}\n", dim(format!("{} {} {:?}: {fate}", tensor.name, tensor.dtype, tensor.shape)));
    }
    for notice in &findings.notices {
        out += &remark("", notice);
    }
    out.push('\n');
    let tensors = findings.tensors;
    match findings.verdict {
        Verdict::Accept => {
            let (sites, size) = (findings.sites.len(), bytes(findings.slot_bytes));
            out += &format!(
                "{} {sites} sites, {} of {} tensors applied, {size}",
                good("accept"),
                tensors.applied,
                tensors.total
            );
        }
        Verdict::Reject => {
            let code = findings.code.map_or("", |code| code.as_str());
            out += &format!("{} {code}: {}", bad("reject"), findings.message.as_deref().unwrap_or_default());
        }
    }
    out
}

fn sites(sites: &[AuditSite]) -> String {
    let mut rows = table(&["site", "rank", "scale", "in", "out", "bytes", "norm of delta"], &[1, 2, 3, 4, 5, 6]);
    for line in sites {
        rows.add_row([
            line.site.path.to_string(),
            line.rank.to_string(),
            scalar(line.scale),
            line.in_features.to_string(),
            line.out_features.to_string(),
            bytes(line.bytes),
            format!("{:.4}", line.norm),
        ]);
    }
    render(&rows)
}
