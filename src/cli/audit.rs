//! `lorapool audit`: what adapters are, what would be applied where, and the verdicts. No device needed.

use std::path::PathBuf;

use clap::Args;
use lorapool::DType;
use lorapool::adapter::{
    Audit as Findings, AuditExperts, AuditSite, AuditTokens, BaseModel, Fate, Notice, Vectors, Verdict,
};
use lorapool::contract::MAX_TOKEN_ROWS;
use lorapool::pool::{PoolSpec, SiteSpec};
use serde::Serialize;

use super::adapters::{AdapterPath, PATHS, open_base};
use super::args::dtype;
use super::console::{Console, bad, bold, bytes, dim, good, remark, render, scalar, table};
use super::failure::{Failure, Status};

/// Judge adapters: what would be applied where, and whether every tensor has its place
///
/// With --base, an adapter is checked against the base's linears: their paths and widths. Without it, the
/// adapter must name them itself, as PEFT's keys do. Prints each site's rank, scale, widths, bytes and the
/// Frobenius norm of scale * B * A, remarks on what looks wrong, and what a pool would take. Of several adapters
/// it prints one line each.
#[derive(Debug, Args)]
#[command(after_help = format!("Exit code 0: all accepted, 2: one or more rejected.\n\
    In JSON one adapter is an object, several are an array of such objects.\n\
    {PATHS}\n\n\
    Examples:\n  \
    lorapool audit adapters/sql\n  \
    lorapool audit adapters/* --base models/llama --max-rank 64 --max-loras 16\n  \
    lorapool audit adapters/sql --base models/llama --json | jq .verdict\n  \
    lorapool audit adapters/sql@0.7+adapters/chat@0.3 --base models/llama"))]
pub struct Audit {
    /// Directory with adapter_config.json and adapter_model.safetensors, or its shards and their index; a GGUF file;
    /// or a sum of several, as below
    #[arg(value_name = "ADAPTER", required = true)]
    adapters: Vec<AdapterPath>,

    /// Directory of the base model, with its config.json, its safetensors or both; of the latter only headers are read,
    /// unless DoRA needs weights
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,

    /// Largest rank of the pool to estimate; an adapter above it is remarked on [default: the adapter's own]
    #[arg(long, value_name = "RANK", value_parser = clap::value_parser!(u32).range(1..=512))]
    max_rank: Option<u32>,

    /// Slots of the pool to estimate
    #[arg(long, value_name = "SLOTS", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65536))]
    max_loras: u32,

    /// Element type of the pool to estimate
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = dtype())]
    dtype: DType,
}

/// What a pool for the adapter would take: every linear of the base, or without one the adapter's own sites.
#[derive(Debug, Serialize)]
struct Pool {
    max_rank: u32,
    max_loras: u32,
    dtype: &'static str,
    sites: usize,
    /// Of weights, in all slots.
    bytes: u64,
    /// Of experts with as many as this adapter has, in all slots.
    expert_bytes: u64,
}

/// The document.
#[derive(Debug, Serialize)]
struct Document {
    adapter: String,
    base: Option<String>,
    #[serde(flatten)]
    findings: Findings,
    /// Of an accepted adapter.
    pool: Option<Pool>,
}

impl Audit {
    /// Judges the adapters.
    pub fn run(self, console: &Console) -> Result<Status, Failure> {
        let base = open_base(self.base.as_deref())?;
        let mut documents = Vec::with_capacity(self.adapters.len());
        for adapter in &self.adapters {
            let mut findings = adapter.audit(base.as_ref())?;
            let pool = self.pool(&mut findings, base.as_ref())?;
            documents.push(Document {
                adapter: adapter.to_string(),
                base: self.base.as_ref().map(|dir| dir.display().to_string()),
                findings,
                pool,
            });
        }
        match &documents[..] {
            [one] => console.result(one, text),
            many => console.result(&many, |many| summary(many)),
        }
        let refused = documents.iter().any(|document| document.findings.verdict == Verdict::Reject);
        Ok(if refused { Status::Refused } else { Status::Done })
    }

    fn pool(&self, findings: &mut Findings, base: Option<&BaseModel>) -> Result<Option<Pool>, Failure> {
        if findings.verdict == Verdict::Reject {
            return Ok(None);
        }
        let rank = largest_rank(findings);
        let max_rank = self.max_rank.unwrap_or((rank as u32).max(1));
        if rank > max_rank as usize {
            let message =
                format!("its largest rank is {rank}, above --max-rank {max_rank}: such a pool would refuse it");
            findings.notices.push(Notice { code: "N_RANK_OVER_POOL", message });
        }
        let vectors = findings.sites.iter().any(|site| site.vectors.is_some());
        let spec = match base {
            Some(base) => PoolSpec { vectors, ..PoolSpec::for_base(base, max_rank, self.max_loras, self.dtype) },
            None => {
                let site = |site: &AuditSite| {
                    let (id, inputs, outputs) = (site.site.clone(), site.in_features as u32, site.out_features as u32);
                    match site.embedding {
                        true => SiteSpec::embedding(id, inputs, outputs),
                        false => SiteSpec::linear(id, inputs, outputs),
                    }
                };
                // Which rows are replaced is known; more than usual make room for more.
                let tokens = |tokens: &AuditTokens| {
                    let rows = (tokens.count? as u32).clamp(1, MAX_TOKEN_ROWS);
                    let (id, vocabulary) = (tokens.site.clone(), tokens.vocabulary? as u32);
                    Some(SiteSpec::token_rows(id, vocabulary, tokens.width as u32, rows, tokens.dtype))
                };
                let sites = findings.sites.iter().map(site);
                let sites = sites.chain(findings.tokens.iter().filter_map(tokens)).collect();
                PoolSpec { sites, max_rank, max_loras: self.max_loras, dtype: self.dtype, vectors }
            }
        };
        let bytes = spec.bytes()?;
        let (max_loras, dtype, sites) = (self.max_loras, self.dtype.name(), spec.sites.len());
        let expert_bytes = AuditExperts::pool_bytes(&findings.experts, self.dtype) * u64::from(max_loras);
        Ok(Some(Pool { max_rank, max_loras, dtype, sites, bytes, expert_bytes }))
    }
}

fn largest_rank(findings: &Findings) -> usize {
    findings.sites.iter().map(|site| site.rank).max().unwrap_or(0)
}

/// Several adapters: a line each, then the remarks.
fn summary(documents: &[Document]) -> String {
    let mut rows =
        table(&["adapter", "verdict", "sites", "tensors", "rank", "bytes", "pool", "notices"], &[2, 3, 4, 5, 6, 7]);
    for Document { adapter, findings, pool, .. } in documents {
        let tensors = findings.tensors;
        let accepted = findings.verdict == Verdict::Accept;
        let or_none = |text: String| if accepted { text } else { "-".to_owned() };
        rows.add_row([
            adapter.clone(),
            findings.code.map_or("accept".to_owned(), |code| format!("reject {code}")),
            or_none(findings.sites.len().to_string()),
            format!("{}/{}", tensors.applied, tensors.total),
            or_none(largest_rank(findings).to_string()),
            or_none(bytes(findings.slot_bytes)),
            pool.as_ref().map_or("-".to_owned(), |pool| bytes(pool.bytes)),
            findings.notices.len().to_string(),
        ]);
    }
    let mut out = render(&rows) + "\n\n";
    for Document { adapter, findings, .. } in documents {
        for notice in &findings.notices {
            out += &remark(adapter, notice);
        }
        if let (Some(code), Some(message)) = (findings.code, &findings.message) {
            out += &format!("{} {adapter}: {code}: {message}\n", bad("reject"));
        }
    }
    let refused = documents.iter().filter(|document| document.findings.verdict == Verdict::Reject).count();
    out += &match refused {
        0 => format!("{} all {}", good("accept"), documents.len()),
        _ => format!("{} {refused} of {}", bad("reject"), documents.len()),
    };
    out
}

fn text(document: &Document) -> String {
    let Document { adapter, findings, pool, .. } = document;
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
    for tokens in &findings.tokens {
        out += &token_line(tokens);
    }
    if !findings.experts.is_empty() {
        out += &format!("\n{}\n", experts(&findings.experts));
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
    if let Some(Pool { max_rank, max_loras, dtype, sites, bytes: size, .. }) = pool {
        out += &format!(
            "{}\n",
            dim(format!("a pool of {sites} sites, {max_loras} slots, rank {max_rank}, {dtype}: {}", bytes(*size)))
        );
    }
    if let Some(Pool { expert_bytes: size @ 1.., max_loras, .. }) = pool {
        let adapted: usize = findings.experts.iter().map(|line| line.adapted).sum();
        let text = format!("a pool of experts with room for {adapted} of each of {max_loras} slots: {}", bytes(*size));
        out += &format!("{}\n", dim(text));
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

/// `replaces 3 of 131 rows of lm_head (0, 5, 130), 588 B`
fn token_line(tokens: &AuditTokens) -> String {
    const SHOWN: usize = 8;
    let ids: Vec<_> = tokens.ids.iter().take(SHOWN).map(u32::to_string).collect();
    let path = &tokens.site.path;
    match (tokens.count, tokens.vocabulary) {
        (Some(count), Some(vocabulary)) => {
            let more = if count > ids.len() { ", ..." } else { "" };
            let ids = ids.join(", ");
            format!("replaces {count} of {vocabulary} rows of {path} ({ids}{more}), {}\n", bytes(tokens.bytes))
        }
        _ => format!("replaces rows of {path}: which ones, only the base's weights tell\n"),
    }
}

fn experts(lines: &[AuditExperts]) -> String {
    let mut rows = table(&["experts of", "adapted", "rank", "scale", "in", "out", "bytes"], &[1, 2, 3, 4, 5, 6]);
    for line in lines {
        rows.add_row([
            line.site.path.to_string(),
            format!("{} of {}", line.adapted, line.experts),
            line.rank.to_string(),
            scalar(line.scale),
            line.in_features.to_string(),
            line.out_features.to_string(),
            bytes(line.bytes),
        ]);
    }
    render(&rows)
}

fn sites(sites: &[AuditSite]) -> String {
    let with = sites.iter().any(|site| site.vectors.is_some());
    let mut header = vec!["site", "rank", "scale", "in", "out", "bytes", "norm of delta"];
    header.extend(with.then_some("with"));
    let mut rows = table(&header, &[1, 2, 3, 4, 5, 6]);
    for line in sites {
        let mut cells = vec![
            line.site.path.to_string(),
            line.rank.to_string(),
            scalar(line.scale),
            line.in_features.to_string(),
            line.out_features.to_string(),
            bytes(line.bytes),
            format!("{:.4}", line.norm),
        ];
        cells.extend(with.then(|| match line.vectors {
            Some(Vectors::Dora) => "DoRA".to_owned(),
            Some(Vectors::LoraBias) => "bias".to_owned(),
            None => String::new(),
        }));
        rows.add_row(cells);
    }
    render(&rows)
}
