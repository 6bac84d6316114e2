//! What an adapter is and what loading it would do, site by site, without a device.

use std::path::Path;

use rayon::prelude::*;
use serde::Serialize;

use super::base::BaseModel;
use super::config::PeftAdapterConfig;
use super::load::Loader;
use super::merge::load_merged;
use super::reject::{Code, Reject};
use super::site::SiteId;
use super::suspect::suspicions;
use super::tokens::{HostTokens, RawTokens};
use super::weights::{Adapter, HostPair, Notice, TensorFate};
use crate::contract::vector_len;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Whether an adapter would be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Every tensor has its place.
    Accept,
    /// [`Audit::code`] and [`Audit::message`] say why not.
    Reject,
}

/// Tensors of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TensorCounts {
    /// That are part of a pair.
    pub applied: usize,
    /// In all; 0 where the file could not be read.
    pub total: usize,
}

/// A site that the adapter would change.
#[derive(Clone, Debug, Serialize)]
pub struct AuditSite {
    /// Where.
    #[serde(flatten)]
    pub site: SiteId,
    /// Its true rank.
    pub rank: usize,
    /// Its scale.
    pub scale: f32,
    /// Width of the input.
    #[serde(rename = "in")]
    pub in_features: usize,
    /// Width of the output.
    #[serde(rename = "out")]
    pub out_features: usize,
    /// What the adapter does to the outputs beside the delta.
    pub vectors: Option<Vectors>,
    /// Bytes of A and B in the file's element types, and of gains and offsets.
    pub bytes: u64,
    /// Frobenius norm of scale * B * A: how much the delta changes here.
    pub norm: f64,
    /// Whether it is an embedding, which reads tokens' numbers: `in` is the vocabulary.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub embedding: bool,
}

/// Why a site has gains and offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Vectors {
    /// Rows are rescaled to learnt magnitudes.
    Dora,
    /// lora_B has a bias.
    LoraBias,
}

/// Rows of an embedding or head that the adapter would replace.
#[derive(Clone, Debug, Serialize)]
pub struct AuditTokens {
    /// Where.
    #[serde(flatten)]
    pub site: SiteId,
    /// How many; `None` as long as the table has not been compared with the base's.
    pub count: Option<usize>,
    /// The first of them, ascending.
    pub ids: Vec<u32>,
    /// Rows of the table, where they are known.
    pub vocabulary: Option<usize>,
    /// Elements of a row.
    pub width: usize,
    /// The file's element type.
    pub dtype: DType,
    /// Bytes of the rows in that type, and of the ids.
    pub bytes: u64,
}

impl AuditTokens {
    fn of(tokens: &HostTokens) -> Self {
        Self {
            site: tokens.site.clone(),
            count: Some(tokens.ids.len()),
            ids: tokens.ids.iter().take(IDS).copied().collect(),
            vocabulary: Some(tokens.vocabulary),
            width: tokens.rows.cols,
            dtype: tokens.rows.dtype,
            bytes: ((tokens.rows.bytes.len() + tokens.ids.len() * 4) as u64).next_multiple_of(16),
        }
    }

    fn of_raw(raw: &RawTokens) -> Self {
        let parts = || [&raw.table, &raw.rows].into_iter().flatten();
        Self {
            site: raw.site.clone(),
            count: None,
            ids: raw.trainable.iter().take(IDS).copied().collect(),
            vocabulary: raw.table.as_ref().map(|table| table.rows),
            width: parts().map(|matrix| matrix.cols).next().unwrap_or(0),
            dtype: parts().map(|matrix| matrix.dtype).next().unwrap_or(DType::F32),
            bytes: parts().map(|matrix| (matrix.bytes.len() as u64).next_multiple_of(16)).sum(),
        }
    }
}

/// Token ids that an audit shows of each table.
const IDS: usize = 16;

/// A routed linear some of whose experts the adapter would change.
#[derive(Clone, Debug, Serialize)]
pub struct AuditExperts {
    /// Where.
    #[serde(flatten)]
    pub site: SiteId,
    /// How many experts it changes.
    pub adapted: usize,
    /// Of how many.
    pub experts: usize,
    /// Largest of their ranks.
    pub rank: usize,
    /// Scale of the first.
    pub scale: f32,
    /// Width of the input.
    #[serde(rename = "in")]
    pub in_features: usize,
    /// Width of the output.
    #[serde(rename = "out")]
    pub out_features: usize,
    /// Bytes of their A and B in the file's element types.
    pub bytes: u64,
}

/// The findings. Serialises to the JSON of `lorapool audit --json`.
#[derive(Clone, Debug, Serialize)]
pub struct Audit {
    /// Accept or reject.
    pub verdict: Verdict,
    /// Kind of fault of a rejected adapter.
    pub code: Option<Code>,
    /// Where and what, of a rejected adapter.
    pub message: Option<String>,
    /// What was accepted, or seen before the fault, with a remark; of an accepted adapter also what looks wrong.
    pub notices: Vec<Notice>,
    /// How many tensors would be applied.
    pub tensors: TensorCounts,
    /// Every tensor and what would become of it; empty for a rejected adapter.
    pub fates: Vec<TensorFate>,
    /// The sites, in natural order of their paths; empty for a rejected adapter.
    pub sites: Vec<AuditSite>,
    /// Replaced rows, table by table; empty for a rejected adapter.
    pub tokens: Vec<AuditTokens>,
    /// Its routed linears, in natural order of their paths; empty for a rejected adapter.
    pub experts: Vec<AuditExperts>,
    /// Bytes of all pairs at their true ranks, those of experts among them, and of all replaced rows in the file's element
    /// types, each matrix and vector rounded up to 16 bytes: the least that a slot can take. A pool pads every slot to its
    /// own maximum rank.
    pub slot_bytes: u64,
    /// Content identity, in hexadecimal: see [`Adapter::digest`].
    pub digest: Option<String>,
    /// The config, as far as it could be read.
    pub config: Option<PeftAdapterConfig>,
}

/// Judges the adapter in `dir` as [`load`](super::load) would, against `base` where one is given.
pub fn audit(dir: impl AsRef<Path>, base: Option<&BaseModel>) -> Audit {
    let mut loader = Loader::default();
    match loader.load(dir.as_ref(), base) {
        Ok(adapter) => Audit::of(&adapter),
        Err(reject) => Audit::refused(*reject, loader),
    }
}

/// Judges what [`load_merged`](super::load_merged) would make of these adapters and weights.
///
/// # Errors
/// [`Error::Input`](crate::Error::Input) for no adapter, or a weight that is not finite.
pub fn audit_merged<P: AsRef<Path>>(parts: &[(P, f32)], base: Option<&BaseModel>) -> Result<Audit> {
    match load_merged(parts, base) {
        Ok(adapter) => Ok(Audit::of(&adapter)),
        Err(Error::Reject(reject)) => Ok(Audit::refused(*reject, Loader::default())),
        Err(error) => Err(error),
    }
}

impl Audit {
    /// The findings on an adapter that was refused, with what was seen before.
    fn refused(reject: Reject, loader: Loader) -> Self {
        Audit {
            verdict: Verdict::Reject,
            code: Some(reject.code),
            message: Some(reject.message),
            notices: loader.notices,
            tensors: TensorCounts { applied: 0, total: loader.total },
            fates: Vec::new(),
            sites: Vec::new(),
            tokens: Vec::new(),
            experts: Vec::new(),
            slot_bytes: 0,
            digest: None,
            config: loader.config,
        }
    }

    /// The findings on an adapter that was loaded, with remarks on what looks wrong in it.
    pub fn of(adapter: &Adapter) -> Self {
        let kind = if adapter.config.use_dora { Vectors::Dora } else { Vectors::LoraBias };
        let sites: Vec<_> = adapter.pairs.par_iter().map(|pair| AuditSite::of(pair, kind)).collect();
        let known = adapter.tokens.iter().map(AuditTokens::of);
        let tokens: Vec<_> = known.chain(adapter.raw_tokens.iter().map(AuditTokens::of_raw)).collect();
        let experts = AuditExperts::of(adapter);
        let notices = [adapter.notices.clone(), suspicions(adapter, &sites)].concat();
        let others = tokens.iter().map(|tokens| tokens.bytes).chain(experts.iter().map(|experts| experts.bytes));
        Audit {
            verdict: Verdict::Accept,
            code: None,
            message: None,
            notices,
            tensors: TensorCounts { applied: adapter.tensors_applied(), total: adapter.tensors.len() },
            fates: adapter.tensors.clone(),
            sites,
            slot_bytes: adapter.pairs.iter().map(least_bytes).chain(others).sum(),
            tokens,
            experts,
            digest: Some(adapter.digest.iter().map(|byte| format!("{byte:02x}")).collect()),
            config: Some(adapter.config.clone()),
        }
    }
}

/// Least that a slot can take for a pair.
fn least_bytes(pair: &HostPair) -> u64 {
    let matrices = [&pair.a, &pair.b].map(|matrix| (matrix.bytes.len() as u64).next_multiple_of(16));
    let vectors = if pair.vectors.is_some() { 2 * 4 * vector_len(pair.out_features() as u32) } else { 0 };
    matrices.into_iter().sum::<u64>() + vectors
}

impl AuditExperts {
    fn of(adapter: &Adapter) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        // Experts of one linear are neighbours.
        for pair in &adapter.experts {
            if all.last().is_none_or(|last| last.site != pair.site) {
                all.push(Self {
                    site: pair.site.clone(),
                    adapted: 0,
                    experts: pair.experts as usize,
                    rank: 0,
                    scale: pair.scale,
                    in_features: pair.in_features(),
                    out_features: pair.out_features(),
                    bytes: 0,
                });
            }
            let Some(line) = all.last_mut() else { continue };
            line.adapted += 1;
            line.rank = line.rank.max(pair.rank());
            line.bytes += (pair.a.bytes.len() + pair.b.bytes.len()) as u64;
        }
        all
    }

    /// Bytes that an adapter's experts take in a slot of a pool whose largest rank is theirs.
    pub fn pool_bytes(lines: &[Self], dtype: DType) -> u64 {
        let stride = lines.iter().map(|line| line.rank).max().unwrap_or(0).next_multiple_of(8) as u64;
        let bytes = |line: &Self| {
            let inputs = line.in_features.next_multiple_of(8) as u64;
            line.adapted as u64 * stride * (inputs + line.out_features as u64) * dtype.size()
        };
        lines.iter().map(bytes).sum()
    }
}

impl AuditSite {
    fn of(pair: &HostPair, kind: Vectors) -> Self {
        let vectors = pair.vectors.as_ref().map_or(0, |v| 4 * (v.gain.len() + v.offset.len()));
        AuditSite {
            site: pair.site.clone(),
            rank: pair.rank(),
            scale: pair.scale,
            in_features: pair.in_features(),
            out_features: pair.out_features(),
            vectors: pair.vectors.is_some().then_some(kind),
            bytes: (pair.a.bytes.len() + pair.b.bytes.len() + vectors) as u64,
            norm: norm(pair),
            embedding: pair.embedding,
        }
    }
}

/// Frobenius norm of scale * B * A in f64, without the product: its square is scale^2 * sum((A A^T) o (B^T B)), two
/// matrices of rank x rank.
fn norm(pair: &HostPair) -> f64 {
    let rank = pair.rank();
    let (a, b) = (pair.a.values(), pair.b.values());
    let mut of_b = vec![0f64; rank * rank];
    for row in b.chunks_exact(rank.max(1)) {
        for (i, left) in row.iter().enumerate() {
            let left = f64::from(*left);
            for (sum, right) in of_b[i * rank..i * rank + i + 1].iter_mut().zip(row) {
                *sum += left * f64::from(*right);
            }
        }
    }
    let rows: Vec<_> = a.chunks_exact(pair.in_features().max(1)).collect();
    let mut square = 0.0;
    for (i, left) in rows.iter().enumerate() {
        for (j, right) in rows[..=i].iter().enumerate() {
            let dot: f64 = left.iter().zip(*right).map(|(l, r)| f64::from(*l) * f64::from(*r)).sum();
            square += dot * of_b[i * rank + j] * if i == j { 1.0 } else { 2.0 };
        }
    }
    f64::from(pair.scale).abs() * square.max(0.0).sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::weights::HostMatrix;
    use super::*;

    #[test]
    fn the_norm_is_that_of_the_product() {
        let matrix = |rows: usize, cols: usize, seed: u32| {
            let values: Vec<f32> = (0..rows * cols)
                .map(|i| ((i as u32).wrapping_mul(2654435761).wrapping_add(seed) >> 20) as f32 / 2048.0 - 1.0)
                .collect();
            let mut bytes = Vec::new();
            DType::F32.encode(&values, &mut bytes);
            (HostMatrix { dtype: DType::F32, rows, cols, bytes }, values)
        };
        let ((a, av), (b, bv)) = (matrix(5, 37, 1), matrix(11, 5, 7));
        let pair = HostPair::new(SiteId::from_path("x"), a, b, -1.5);
        let mut sum = 0.0;
        for o in 0..11 {
            for i in 0..37 {
                let product: f64 = (0..5).map(|r| f64::from(bv[o * 5 + r]) * f64::from(av[r * 37 + i])).sum();
                sum += (1.5 * product).powi(2);
            }
        }
        assert!((norm(&pair) / sum.sqrt() - 1.0).abs() < 1e-12);
    }
}
