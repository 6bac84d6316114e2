// Generated from src/contract/ by `cargo run --example render_contract`. Don't edit.

const uint MAX_SITES = 4;
const uint MAX_OPERANDS = 8;
const uint THREADS = 128;
const uint BGMV_SHRINK_RANKS = 4;
const uint BGMV_EXPAND_OUTPUTS = 256;
const uint BGMV_PACK_ROWS = 8;
const uint SGMV_TILE_ROWS = 16;
const uint SGMV_SHRINK_RANKS = 16;
const uint SGMV_EXPAND_OUTPUTS = 32;
const uint SGMV_DEPTH = 32;
const uint MAX_RANK = 512;
const uint RANK_MASK = 65535;
const uint RANK_VECTORS = 65536;
const uint Z_PARTS = 8;
const uint Z_RANKS = 16;
const uint MAX_TOKEN_ROWS = 65535;
const uint OVERLAY_ROWS = 4;
const uint VECTOR_ALIGN = 4;
const uint ROUTED_TOKENS = 1;
const uint ROUTED_OFFSETS = 2;
const uint DTYPE_F32 = 0;
const uint DTYPE_F16 = 1;
const uint DTYPE_BF16 = 2;

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
    uint first_row;
    // Number of rows, 1..=SGMV_TILE_ROWS; 0: an unused tile.
    uint rows;
    // Unused.
    uint reserved;
};

// Up to BGMV_PACK_ROWS rows of one slot, wherever they are in the batch. Kernels may use packs or take each row by itself.
struct Pack {
    // Slot of all the pack's rows; negative: this pack and those after it are unused.
    int slot;
    // Number of rows, 1..=BGMV_PACK_ROWS.
    uint rows;
    // Their indices in the batch.
    uint row[BGMV_PACK_ROWS];
    // Unused.
    uint reserved0;
    // Unused.
    uint reserved1;
};

// One site of a launch. Word offsets count 4-byte words from the start of the tables operand.
struct SiteParams {
    // Word offset of the cell array: `slots` 8-byte addresses (low word first) of A in a shrink, of B in an expand; 0 = no delta.
    uint cells;
    // Word offset of `slots` u32 rank words: the true rank under RANK_MASK, and RANK_VECTORS where vectors lie behind B.
    uint ranks;
    // Word offset of `slots` f32 scales.
    uint scales;
    // Words from a cell's address that its matrix and vectors may span: a cell that leaves less of the weights operand is skipped.
    uint span;
    // Number of outputs (rows of B).
    uint out_features;
    // Which of the y operands holds the outputs, 0..MAX_SITES.
    uint y_operand;
    // Element of that operand where output 0 of row 0 lies.
    uint y_offset;
    // Elements between rows of y.
    uint y_stride;
    // f32 elements from the start of a z row to this site's part.
    uint z_offset;
    // Unused.
    uint reserved0;
    // Unused.
    uint reserved1;
    // Unused.
    uint reserved2;
};

// Parameters of a launch, the same for every kernel. Row 0 of x, y and z is row `row_first` of the batch.
struct Params {
    // Rows in this launch: x, y and z hold that many.
    uint rows;
    // Index in the batch of the launch's first row.
    uint row_first;
    // Entries of every table array (max_loras).
    uint slots;
    // First slot of the launch's window: rows of other slots are another launch's.
    uint slot_first;
    // Number of slots in the window.
    uint slot_count;
    // Number of sites in use.
    uint sites;
    // Columns of A, elements of a row of x that are read.
    uint in_features;
    // Elements between rows of x.
    uint x_stride;
    // Elements between rows of A.
    uint a_stride;
    // Elements between rows of B.
    uint b_stride;
    // f32 elements between rows of z.
    uint z_stride;
    // Largest rank that a table may name; a larger one is skipped.
    uint max_rank;
    // Word offset of the tiles in the batch operand (SGMV).
    uint tiles_at;
    // Number of tiles (SGMV).
    uint tiles;
    // Address of the weights operand's first byte, low word.
    uint weights_lo;
    // Address of the weights operand's first byte, high word.
    uint weights_hi;
    // Bytes of the weights operand, low word.
    uint weights_len_lo;
    // Bytes of the weights operand, high word.
    uint weights_len_hi;
    // Largest out_features of the sites in use.
    uint max_out;
    // Word offset in the batch operand of its packs, which fill the rest of it (BGMV); 0: there are none.
    uint packs_at;
    // Word offset in the batch operand (expert_rows: in rows) of one u32 a row of the batch: the row of x that it
    // reads, counted from x's first; 0: its own.
    uint x_rows_at;
    // Rows that x holds where `x_rows_at` is not 0; a row that names a later one reads zeros. expert_rows: tokens
    // of the batch.
    uint x_rows;
    // Experts of the routed layer (expert_rows); in kernels that apply pairs 0 where slots aren't those of experts.
    uint experts;
    // Rows that one token has, each with an expert of its own (expert_rows).
    uint top_k;
    // Entries of a table array from one adapter's slot to the next, where each expert has one (expert_rows).
    uint slot_stride;
    // How an expert's row finds token and expert: ROUTED_TOKENS, ROUTED_OFFSETS (expert_rows).
    uint routed;
    // BGMV: parts that a sum over columns may be left in, for the expand of the same pair to add up; 0: it may not. Where
    // it may, how z is laid out is between the two, in rows * sites * z_parts times max_rank rounded up to Z_RANKS f32.
    uint z_parts;
    // Word offset in the batch operand (expert_rows, expert_tiles: in rows) of the number of tiles in use, those after them
    // being unused; 0: any may be in use. Behind it lies, for each THREADS rows, how many tiles begin there: expert_rows
    // leaves that to expert_tiles, which leaves the number.
    uint counts_at;
    // The sites; entries from `sites` on are zero.
    SiteParams site[MAX_SITES];
};

// What the one push constant, an address, points at. Addresses are low word, high word.
struct Envelope {
    // Addresses of the operands, in order; absent ones are 0.
    uvec2 operand[MAX_OPERANDS];
    Params params;
};
