//! A base's embeddings and head as tables whose rows adapters replace.

use std::ops::Range;

use super::base::BaseModel;
use super::file;
use super::header::TensorInfo;
use super::reject::{Code, Reject};
use super::site::SiteId;
use super::source::bytes_of;
use super::tokens::{ServedTable, ServedTables};
use crate::dtype::DType;
use crate::error::Result;

/// A table in the base's files.
struct FileTable<'a> {
    /// Absent where only the config is there.
    info: Option<&'a TensorInfo>,
    path: &'a str,
    vocabulary: usize,
    width: usize,
    dtype: DType,
}

impl ServedTable for FileTable<'_> {
    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn width(&self) -> usize {
        self.width
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn read(&self, rows: Range<usize>) -> Result<Vec<u8>> {
        let Some(info) = self.info else {
            return Err(Reject::new(Code::BaseFile, format!("{}: the base has no weights", self.path)).into());
        };
        let map = file::map(&info.file)?;
        let row = self.width * self.dtype.size() as usize;
        Ok(bytes_of(&map, info)?[rows.start * row..rows.end * row].to_vec())
    }

    fn name(&self) -> String {
        match self.info {
            Some(info) => format!("{} of {}", info.name, info.file.display()),
            None => format!("{} of the base", self.path),
        }
    }
}

impl ServedTables for BaseModel {
    fn table(&self, path: &str) -> Option<Box<dyn ServedTable + '_>> {
        let of_embedding = self.embedding(path).map(|e| (&e.site, e.vocabulary, e.width));
        let of_head = || self.linear(path).map(|l| (&l.site, l.out_features, l.in_features));
        let (site, vocabulary, width) = of_embedding.or_else(of_head)?;
        let found = self.dtype(path).zip(self.weight(&format!("{path}.weight")));
        let found = found.filter(|(_, info)| *info.shape == [vocabulary, width]);
        let (dtype, info) = found.map_or((DType::F32, None), |(dtype, info)| (dtype, Some(info)));
        Some(Box::new(FileTable { info, path: &site.path, vocabulary, width, dtype }))
    }

    fn tied_head(&self, embedding: &str) -> Option<SiteId> {
        BaseModel::tied_head(self, embedding).map(|head| head.site.clone())
    }
}
