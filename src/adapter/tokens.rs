//! Rows that replace those of an embedding or head: trainable tokens, and whole tables that were saved.
//!
//! A row is replaced, not added to. Trainable tokens name their rows; of a table that was saved whole (`modules_to_save`)
//! the rows count that differ from the served one. Which those are can only be told beside the served table: in the base's
//! files, or on the device once the host has it there. Until then an adapter keeps them raw, in the file's own type.

use std::ops::Range;

use super::SiteId;
use super::embed::lora_and_rows;
use super::reject::{Code, Reject};
use super::site::natural;
use super::weights::{Adapter, HostMatrix};
use crate::contract::MAX_TOKEN_ROWS;
use crate::dtype::DType;
use crate::error::Result;

/// Rows of one table that an adapter replaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTokens {
    /// The embedding or head.
    pub site: SiteId,
    /// Rows of the table.
    pub vocabulary: usize,
    /// Which rows, ascending, each once, each below `vocabulary`.
    pub ids: Vec<u32>,
    /// `rows[ids.len()][width]`, in the file's type.
    pub rows: HostMatrix,
}

/// What an adapter's file says of one table, before it has been compared with the served one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawTokens {
    /// The embedding or head.
    pub site: SiteId,
    /// The whole table as it was saved, `[vocabulary][width]`.
    pub table: Option<HostMatrix>,
    /// Tokens that were trained, as the config lists them; each once.
    pub trainable: Vec<u32>,
    /// Their rows, in the same order: whole rows, despite their name in the file (`trainable_tokens_delta`).
    pub rows: Option<HostMatrix>,
    /// Whether the rows are for a head that is tied to this embedding, too.
    pub tied: bool,
}

/// A table that is served, readable row by row.
pub trait ServedTable {
    /// Rows.
    fn vocabulary(&self) -> usize;
    /// Elements of a row.
    fn width(&self) -> usize;
    /// Element type.
    fn dtype(&self) -> DType;
    /// The elements of some rows, little-endian, without padding between them.
    ///
    /// # Errors
    /// The file's or the device's.
    fn read(&self, rows: Range<usize>) -> Result<Vec<u8>>;
    /// What to call it in messages.
    fn name(&self) -> String;
}

/// The tables of a model as they are served.
pub trait ServedTables: std::fmt::Debug {
    /// The table of an embedding or a head, by its module path; of a head that is tied, the embedding's.
    fn table(&self, path: &str) -> Option<Box<dyn ServedTable + '_>>;
    /// The head that shares the weight of the embedding at this path, if there is one.
    fn tied_head(&self, embedding: &str) -> Option<SiteId>;
}

/// Bytes of a served table that are read at a time.
const CHUNK: usize = 16 << 20;

impl HostTokens {
    pub(super) fn digest(&self, sized: &mut impl FnMut(&[u8])) {
        sized(self.site.path.as_bytes());
        sized(bytemuck::cast_slice(&self.ids));
        digest_matrix(Some(&self.rows), sized);
    }
}

fn digest_matrix(matrix: Option<&HostMatrix>, sized: &mut impl FnMut(&[u8])) {
    let Some(matrix) = matrix else { return sized(b"none") };
    sized(matrix.dtype.name().as_bytes());
    sized(&[(matrix.rows as u64).to_le_bytes(), (matrix.cols as u64).to_le_bytes()].concat());
    sized(&matrix.bytes);
}

impl RawTokens {
    pub(super) fn digest(&self, sized: &mut impl FnMut(&[u8])) {
        sized(self.site.path.as_bytes());
        sized(bytemuck::cast_slice(&self.trainable));
        digest_matrix(self.table.as_ref(), sized);
        digest_matrix(self.rows.as_ref(), sized);
    }

    /// The rows that differ from the served table, and those that were trained, which count before the former. A head
    /// that is tied to the embedding gets the trained ones too.
    ///
    /// A row of a saved table differs if any element's bits do, after the wider of the two types has been rounded to the
    /// narrower (of f16 and bf16: after the file's has been rounded to the served one).
    ///
    /// # Errors
    /// [`Code::Vocabulary`] and [`Code::BaseShape`] for a table of another shape or an id past its end;
    /// [`Code::ModulesToSave`] where more rows differ than an overlay can hold.
    pub fn resolve(&self, served: &dyn ServedTables) -> Result<Vec<HostTokens>> {
        let path = &self.site.path;
        let Some(table) = served.table(path) else {
            let message = format!("{path}: its rows are replaced, but no table is served there to compare them with");
            return Err(Reject::new(Code::ModulesToSave, message).into());
        };
        let table = &*table;
        let mut found = Vec::new();
        let mut changed = Rows::default();
        if let Some(saved) = &self.table {
            self.check_width(saved, table)?;
            if saved.rows != table.vocabulary() {
                let message = format!(
                    "{path}: the adapter's table has {} rows, {} has {}: the vocabulary was resized",
                    saved.rows,
                    table.name(),
                    table.vocabulary()
                );
                return Err(Reject::new(Code::Vocabulary, message).into());
            }
            changed = differing(saved, table)?;
            if changed.ids.len() > MAX_TOKEN_ROWS as usize {
                let message = format!(
                    "{path}: {} of {} rows differ from {}, expected at most {MAX_TOKEN_ROWS}: the table was trained whole",
                    changed.ids.len(),
                    saved.rows,
                    table.name()
                );
                return Err(Reject::new(Code::ModulesToSave, message).into());
            }
        }
        let mut trained = Rows::default();
        if let Some(rows) = &self.rows {
            self.check_width(rows, table)?;
            if let Some(id) = self.trainable.iter().find(|id| **id as usize >= table.vocabulary()) {
                let message =
                    format!("{path}: token {id} is trained, {} has {} rows", table.name(), table.vocabulary());
                return Err(Reject::new(Code::Vocabulary, message).into());
            }
            let mut order: Vec<usize> = (0..self.trainable.len()).collect();
            order.sort_by_key(|i| self.trainable[*i]);
            for i in order {
                trained.push(self.trainable[i], row(rows, i));
            }
            let of = |site: &SiteId, rows: Rows, dtype, table: &dyn ServedTable| HostTokens {
                site: site.clone(),
                vocabulary: table.vocabulary(),
                rows: HostMatrix { dtype, rows: rows.ids.len(), cols: table.width(), bytes: rows.bytes },
                ids: rows.ids,
            };
            if self.tied
                && let Some(head) = served.tied_head(path)
            {
                found.push(of(&head, trained.clone(), rows.dtype, table));
            }
            let (dtype, merged) = match &self.table {
                None => (rows.dtype, trained),
                Some(saved) => trained.over(rows.dtype, changed, saved.dtype),
            };
            found.push(of(&self.site, merged, dtype, table));
        } else if let Some(saved) = &self.table {
            let rows =
                HostMatrix { dtype: saved.dtype, rows: changed.ids.len(), cols: saved.cols, bytes: changed.bytes };
            let (site, vocabulary) = (self.site.clone(), saved.rows);
            found.push(HostTokens { site, vocabulary, ids: changed.ids, rows });
        }
        found.retain(|tokens| !tokens.ids.is_empty());
        Ok(found)
    }

    fn check_width(&self, matrix: &HostMatrix, table: &dyn ServedTable) -> Result<()> {
        if matrix.cols == table.width() {
            return Ok(());
        }
        let message = format!(
            "{}: the adapter's rows have {} elements, those of {} have {}",
            self.site.path,
            matrix.cols,
            table.name(),
            table.width()
        );
        Err(Reject::new(Code::BaseShape, message).into())
    }
}

impl Adapter {
    /// With its raw token rows compared with the tables that are served, so that none are raw any more. The digest stays:
    /// it is the files'.
    ///
    /// # Errors
    /// Those of [`RawTokens::resolve`], and [`Code::TensorDuplicate`] where two parts replace rows of one table.
    pub fn with_tables(mut self, served: &dyn ServedTables) -> Result<Self> {
        for raw in std::mem::take(&mut self.raw_tokens) {
            for tokens in raw.resolve(served)? {
                if self.tokens.iter().any(|known| known.site.path == tokens.site.path) {
                    let message = format!("{}: two parts of the adapter replace rows of it", tokens.site.path);
                    return Err(Reject::new(Code::TensorDuplicate, message).into());
                }
                if self.pairs.iter().any(|pair| pair.site.path == tokens.site.path) {
                    return Err(lora_and_rows("the adapter", &tokens.site.path).into());
                }
                self.tokens.push(tokens);
            }
        }
        self.tokens.sort_by(|a, b| natural(&a.site.path, &b.site.path));
        Ok(self)
    }
}

/// Ids and rows being put together.
#[derive(Clone, Debug, Default)]
struct Rows {
    ids: Vec<u32>,
    bytes: Vec<u8>,
}

impl Rows {
    fn push(&mut self, id: u32, row: &[u8]) {
        self.ids.push(id);
        self.bytes.extend_from_slice(row);
    }

    /// These rows and those of `other` that they don't replace, ascending, in a type that holds both.
    fn over(self, dtype: DType, other: Rows, of_other: DType) -> (DType, Rows) {
        let wide = if dtype == of_other { dtype } else { DType::F32 };
        let convert = |rows: Rows, from: DType| match from == wide {
            true => rows,
            false => {
                let mut bytes = Vec::new();
                wide.encode(&from.decode(&rows.bytes), &mut bytes);
                Rows { bytes, ..rows }
            }
        };
        let (own, other) = (convert(self, dtype), convert(other, of_other));
        let width = own.bytes.len() / own.ids.len().max(1);
        let mut all: Vec<(u32, &[u8])> = own.ids.iter().copied().zip(own.bytes.chunks(width.max(1))).collect();
        let rest = other.ids.iter().copied().zip(other.bytes.chunks(width.max(1)));
        all.extend(rest.filter(|(id, _)| own.ids.binary_search(id).is_err()));
        all.sort_by_key(|(id, _)| *id);
        let mut merged = Rows::default();
        all.into_iter().for_each(|(id, row)| merged.push(id, row));
        (wide, merged)
    }
}

fn row(matrix: &HostMatrix, row: usize) -> &[u8] {
    let width = matrix.cols * matrix.dtype.size() as usize;
    &matrix.bytes[row * width..(row + 1) * width]
}

/// The rows of `saved` that are not the served ones.
fn differing(saved: &HostMatrix, table: &dyn ServedTable) -> Result<Rows> {
    let (own, served) = (saved.dtype, table.dtype());
    let width = table.width() * served.size() as usize;
    let step = (CHUNK / width.max(1)).max(1);
    let mut changed = Rows::default();
    for first in (0..saved.rows).step_by(step) {
        let rows = first..(first + step).min(saved.rows);
        let bytes = table.read(rows.clone())?;
        for (id, of_table) in rows.zip(bytes.chunks(width.max(1))) {
            let row = row(saved, id);
            let same = match own == served {
                true => row == of_table,
                false => {
                    // Of two types the narrower; f16 and bf16 are compared as the served one.
                    let common = if served == DType::F32 { own } else { served };
                    let rounded = |dtype: DType, bytes: &[u8]| -> Vec<u32> {
                        dtype.decode(bytes).into_iter().map(|value| common.round(value).to_bits()).collect()
                    };
                    rounded(own, row) == rounded(served, of_table)
                }
            };
            if !same {
                changed.push(id as u32, row);
                if changed.ids.len() > MAX_TOKEN_ROWS as usize {
                    // Only their number counts from here on.
                    changed.bytes = Vec::new();
                }
            }
        }
    }
    Ok(changed)
}
