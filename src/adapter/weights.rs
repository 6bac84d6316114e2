//! An adapter in host memory, checked and complete.

use std::borrow::Cow;

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

impl HostMatrix {
    /// The elements as `dtype`, each rounded once, little-endian; borrowed where nothing changes.
    ///
    /// # Errors
    /// The index and value of the first finite element that `dtype` can't hold.
    pub fn to(&self, dtype: DType) -> Result<Cow<'_, [u8]>, (usize, f32)> {
        if dtype == self.dtype {
            return Ok(Cow::Borrowed(&self.bytes));
        }
        let values = self.dtype.decode(&self.bytes);
        let overflow = |v: &f32| v.is_finite() && !dtype.round(*v).is_finite();
        if let Some(index) = values.iter().position(overflow) {
            return Err((index, values[index]));
        }
        let mut bytes = Vec::new();
        dtype.encode(&values, &mut bytes);
        Ok(Cow::Owned(bytes))
    }
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
    /// The adapter's own scale: that of every module which no pattern changes.
    pub scale: f32,
    /// Its pairs, by site.
    pub pairs: Vec<HostPair>,
    /// What was accepted with a remark.
    pub notices: Vec<Notice>,
}
