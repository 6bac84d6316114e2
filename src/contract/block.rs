//! The blocks of 4-byte scalars that host and kernels exchange.

use bytemuck::{Pod, Zeroable};

use super::{BGMV_PACK_ROWS, MAX_SITES, render};

/// Declares a parameter block: a `#[repr(C)]` struct of 4-byte scalars, with its fields listed for [`render`].
macro_rules! block {
    ($(#[doc = $doc:literal])* $name:ident { $($(#[doc = $fdoc:literal])* $field:ident: $ty:tt,)* }) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
        #[repr(C)]
        pub struct $name { $($(#[doc = $fdoc])* pub $field: block!(@rust $ty),)* }
        impl $name {
            /// The block as [`render`] prints it.
            pub const BLOCK: render::Block = render::Block {
                name: stringify!($name),
                doc: &[$($doc),*],
                fields: &[$(render::Field { name: stringify!($field), ty: block!(@ty $ty), doc: &[$($fdoc),*] }),*],
            };
        }
    };
    (@rust sites) => { [SiteParams; MAX_SITES] };
    (@rust rows) => { [u32; BGMV_PACK_ROWS] };
    (@rust $ty:tt) => { $ty };
    (@ty u32) => { render::Type::U32 };
    (@ty i32) => { render::Type::I32 };
    (@ty f32) => { render::Type::F32 };
    (@ty sites) => { render::Type::Sites };
    (@ty rows) => { render::Type::Rows };
}

block! {
    /// A row of the batch: which adapter it has. `batch[row]` from word 0 on.
    RowRef {
        /// Slot of the row's adapter; negative: no delta.
        slot: i32,
        /// The row's own multiplier, 1 where none was asked for.
        scale: f32,
    }
}

block! {
    /// Up to SGMV_TILE_ROWS consecutive rows of one slot. Entry t of the batch's tiles.
    Tile {
        /// Slot of all the tile's rows; negative: nothing to do.
        slot: i32,
        /// Index of the first row in the batch.
        first_row: u32,
        /// Number of rows, 1..=SGMV_TILE_ROWS; 0: an unused tile.
        rows: u32,
        /// Unused.
        reserved: u32,
    }
}

block! {
    /// Up to BGMV_PACK_ROWS rows of one slot, wherever they are in the batch. Kernels may use packs or take each row by itself.
    Pack {
        /// Slot of all the pack's rows; negative: this pack and those after it are unused.
        slot: i32,
        /// Number of rows, 1..=BGMV_PACK_ROWS.
        rows: u32,
        /// Their indices in the batch.
        row: rows,
        /// Unused.
        reserved0: u32,
        /// Unused.
        reserved1: u32,
    }
}

impl Pack {
    /// The most packs that so many rows of so many slots make, whichever way the rows are dealt out.
    pub const fn most(rows: u32, slots: u32) -> u32 {
        let begun = if slots < rows { slots } else { rows };
        if begun == 0 { 0 } else { begun + (rows - begun) / BGMV_PACK_ROWS as u32 }
    }
}

block! {
    /// One site of a launch. Word offsets count 4-byte words from the start of the tables operand.
    SiteParams {
        /// Word offset of the cell array: `slots` 8-byte addresses (low word first) of A in a shrink, of B in an expand; 0 = no delta.
        cells: u32,
        /// Word offset of `slots` u32 rank words: the true rank under RANK_MASK, and RANK_VECTORS where vectors lie behind B.
        ranks: u32,
        /// Word offset of `slots` f32 scales.
        scales: u32,
        /// Words from a cell's address that its matrix and vectors may span: a cell that leaves less of the weights operand is skipped.
        span: u32,
        /// Number of outputs (rows of B).
        out_features: u32,
        /// Which of the y operands holds the outputs, 0..MAX_SITES.
        y_operand: u32,
        /// Element of that operand where output 0 of row 0 lies.
        y_offset: u32,
        /// Elements between rows of y.
        y_stride: u32,
        /// f32 elements from the start of a z row to this site's part.
        z_offset: u32,
        /// Unused.
        reserved0: u32,
        /// Unused.
        reserved1: u32,
        /// Unused.
        reserved2: u32,
    }
}

block! {
    /// Parameters of a launch, the same for every kernel. Row 0 of x, y and z is row `row_first` of the batch.
    Params {
        /// Rows in this launch: x, y and z hold that many.
        rows: u32,
        /// Index in the batch of the launch's first row.
        row_first: u32,
        /// Entries of every table array (max_loras).
        slots: u32,
        /// First slot of the launch's window: rows of other slots are another launch's.
        slot_first: u32,
        /// Number of slots in the window.
        slot_count: u32,
        /// Number of sites in use.
        sites: u32,
        /// Columns of A, elements of a row of x that are read.
        in_features: u32,
        /// Elements between rows of x.
        x_stride: u32,
        /// Elements between rows of A.
        a_stride: u32,
        /// Elements between rows of B.
        b_stride: u32,
        /// f32 elements between rows of z.
        z_stride: u32,
        /// Largest rank that a table may name; a larger one is skipped.
        max_rank: u32,
        /// Word offset of the tiles in the batch operand (SGMV).
        tiles_at: u32,
        /// Number of tiles (SGMV).
        tiles: u32,
        /// Address of the weights operand's first byte, low word.
        weights_lo: u32,
        /// Address of the weights operand's first byte, high word.
        weights_hi: u32,
        /// Bytes of the weights operand, low word.
        weights_len_lo: u32,
        /// Bytes of the weights operand, high word.
        weights_len_hi: u32,
        /// Largest out_features of the sites in use.
        max_out: u32,
        /// Word offset in the batch operand of its packs, which fill the rest of it (BGMV); 0: there are none.
        packs_at: u32,
        /// Word offset in the batch operand (expert_rows: in rows) of one u32 a row of the batch: the row of x that it
        /// reads, counted from x's first; 0: its own.
        x_rows_at: u32,
        /// Rows that x holds where `x_rows_at` is not 0; a row that names a later one reads zeros. expert_rows: tokens
        /// of the batch.
        x_rows: u32,
        /// Experts of the routed layer (expert_rows); in kernels that apply pairs 0 where slots aren't those of experts.
        experts: u32,
        /// Rows that one token has, each with an expert of its own (expert_rows).
        top_k: u32,
        /// Entries of a table array from one adapter's slot to the next, where each expert has one (expert_rows).
        slot_stride: u32,
        /// How an expert's row finds token and expert: ROUTED_TOKENS, ROUTED_OFFSETS (expert_rows).
        routed: u32,
        /// BGMV: parts that a sum over columns may be left in, for the expand of the same pair to add up; 0: it may not. Where
        /// it may, how z is laid out is between the two, in rows * sites * z_parts times max_rank rounded up to Z_RANKS f32.
        z_parts: u32,
        /// Word offset in the batch operand (expert_rows, expert_tiles: in rows) of the number of tiles in use, those after them
        /// being unused; 0: any may be in use. Behind it lies, for each THREADS rows, how many tiles begin there: expert_rows
        /// leaves that to expert_tiles, which leaves the number.
        counts_at: u32,
        /// The sites; entries from `sites` on are zero.
        site: sites,
    }
}
