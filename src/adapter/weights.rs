//! An adapter in host memory, checked and complete.

use std::borrow::Cow;
use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{ExpertPair, HostTokens, PeftAdapterConfig, RawTokens, SiteId};
use crate::dtype::DType;

/// A matrix in host memory: row-major, no padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostMatrix {
    /// Element type of the file, F64 narrowed to F32.
    pub dtype: DType,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// `rows * cols` elements, little-endian.
    pub bytes: Vec<u8>,
}

impl HostMatrix {
    /// The elements as `dtype`, each rounded once to nearest, ties to even, little-endian; borrowed where nothing changes.
    ///
    /// # Errors
    /// The index and value of the first finite element that `dtype` can't hold.
    pub fn to(&self, dtype: DType) -> Result<Cow<'_, [u8]>, (usize, f32)> {
        if dtype == self.dtype {
            return Ok(Cow::Borrowed(&self.bytes));
        }
        let from = self.dtype.size() as usize;
        let mut out = Vec::with_capacity(self.bytes.len() / from * dtype.size() as usize);
        let (mut wide, mut narrow) = ([0f32; CHUNK], [0u16; CHUNK]);
        for (chunk, bytes) in self.bytes.chunks(CHUNK * from).enumerate() {
            let wide = &mut wide[..bytes.len() / from];
            let narrow = &mut narrow[..bytes.len() / from];
            widen(self.dtype, bytes, wide);
            let infinity = match dtype {
                DType::F32 => {
                    wide.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
                    continue;
                }
                DType::F16 => {
                    bytemuck::cast_slice_mut::<u16, f16>(narrow).convert_from_f32_slice(wide);
                    0x7c00
                }
                DType::Bf16 => {
                    bytemuck::cast_slice_mut::<u16, bf16>(narrow).convert_from_f32_slice(wide);
                    0x7f80
                }
            };
            if let Some(i) = (0..wide.len()).find(|i| narrow[*i] & 0x7fff == infinity && wide[*i].is_finite()) {
                return Err((chunk * CHUNK + i, wide[i]));
            }
            narrow.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
        }
        Ok(Cow::Owned(out))
    }

    /// The elements; exact.
    pub fn values(&self) -> Vec<f32> {
        self.dtype.decode(&self.bytes)
    }
}

/// Elements converted at once.
const CHUNK: usize = 1024;

/// Decodes `bytes`, a whole number of elements, into as many floats.
pub(super) fn widen(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => out.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(o, b)| *o = f32::from_le_bytes(*b)),
        DType::F16 => {
            out.iter_mut().zip(bytes.as_chunks::<2>().0).for_each(|(o, b)| *o = f16::from_le_bytes(*b).to_f32())
        }
        DType::Bf16 => {
            out.iter_mut().zip(bytes.as_chunks::<2>().0).for_each(|(o, b)| *o = bf16::from_le_bytes(*b).to_f32())
        }
    }
}

/// What a pair does to its outputs beside the delta, one number an output:
/// `y + row_scale * ((gain - 1) * y + offset + scale * gain * B * A * x)`. Both are finite and of one length.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowVectors {
    /// 1 but under DoRA: magnitude over the norm of the base's row with the delta in it.
    pub gain: Vec<f32>,
    /// The scaled bias of lora_B; under DoRA `(1 - gain)` times the base's bias, which y holds already.
    pub offset: Vec<f32>,
}

impl RowVectors {
    /// Gain and offset.
    pub fn slices(&self) -> [&[f32]; 2] {
        [&self.gain, &self.offset]
    }

    /// Whether they change nothing.
    pub(super) fn is_neutral(&self) -> bool {
        self.gain.iter().all(|gain| *gain == 1.0) && self.offset.iter().all(|offset| *offset == 0.0)
    }
}

/// A site's pair: `delta = scale * B * A * x`.
#[derive(Clone, Debug, PartialEq)]
pub struct HostPair {
    /// Where it applies.
    pub site: SiteId,
    /// `A[rank][in_features]`
    pub a: HostMatrix,
    /// `B[out_features][rank]`
    pub b: HostMatrix,
    /// Scale of this module: alpha/rank, or alpha/sqrt(rank) under rsLoRA, patterns applied.
    pub scale: f32,
    /// Gains and offsets of the outputs: under `lora_bias` and DoRA alone.
    pub vectors: Option<RowVectors>,
    /// Whether the site is an embedding: x is a token's number, which picks a column of A.
    pub embedding: bool,
}

impl HostPair {
    /// A linear's pair.
    pub fn new(site: SiteId, a: HostMatrix, b: HostMatrix, scale: f32) -> Self {
        Self { site, a, b, scale, vectors: None, embedding: false }
    }

    /// Rows of A, columns of B.
    pub fn rank(&self) -> usize {
        self.a.rows
    }

    /// Columns of A.
    pub fn in_features(&self) -> usize {
        self.a.cols
    }

    /// Rows of B.
    pub fn out_features(&self) -> usize {
        self.b.rows
    }
}

/// Something that was accepted but that its owner should know.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Notice {
    /// Stable code, `N_...`.
    pub code: &'static str,
    /// What was found and what was made of it.
    pub message: String,
}

/// A tensor that is handed to the host as it is, such as a classifier's weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTensor {
    /// The base's parameter that it replaces: `classifier.weight`.
    pub name: String,
    /// Element type of the file, F64 narrowed to F32.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<usize>,
    /// Elements, little-endian, row-major.
    pub bytes: Vec<u8>,
}

/// What became of a tensor of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// It is part of a pair, its alpha, bias or magnitudes, or holds rows that replace the base's.
    Applied,
    /// It is the host's to apply: see [`Adapter::unapplied`].
    ForHost,
    /// A copy of the base's own weight, equal to it; nothing to apply.
    BaseCopy,
}

/// A tensor of the file and what became of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorFate {
    /// Its key in the file.
    pub name: String,
    /// Its type in the file, by safetensors' name.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// What became of it.
    pub fate: Fate,
    /// The base's module path that it belongs to.
    pub site: Arc<str>,
}

/// An adapter that passed every check.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// Content identity: SHA-256 over what decides the adapter's answers (site paths, scales, shapes, element types
    /// and bytes of every pair, its vectors, and every unapplied tensor), in the order of paths. Under DoRA vectors hold the
    /// norms of the base's weights, so that the digest is that of the adapter on its base. Same digest, same answers, under
    /// whatever name, key prefix or config spelling they were saved.
    pub digest: [u8; 32],
    /// The adapter's own scale: that of every module which no pattern changes.
    pub scale: f32,
    /// Its pairs, in natural order of their paths.
    pub pairs: Vec<HostPair>,
    /// Rows of embeddings and heads that it replaces, in natural order of their paths.
    pub tokens: Vec<HostTokens>,
    /// What it says of tables that no one has compared with the served ones yet: [`Adapter::with_tables`] makes
    /// [`Adapter::tokens`] of it.
    pub raw_tokens: Vec<RawTokens>,
    /// Its pairs of routed experts, in natural order of their paths, and of experts.
    pub experts: Vec<ExpertPair>,
    /// What was accepted with a remark.
    pub notices: Vec<Notice>,
    /// What the config says.
    pub config: PeftAdapterConfig,
    /// Tensors that the host must apply itself, such as a classifier head; a notice names them.
    pub unapplied: Vec<HostTensor>,
    /// Every tensor of the file, in the order of the file.
    pub tensors: Vec<TensorFate>,
}

impl Adapter {
    /// An adapter of these pairs, as if loaded from files without remarks; its own scale is the first pair's.
    pub fn from_pairs(pairs: Vec<HostPair>) -> Self {
        let scale = pairs.first().map_or(0.0, |pair| pair.scale);
        Self::new(PeftAdapterConfig::default(), scale, pairs, Vec::new())
    }

    pub(super) fn new(
        config: PeftAdapterConfig,
        scale: f32,
        mut pairs: Vec<HostPair>,
        unapplied: Vec<HostTensor>,
    ) -> Self {
        pairs.sort_by(|a, b| super::site::natural(&a.site.path, &b.site.path));
        let mut adapter = Self {
            digest: [0; 32],
            scale,
            pairs,
            tokens: Vec::new(),
            raw_tokens: Vec::new(),
            experts: Vec::new(),
            notices: Vec::new(),
            config,
            unapplied,
            tensors: Vec::new(),
        };
        adapter.digest = adapter.own_digest();
        adapter
    }

    /// With rows that replace those of embeddings and heads, `ids` ascending in each.
    pub fn with_tokens(mut self, mut tokens: Vec<HostTokens>) -> Self {
        tokens.sort_by(|a, b| super::site::natural(&a.site.path, &b.site.path));
        self.tokens = tokens;
        self.digest = self.own_digest();
        self
    }

    /// With tables that have not been compared with the served ones yet; they count in the digest, now and later.
    pub(super) fn with_raw_tokens(mut self, raw_tokens: Vec<RawTokens>) -> Self {
        self.raw_tokens = raw_tokens;
        self.digest = self.own_digest();
        self
    }

    /// With these experts beside its pairs; the digest covers them.
    pub fn with_experts(mut self, mut experts: Vec<ExpertPair>) -> Self {
        experts.sort_by(|a, b| super::site::natural(&a.site.path, &b.site.path).then(a.expert.cmp(&b.expert)));
        self.experts = experts;
        self.digest = self.own_digest();
        self
    }

    /// [`Adapter::digest`] of what it holds.
    fn own_digest(&self) -> [u8; 32] {
        let digest = digest(&self.pairs, &self.unapplied, &self.tokens, &self.raw_tokens);
        super::expert::digest(digest, &self.experts)
    }

    /// Tensors of the file that are part of a pair.
    pub fn tensors_applied(&self) -> usize {
        self.tensors.iter().filter(|t| t.fate == Fate::Applied).count()
    }

    /// Drops the elements of its matrices and keeps all that describes them.
    pub(crate) fn forget_elements(&mut self) {
        for pair in &mut self.pairs {
            (pair.a.bytes, pair.b.bytes) = (Vec::new(), Vec::new());
            pair.vectors = pair.vectors.take().map(|_| RowVectors::default());
        }
        for tokens in &mut self.tokens {
            tokens.rows.bytes = Vec::new();
        }
        for pair in &mut self.experts {
            (pair.a.bytes, pair.b.bytes) = (Vec::new(), Vec::new());
        }
    }

    /// Largest rank of its pairs; 0 without any.
    pub fn max_rank(&self) -> usize {
        self.pairs.iter().map(HostPair::rank).max().unwrap_or(0)
    }
}

/// [`Adapter::digest`].
fn digest(pairs: &[HostPair], unapplied: &[HostTensor], tokens: &[HostTokens], raw_tokens: &[RawTokens]) -> [u8; 32] {
    let mut sha = Sha256::new();
    sha.update(b"lorapool adapter 1\0");
    let mut sized = |bytes: &[u8]| {
        sha.update((bytes.len() as u64).to_le_bytes());
        sha.update(bytes);
    };
    for pair in pairs {
        if pair.embedding {
            sized(b"embedding");
        }
        sized(pair.site.path.as_bytes());
        sized(&pair.scale.to_bits().to_le_bytes());
        for matrix in [&pair.a, &pair.b] {
            sized(matrix.dtype.name().as_bytes());
            sized(&[(matrix.rows as u64).to_le_bytes(), (matrix.cols as u64).to_le_bytes()].concat());
            sized(&matrix.bytes);
        }
        if let Some(RowVectors { gain, offset }) = &pair.vectors {
            // No path begins so.
            sized(b"\0vectors");
            [gain, offset].into_iter().for_each(|values| sized(bytemuck::cast_slice(values)));
        }
    }
    sized(b"unapplied");
    for tensor in unapplied {
        sized(tensor.name.as_bytes());
        sized(tensor.dtype.name().as_bytes());
        sized(&tensor.shape.iter().flat_map(|dim| (*dim as u64).to_le_bytes()).collect::<Vec<_>>());
        sized(&tensor.bytes);
    }
    for tokens in tokens {
        sized(b"token rows");
        tokens.digest(&mut sized);
    }
    for raw in raw_tokens {
        sized(b"raw token rows");
        raw.digest(&mut sized);
    }
    sha.finalize().into()
}
