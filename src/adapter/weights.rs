//! An adapter in host memory, checked and complete.

use super::SiteId;
use crate::dtype::DType;

/// A matrix in host memory: row-major, no padding.
#[derive(Clone, Debug)]
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

/// A site's pair: `delta = scale * B * A * x`.
#[derive(Clone, Debug)]
pub struct HostPair {
    /// Where it applies.
    pub site: SiteId,
    /// `A[rank][in_features]`
    pub a: HostMatrix,
    /// `B[out_features][rank]`
    pub b: HostMatrix,
    /// Scale of this module: alpha/rank, or alpha/sqrt(rank) under rsLoRA, patterns applied.
    pub scale: f32,
}

impl HostPair {
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

/// An adapter that passed every check.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// SHA-256 over config and weights: same digest, same answers.
    pub digest: [u8; 32],
    /// Its pairs, by site.
    pub pairs: Vec<HostPair>,
    /// What was accepted with a remark.
    pub notices: Vec<Notice>,
}
