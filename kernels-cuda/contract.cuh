// Generated from src/contract/ by `cargo run --example render_contract`. Don't edit.
#pragma once

constexpr unsigned int MAX_SITES = 4;
constexpr unsigned int MAX_OPERANDS = 8;
constexpr unsigned int THREADS = 128;
constexpr unsigned int BGMV_SHRINK_RANKS = 4;
constexpr unsigned int BGMV_EXPAND_OUTPUTS = 256;
constexpr unsigned int BGMV_PACK_ROWS = 8;
constexpr unsigned int SGMV_TILE_ROWS = 16;
constexpr unsigned int SGMV_SHRINK_RANKS = 16;
constexpr unsigned int SGMV_EXPAND_OUTPUTS = 32;
constexpr unsigned int SGMV_DEPTH = 32;
constexpr unsigned int MAX_RANK = 512;
constexpr unsigned int RANK_MASK = 65535;
constexpr unsigned int RANK_VECTORS = 65536;
constexpr unsigned int Z_PARTS = 8;
constexpr unsigned int Z_RANKS = 16;
constexpr unsigned int MAX_TOKEN_ROWS = 65535;
constexpr unsigned int OVERLAY_ROWS = 4;
constexpr unsigned int VECTOR_ALIGN = 4;
constexpr unsigned int ROUTED_TOKENS = 1;
constexpr unsigned int ROUTED_OFFSETS = 2;
constexpr unsigned int DTYPE_F32 = 0;
constexpr unsigned int DTYPE_F16 = 1;
constexpr unsigned int DTYPE_BF16 = 2;

// bgmv_shrink: batch, tables, weights, x, z
// bgmv_expand: batch, tables, weights, z, y0, y1, y2, y3
// sgmv_shrink: batch, tables, weights, x, z
// sgmv_expand: batch, tables, weights, z, y0, y1, y2, y3
// embed_shrink: batch, tables, weights, ids, z
// overlay_embed: batch, tables, weights, ids, y0
// overlay_logits: batch, tables, weights, x, y0
// expert_rows: batch, experts, rows, tokens
// expert_tiles: rows

// A row of the batch: which adapter it has. `batch[row]` from word 0 on.
struct RowRef {
    // Slot of the row's adapter; negative: no delta.
    int slot;
    // The row's own multiplier, 1 where none was asked for.
    float scale;
};

// Up to SGMV_TILE_ROWS consecutive rows of one slot. Entry t of the batch's tiles.
struct Tile {
    // Slot of all the tile's rows; negative: nothing to do.
    int slot;
    // Index of the first row in the batch.
    unsigned int first_row;
    // Number of rows, 1..=SGMV_TILE_ROWS; 0: an unused tile.
    unsigned int rows;
    // Unused.
    unsigned int reserved;
};

// Up to BGMV_PACK_ROWS rows of one slot, wherever they are in the batch. Kernels may use packs or take each row by itself.
struct Pack {
    // Slot of all the pack's rows; negative: this pack and those after it are unused.
    int slot;
    // Number of rows, 1..=BGMV_PACK_ROWS.
    unsigned int rows;
    // Their indices in the batch.
    unsigned int row[BGMV_PACK_ROWS];
    // Unused.
    unsigned int reserved0;
    // Unused.
    unsigned int reserved1;
};

// One site of a launch. Word offsets count 4-byte words from the start of the tables operand.
struct SiteParams {
    // Word offset of the cell array: `slots` 8-byte addresses (low word first) of A in a shrink, of B in an expand; 0 = no delta.
    unsigned int cells;
    // Word offset of `slots` u32 rank words: the true rank under RANK_MASK, and RANK_VECTORS where vectors lie behind B.
    unsigned int ranks;
    // Word offset of `slots` f32 scales.
    unsigned int scales;
    // Words from a cell's address that its matrix and vectors may span: a cell that leaves less of the weights operand is skipped.
    unsigned int span;
    // Number of outputs (rows of B).
    unsigned int out_features;
    // Which of the y operands holds the outputs, 0..MAX_SITES.
    unsigned int y_operand;
    // Element of that operand where output 0 of row 0 lies.
    unsigned int y_offset;
    // Elements between rows of y.
    unsigned int y_stride;
    // f32 elements from the start of a z row to this site's part.
    unsigned int z_offset;
    // Unused.
    unsigned int reserved0;
    // Unused.
    unsigned int reserved1;
    // Unused.
    unsigned int reserved2;
};

// Parameters of a launch, the same for every kernel. Row 0 of x, y and z is row `row_first` of the batch.
struct Params {
    // Rows in this launch: x, y and z hold that many.
    unsigned int rows;
    // Index in the batch of the launch's first row.
    unsigned int row_first;
    // Entries of every table array (max_loras).
    unsigned int slots;
    // First slot of the launch's window: rows of other slots are another launch's.
    unsigned int slot_first;
    // Number of slots in the window.
    unsigned int slot_count;
    // Number of sites in use.
    unsigned int sites;
    // Columns of A, elements of a row of x that are read.
    unsigned int in_features;
    // Elements between rows of x.
    unsigned int x_stride;
    // Elements between rows of A.
    unsigned int a_stride;
    // Elements between rows of B.
    unsigned int b_stride;
    // f32 elements between rows of z.
    unsigned int z_stride;
    // Largest rank that a table may name; a larger one is skipped.
    unsigned int max_rank;
    // Word offset of the tiles in the batch operand (SGMV).
    unsigned int tiles_at;
    // Number of tiles (SGMV).
    unsigned int tiles;
    // Address of the weights operand's first byte, low word.
    unsigned int weights_lo;
    // Address of the weights operand's first byte, high word.
    unsigned int weights_hi;
    // Bytes of the weights operand, low word.
    unsigned int weights_len_lo;
    // Bytes of the weights operand, high word.
    unsigned int weights_len_hi;
    // Largest out_features of the sites in use.
    unsigned int max_out;
    // Word offset in the batch operand of its packs, which fill the rest of it (BGMV); 0: there are none.
    unsigned int packs_at;
    // Word offset in the batch operand (expert_rows: in rows) of one u32 a row of the batch: the row of x that it
    // reads, counted from x's first; 0: its own.
    unsigned int x_rows_at;
    // Rows that x holds where `x_rows_at` is not 0; a row that names a later one reads zeros. expert_rows: tokens
    // of the batch.
    unsigned int x_rows;
    // Experts of the routed layer (expert_rows); in kernels that apply pairs 0 where slots aren't those of experts.
    unsigned int experts;
    // Rows that one token has, each with an expert of its own (expert_rows).
    unsigned int top_k;
    // Entries of a table array from one adapter's slot to the next, where each expert has one (expert_rows).
    unsigned int slot_stride;
    // How an expert's row finds token and expert: ROUTED_TOKENS, ROUTED_OFFSETS (expert_rows).
    unsigned int routed;
    // BGMV: parts that a sum over columns may be left in, for the expand of the same pair to add up; 0: it may not. Where
    // it may, how z is laid out is between the two, in rows * sites * z_parts times max_rank rounded up to Z_RANKS f32.
    unsigned int z_parts;
    // Word offset in the batch operand (expert_rows, expert_tiles: in rows) of the number of tiles in use, those after them
    // being unused; 0: any may be in use. Behind it lies, for each THREADS rows, how many tiles begin there: expert_rows
    // leaves that to expert_tiles, which leaves the number.
    unsigned int counts_at;
    // The sites; entries from `sites` on are zero.
    SiteParams site[MAX_SITES];
};
