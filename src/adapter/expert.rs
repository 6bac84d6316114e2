//! One expert's pair of a routed linear, as adapters hold it.

use sha2::{Digest, Sha256};

use super::SiteId;
use super::weights::{Adapter, HostMatrix};

/// One expert's pair: `delta = scale * B * A * x` for the rows that the router sends to it.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertPair {
    /// The linear that all experts of the layer have: `model.layers.0.mlp.experts.gate_up_proj`.
    pub site: SiteId,
    /// Which expert.
    pub expert: u32,
    /// Number of experts of the layer, as far as it is known.
    pub experts: u32,
    /// `A[rank][in_features]`
    pub a: HostMatrix,
    /// `B[out_features][rank]`
    pub b: HostMatrix,
    /// Scale of the delta, patterns applied.
    pub scale: f32,
}

impl ExpertPair {
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

impl Adapter {
    /// Largest rank of its experts' pairs; 0 without any.
    pub fn max_expert_rank(&self) -> usize {
        self.experts.iter().map(ExpertPair::rank).max().unwrap_or(0)
    }
}

/// The digest of an adapter that has these experts beside what `digest` is of.
pub(super) fn digest(digest: [u8; 32], experts: &[ExpertPair]) -> [u8; 32] {
    if experts.is_empty() {
        return digest;
    }
    let mut sha = Sha256::new();
    sha.update(b"lorapool experts 1\0");
    let mut sized = |bytes: &[u8]| {
        sha.update((bytes.len() as u64).to_le_bytes());
        sha.update(bytes);
    };
    sized(&digest);
    for pair in experts {
        sized(pair.site.path.as_bytes());
        sized(&[pair.expert.to_le_bytes(), pair.scale.to_bits().to_le_bytes()].concat());
        for matrix in [&pair.a, &pair.b] {
            sized(matrix.dtype.name().as_bytes());
            sized(&[(matrix.rows as u64).to_le_bytes(), (matrix.cols as u64).to_le_bytes()].concat());
            sized(&matrix.bytes);
        }
    }
    sha.finalize().into()
}
