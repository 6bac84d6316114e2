//! The kernel contract, stated once: constants, parameter blocks, operands and grids of every kernel.
//!
//! Host code and the three kernel languages read the same statement: [`render`] prints it as
//! `kernels-cuda/contract.cuh`, `kernels-spirv/contract.glsl` and `kernels-wgsl/contract.wgsl`,
//! and a test compares those files with what it would print.
//!
//! ```text
//! z[row][r]  = sum_k A[slot(row)][r][k] * x[row][k]                  f32, k in a fixed order
//! y[row][n] += scale * sum_r B[slot(row)][n][r] * z[row][r]          f32, rounded once at the store
//! slot(row) < 0, or outside the window, or cell 0, or rank 0: y[row] keeps its bits
//! ```
//!
//! where `scale = scales[site][slot] * row.scale`. Where the slot's rank word has [`RANK_VECTORS`], the expand is
//!
//! ```text
//! y[row][n] += row.scale * ((gain[n] - 1) * y[row][n] + offset[n] + scales[site][slot] * gain[n] * sum_r ...)
//! ```
//!
//! which serves DoRA (gain: magnitude over norm) and LoRA biases (gain 1). There `row.scale` scales the adapter's whole
//! change: 0 leaves y, 1 is the adapter as it was trained, and nothing that the gain was made from is made again for
//! what lies between. A gain of exactly 1 has no term in y, so that an infinite y stays one.
//!
//! All arithmetic is f32; there are no floating-point atomics; each sum is taken in an order that depends on the
//! site's shape alone, so a row has the same bits alone and in any batch, in any slot, at any `max_rank`.

mod block;
mod check;
pub mod render;
mod tokens;

pub use block::{Pack, Params, RowRef, SiteParams, Tile};
pub(crate) use check::check;
pub use tokens::overlay_ids_bytes;

use std::ops::Range;

use crate::dtype::DType;
use crate::error::{Error, Result};

/// Sites that one launch may serve: those that share an input, such as q, k, v.
pub const MAX_SITES: usize = 4;
/// Operands of the widest kernel; WebGPU's default limit of storage buffers in a stage.
pub const MAX_OPERANDS: usize = 8;
/// Threads of a workgroup, in every kernel. WebGPU's default limit is 256.
pub const THREADS: u32 = 128;
/// BGMV shrink: rank rows of A that a workgroup reduces, `THREADS / BGMV_SHRINK_RANKS` lanes each.
pub const BGMV_SHRINK_RANKS: u32 = 4;
/// BGMV expand: outputs of one row that a workgroup writes, two adjacent ones a thread.
pub const BGMV_EXPAND_OUTPUTS: u32 = 256;
/// BGMV: most rows in a [`Pack`].
pub const BGMV_PACK_ROWS: usize = 8;
/// SGMV: rows in a tile. All rows of a tile have one slot.
pub const SGMV_TILE_ROWS: u32 = 16;
/// SGMV shrink: rank rows of A that a workgroup takes for its tile.
pub const SGMV_SHRINK_RANKS: u32 = 16;
/// SGMV expand: outputs that a workgroup writes for its tile.
pub const SGMV_EXPAND_OUTPUTS: u32 = 32;
/// SGMV: terms of a sum that pass through workgroup memory at a time.
pub const SGMV_DEPTH: u32 = 32;
/// Largest rank that a pool may be set up for.
pub const MAX_RANK: u32 = 512;
/// The part of a slot's rank word at a site that is its rank.
pub const RANK_MASK: u32 = 0xffff;
/// Set in a slot's rank word at a site, above the rank: two f32 vectors, `gain[out_features]` and then
/// `offset[out_features]`, lie behind B's `out_features` rows of the launch's stride, each padded to [`vector_len`].
/// Where they don't fit a site's span, its rows are skipped.
pub const RANK_VECTORS: u32 = 1 << 16;
/// BGMV: most parts that a shrink leaves a sum over columns in ([`Params::z_parts`]).
pub const Z_PARTS: u32 = 8;
/// BGMV: ranks that a site has room for in z are multiples of this, where sums may be left in parts.
pub const Z_RANKS: u32 = 16;
/// Largest number of token rows that an overlay may be set up for: what a rank word holds below [`RANK_VECTORS`].
pub const MAX_TOKEN_ROWS: u32 = 65_535;
/// overlay_logits: token rows of a slot that a workgroup takes for its row, `THREADS / OVERLAY_ROWS` lanes each.
pub const OVERLAY_ROWS: u32 = 4;
/// Vectors behind B are padded to multiples of this many f32: each begins at a multiple of 16 bytes, as matrices do.
pub const VECTOR_ALIGN: u32 = 4;
/// expert_rows: operand `tokens` names each row's place among the batch's `tokens * top_k`; without, rows are in that order.
pub const ROUTED_TOKENS: u32 = 1;
/// expert_rows: operand `experts` holds `experts + 1` prefix sums, the first row of each expert and the end of the
/// last; without, the expert of each row.
pub const ROUTED_OFFSETS: u32 = 2;
/// A's and B's row strides are multiples of this many elements: 16 bytes in the 2-byte types.
pub const STRIDE_ALIGN: u32 = 8;

/// f32 from the start of one vector behind B to the end of its padding.
pub const fn vector_len(out_features: u32) -> u64 {
    (out_features as u64).next_multiple_of(VECTOR_ALIGN as u64)
}

/// What a kernel may do with an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Only read.
    Read,
    /// Read and written. Written operands of one launch never overlap each other or a read one.
    Write,
}

/// One operand of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Its name in the kernels.
    pub name: &'static str,
    /// Read or written.
    pub access: Access,
}

const fn read(name: &'static str) -> Operand {
    Operand { name, access: Access::Read }
}

const fn write(name: &'static str) -> Operand {
    Operand { name, access: Access::Write }
}

/// The kernels, as every backend has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kernel {
    /// z from x and A, a workgroup for a row and [`BGMV_SHRINK_RANKS`] ranks.
    BgmvShrink,
    /// y from z and B, a workgroup for a row and [`BGMV_EXPAND_OUTPUTS`] outputs.
    BgmvExpand,
    /// z from x and A, a workgroup for a tile and [`SGMV_SHRINK_RANKS`] ranks.
    SgmvShrink,
    /// y from z and B, a workgroup for a tile and [`SGMV_EXPAND_OUTPUTS`] outputs.
    SgmvExpand,
    /// z of tokens from an embedding's transposed A, a workgroup for a row; an expand adds its product with B.
    EmbedShrink,
    /// Rows of an embedding replaced in what was gathered from it, a workgroup for a row.
    OverlayEmbed,
    /// Logits of replaced rows of a head, a workgroup for a row and [`OVERLAY_ROWS`] of its slot's token rows.
    OverlayLogits,
    /// The batch of a routed layer from that of its tokens, a thread for a row: each row of a token and one of its
    /// experts gets the slot `slot(token) * slot_stride + expert`, by which the kernels above serve experts.
    ExpertRows,
    /// The tiles of such a batch, a thread for a row. They are in the order of their rows, the first ones in use: of each run of
    /// rows of one slot among the [`THREADS`] of a workgroup, all but the last have [`SGMV_TILE_ROWS`] rows.
    ExpertTiles,
}

/// Bytes of z for sums in `parts`: [`Params::z_parts`].
pub fn z_bytes(rows: u64, sites: u64, max_rank: u32, parts: u32) -> u64 {
    let ranks = u64::from(max_rank.next_multiple_of(Z_RANKS));
    (sites * ranks * u64::from(parts) * 4).saturating_mul(rows)
}

impl Kernel {
    /// All kernels.
    pub const ALL: [Kernel; 9] = [
        Kernel::BgmvShrink,
        Kernel::BgmvExpand,
        Kernel::SgmvShrink,
        Kernel::SgmvExpand,
        Kernel::EmbedShrink,
        Kernel::OverlayEmbed,
        Kernel::OverlayLogits,
        Kernel::ExpertRows,
        Kernel::ExpertTiles,
    ];

    /// File stem and entry point: `bgmv_shrink`, ...
    pub const fn name(self) -> &'static str {
        match self {
            Kernel::BgmvShrink => "bgmv_shrink",
            Kernel::BgmvExpand => "bgmv_expand",
            Kernel::SgmvShrink => "sgmv_shrink",
            Kernel::SgmvExpand => "sgmv_expand",
            Kernel::EmbedShrink => "embed_shrink",
            Kernel::OverlayEmbed => "overlay_embed",
            Kernel::OverlayLogits => "overlay_logits",
            Kernel::ExpertRows => "expert_rows",
            Kernel::ExpertTiles => "expert_tiles",
        }
    }

    /// The operands in order. A launch may leave out trailing ones that it has no use for: y operands that no site
    /// names, tokens that are not named.
    pub const fn operands(self) -> &'static [Operand] {
        const SHRINK: &[Operand] = &[read("batch"), read("tables"), read("weights"), read("x"), write("z")];
        const EXPAND: &[Operand] = &[
            read("batch"),
            read("tables"),
            read("weights"),
            read("z"),
            write("y0"),
            write("y1"),
            write("y2"),
            write("y3"),
        ];
        const EMBED: &[Operand] = &[read("batch"), read("tables"), read("weights"), read("ids"), write("z")];
        const OVERLAY: &[Operand] = &[read("batch"), read("tables"), read("weights"), read("ids"), write("y0")];
        const LOGITS: &[Operand] = &[read("batch"), read("tables"), read("weights"), read("x"), write("y0")];
        const EXPERT_ROWS: &[Operand] = &[read("batch"), read("experts"), write("rows"), read("tokens")];
        const EXPERT_TILES: &[Operand] = &[write("rows")];
        match self {
            Kernel::BgmvShrink | Kernel::SgmvShrink => SHRINK,
            Kernel::BgmvExpand | Kernel::SgmvExpand => EXPAND,
            Kernel::EmbedShrink => EMBED,
            Kernel::OverlayEmbed => OVERLAY,
            Kernel::OverlayLogits => LOGITS,
            Kernel::ExpertRows => EXPERT_ROWS,
            Kernel::ExpertTiles => EXPERT_TILES,
        }
    }

    /// Whether this is one of those that work on token ids and replaced rows.
    pub const fn is_tokens(self) -> bool {
        matches!(self, Kernel::EmbedShrink | Kernel::OverlayEmbed | Kernel::OverlayLogits)
    }

    /// Whether this is one of the four that apply pairs to linears.
    pub const fn is_pair(self) -> bool {
        self.is_shrink() || self.is_expand()
    }

    /// Whether this is the first half of an op, which writes z from x.
    pub const fn is_shrink(self) -> bool {
        matches!(self, Kernel::BgmvShrink | Kernel::SgmvShrink)
    }

    /// Whether this is the second half of an op, which writes y.
    pub const fn is_expand(self) -> bool {
        matches!(self, Kernel::BgmvExpand | Kernel::SgmvExpand)
    }

    /// Workgroups in x (rows or tiles, times parts of the rank or of the outputs) and in z (sites).
    ///
    /// Work item `i` of x is row or tile `i / parts`, part `i % parts`. A device whose x dimension is
    /// smaller folds x into x and y ([`fold`]); kernels unfold with `i = y * groups_x + x` and leave when
    /// `i` is past the end.
    pub fn groups(self, params: &Params) -> (u64, u32) {
        let (units, parts) = match self {
            Kernel::EmbedShrink | Kernel::OverlayEmbed | Kernel::OverlayLogits => return tokens::groups(self, params),
            Kernel::ExpertRows | Kernel::ExpertTiles => return (params.rows.div_ceil(THREADS).into(), 1),
            Kernel::BgmvShrink => (params.rows, params.max_rank.div_ceil(BGMV_SHRINK_RANKS)),
            Kernel::BgmvExpand => (params.rows, params.max_out.div_ceil(BGMV_EXPAND_OUTPUTS)),
            Kernel::SgmvShrink => (params.tiles, params.max_rank.div_ceil(SGMV_SHRINK_RANKS)),
            Kernel::SgmvExpand => (params.tiles, params.max_out.div_ceil(SGMV_EXPAND_OUTPUTS)),
        };
        (u64::from(units) * u64::from(parts), params.sites)
    }

    /// Bytes that each operand must hold for `params`, in the order of [`Kernel::operands`].
    /// The weights operand may have any length: cells are checked against it in the kernel.
    pub fn extents(self, spec: Spec, params: &Params) -> Vec<u64> {
        if self.is_tokens() {
            return tokens::extents(self, spec, params);
        }
        match self {
            Kernel::ExpertRows => return expert_rows_extents(params),
            Kernel::ExpertTiles => return vec![routed_rows_bytes(params)],
            _ => {}
        }
        let sites = &params.site[..(params.sites as usize).min(MAX_SITES)];
        let rows = u64::from(params.rows);
        let matrix = |rows: u64, stride: u32, offset: u64, width: u32, size: u64| {
            // At most 2^64 - 1 elements, since each number is below 2^32; their bytes may be more.
            if rows == 0 {
                0
            } else {
                ((rows - 1) * u64::from(stride) + offset + u64::from(width)).saturating_mul(size)
            }
        };
        let strided = |stride: u32, offset: u64, width: u32, size: u64| matrix(rows, stride, offset, width, size);
        let batch_rows = (u64::from(params.row_first) + rows) * size_of::<RowRef>() as u64;
        let batch_tiles = u64::from(params.tiles_at) * 4 + u64::from(params.tiles) * size_of::<Tile>() as u64;
        let batch_packs = u64::from(params.packs_at) * 4;
        let batch_counts = if params.counts_at == 0 { 0 } else { (u64::from(params.counts_at) + 1) * 4 };
        let batch_x_rows = match params.x_rows_at {
            0 => 0,
            at => (u64::from(at) + u64::from(params.row_first) + rows) * 4,
        };
        let slots = u64::from(params.slots);
        let tables = sites
            .iter()
            .map(|s| {
                let cells = u64::from(s.cells) + 2 * slots;
                cells.max(u64::from(s.ranks) + slots).max(u64::from(s.scales) + slots) * 4
            })
            .max()
            .unwrap_or(0);
        let z =
            sites.iter().map(|s| strided(params.z_stride, s.z_offset.into(), params.max_rank, 4)).max().unwrap_or(0);
        let z = z.max(z_bytes(rows, sites.len() as u64, params.max_rank, params.z_parts));
        let mut out = vec![batch_rows.max(batch_tiles).max(batch_packs).max(batch_counts).max(batch_x_rows), tables, 0];
        if self.is_expand() {
            out.push(z);
            for y in 0..MAX_SITES as u32 {
                let of_y = sites.iter().filter(|s| s.y_operand == y);
                out.push(
                    of_y.map(|s| strided(s.y_stride, s.y_offset.into(), s.out_features, spec.act.size()))
                        .max()
                        .unwrap_or(0),
                );
            }
        } else {
            let x_rows = if params.x_rows_at == 0 { rows } else { params.x_rows.into() };
            out.push(matrix(x_rows, params.x_stride, 0, params.in_features, spec.act.size()));
            out.push(z);
        }
        out
    }
}

/// [`Kernel::extents`] of expert_rows.
fn expert_rows_extents(params: &Params) -> Vec<u64> {
    let rows = u64::from(params.rows);
    let words = if params.routed & ROUTED_OFFSETS == 0 { rows } else { u64::from(params.experts) + 1 };
    let tokens = if params.routed & ROUTED_TOKENS == 0 { 0 } else { rows };
    vec![u64::from(params.x_rows) * size_of::<RowRef>() as u64, words * 4, routed_rows_bytes(params), tokens * 4]
}

/// Bytes that the parts of a routed layer's batch reach to.
fn routed_rows_bytes(params: &Params) -> u64 {
    routed_parts(params).into_iter().map(|part| part.end).max().unwrap_or(0) * 4
}

/// Words of a routed layer's batch: rows, and of tiles, rows of x and counts what there is.
pub(crate) fn routed_parts(params: &Params) -> Vec<Range<u64>> {
    let rows = u64::from(params.rows);
    let part = |at: u32, words: u64| u64::from(at)..u64::from(at) + words;
    let mut parts = vec![part(0, 2 * rows)];
    parts.extend((params.tiles != 0).then(|| part(params.tiles_at, 4 * rows)));
    parts.extend((params.x_rows_at != 0).then(|| part(params.x_rows_at, rows)));
    parts.extend((params.counts_at != 0).then(|| part(params.counts_at, 1 + rows.div_ceil(THREADS.into()))));
    parts
}

/// What a kernel is specialised on. Shapes never are: they are run-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Spec {
    /// Element type of x and y.
    pub act: DType,
    /// Element type of A and B in the pool.
    pub weight: DType,
}

impl std::fmt::Display for Spec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}_{}", self.act, self.weight)
    }
}

/// `groups` workgroups as x and y of a device whose dimensions hold at most `max_x` and `max_y`.
///
/// # Errors
/// [`Error::Limit`] when even both together are too few.
pub fn fold(groups: u64, max_x: u32, max_y: u32) -> Result<[u32; 2]> {
    if groups <= u64::from(max_x) {
        return Ok([groups as u32, 1]);
    }
    // The last row of a fold may be part empty: keep y small by taking x as large as it goes.
    let y = groups.div_ceil(u64::from(max_x));
    let x = groups.div_ceil(y);
    if y > u64::from(max_y) || x * y > u64::from(u32::MAX) {
        let limit = (u64::from(max_x) * u64::from(max_y)).min(u32::MAX.into());
        return Err(Error::Limit { what: "number of workgroups", found: groups, limit, hint: "" });
    }
    Ok([x as u32, y as u32])
}

/// Number of y operands that `params` names.
pub fn outputs(params: &Params) -> usize {
    let sites = &params.site[..(params.sites as usize).min(MAX_SITES)];
    sites.iter().map(|s| s.y_operand as usize + 1).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_multiples_of_16_bytes_as_std430_and_wgsl_need_in_arrays() {
        assert_eq!(size_of::<SiteParams>() % 16, 0);
        assert_eq!(size_of::<Params>() % 16, 0);
        assert_eq!(std::mem::offset_of!(Params, site) % 16, 0);
        assert_eq!(size_of::<Tile>(), 16);
        assert_eq!(size_of::<Pack>(), 48);
    }

    #[test]
    fn extents_beyond_64_bits_are_refused_not_wrapped() {
        let mut params =
            Params { rows: u32::MAX, x_stride: u32::MAX, in_features: u32::MAX, sites: 1, ..Params::default() };
        params.site[0].out_features = u32::MAX;
        params.site[0].y_stride = u32::MAX;
        let spec = Spec { act: DType::F32, weight: DType::F32 };
        assert_eq!(Kernel::BgmvShrink.extents(spec, &params)[3], u64::MAX);
        assert_eq!(Kernel::BgmvExpand.extents(spec, &params)[4], u64::MAX);
    }

    #[test]
    fn a_fold_covers_every_group_once_and_no_dimension_passes_its_limit() {
        for groups in [0, 1, 65_535, 65_536, 70_000, 131_071, 9_000_000] {
            let [x, y] = fold(groups, 65_535, 65_535).unwrap();
            assert!(x <= 65_535 && y <= 65_535);
            assert!(u64::from(x) * u64::from(y) >= groups);
            assert!(groups == 0 || u64::from(x) * u64::from(y - 1) < groups);
        }
        assert!(fold(1 << 33, 65_535, 65_535).is_err());
    }
}
