//! The shape of a site: what it is, and how a slot's part of it lies in memory.

use serde::Serialize;

use crate::contract::{STRIDE_ALIGN, overlay_ids_bytes, vector_len};
use crate::dtype::DType;

/// What a site is, and so how a slot's part of it lies in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SiteKind {
    /// A linear: `A[rank][in_features]` and `B[out_features][rank]`.
    #[default]
    Linear,
    /// An embedding, whose input is one token's number: A lies transposed, `A^T[in_features][rank]`, so that a token's
    /// part is contiguous. `in_features` is the vocabulary.
    Embedding,
    /// Rows of an embedding or head that an adapter replaces: `ids[capacity]`, ascending u32, padded to 16 bytes, then
    /// `rows[capacity][in_features]`. `in_features` is the width of a row, `out_features` the vocabulary; B is empty.
    TokenRows {
        /// Most rows of one adapter, 1..=65,535.
        capacity: u32,
        /// Type of the rows: best that of the served table, which then loses nothing to them nor they to it.
        dtype: DType,
    },
}

/// Shape of a site as the layout needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SiteShape {
    /// Sites of one layer are kept together.
    pub layer: usize,
    /// What it is.
    pub kind: SiteKind,
    /// Columns of A.
    pub in_features: u32,
    /// Rows of B.
    pub out_features: u32,
    /// Whether there is room for gains and offsets behind B.
    pub vectors: bool,
}

impl SiteShape {
    /// Elements between rows of A, of A^T, or of replaced rows.
    pub(super) fn a_stride(&self, max_rank: u32) -> u32 {
        match self.kind {
            SiteKind::Linear | SiteKind::TokenRows { .. } => stride(self.in_features),
            SiteKind::Embedding => stride(max_rank),
        }
    }

    /// Bytes of A and B, each a multiple of 16.
    pub(super) fn bytes(&self, max_rank: u32, element: u64) -> [u64; 2] {
        let a_row = u64::from(self.a_stride(max_rank));
        let vectors = if self.vectors { 2 * 4 * vector_len(self.out_features) } else { 0 };
        let b = u64::from(self.out_features) * u64::from(stride(max_rank)) * element + vectors;
        match self.kind {
            SiteKind::Linear => [u64::from(max_rank) * a_row * element, b],
            SiteKind::Embedding => [u64::from(self.in_features) * a_row * element, b],
            SiteKind::TokenRows { capacity, dtype } => {
                [overlay_ids_bytes(capacity) + u64::from(capacity) * a_row * dtype.size(), 0]
            }
        }
    }
}

/// Which matrix of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// `A[rank][in_features]`, rows `a_stride` elements apart; in other kinds of sites what [`SiteKind`] says.
    A,
    /// `B[out_features][rank]`, rows `b_stride` elements apart, and behind it the gains and offsets of pairs that have
    /// them, where the pool has room for them; empty for token rows.
    B,
}

/// Elements between rows that hold `width` elements.
pub(super) fn stride(width: u32) -> u32 {
    width.next_multiple_of(STRIDE_ALIGN)
}
