//! The zip that `torch.save` writes: `NAME/data.pkl` and a stored, uncompressed entry for each storage.
//!
//! Nothing is extracted and nothing is inflated: entries are slices of the file, so no archive can hold more than it is
//! long, and no entry's name is ever a path.

use std::collections::HashMap;
use std::io::Cursor;

use zip::{CompressionMethod, ZipArchive};

use super::super::json::excerpt;
use super::super::reject::{Code, Loaded, Reject};

/// Most entries of an archive: one for each storage.
const MAX_ENTRIES: usize = 1 << 18;

/// The entries of an archive.
pub(super) struct Archive<'m> {
    file: &'m str,
    /// By the name after the archive's own folder.
    entries: HashMap<String, &'m [u8]>,
}

impl<'m> Archive<'m> {
    /// Finds every entry and checks its checksum. `file` is for messages.
    pub fn open(file: &'m str, bytes: &'m [u8]) -> Loaded<Self> {
        let fault = |what: String| Reject::new(Code::PickleArchive, format!("{file}: {what}"));
        if !bytes.starts_with(b"PK\x03\x04") {
            let what = match bytes {
                [0x80, 2, 0x8a, 0x0a, ..] => {
                    "a pickle in the format of torch before 1.6, expected the zip that torch.save writes since; load and save it with a newer torch"
                }
                _ => "not the zip archive that torch.save writes",
            };
            return Err(fault(what.to_owned()));
        }
        let mut zip =
            ZipArchive::new(Cursor::new(bytes)).map_err(|e| fault(format!("not a whole zip archive: {e}")))?;
        if zip.len() > MAX_ENTRIES {
            return Err(fault(format!("{} entries, expected at most {MAX_ENTRIES}", zip.len())));
        }
        if zip.has_duplicate_names() {
            return Err(fault("two entries of the zip have one name".to_owned()));
        }
        if zip.has_overlapping_files().map_err(|e| fault(e.to_string()))? {
            return Err(fault("entries of the zip overlap".to_owned()));
        }
        let mut entries = HashMap::with_capacity(zip.len());
        let mut root: Option<String> = None;
        for index in 0..zip.len() {
            let mut entry = zip.by_index(index).map_err(|e| fault(format!("entry {index} of the zip: {e}")))?;
            let name = entry.name().map_err(|e| fault(format!("entry {index} of the zip: {e}")))?.into_owned();
            let at = |what: &str| fault(format!("entry {:?} of the zip {what}", excerpt(&name)));
            if entry.is_dir() {
                continue;
            }
            let odd = |part: &str| matches!(part, "" | "." | "..");
            let Some((folder, rest)) =
                name.split_once('/').filter(|_| !name.contains(['\\', '\0', ':']) && !name.split('/').any(odd))
            else {
                return Err(at("is outside of the archive's one folder"));
            };
            if *root.get_or_insert_with(|| folder.to_owned()) != folder {
                return Err(at("is outside of the archive's one folder"));
            }
            if entry.compression() != CompressionMethod::Stored
                || entry.size() != entry.compressed_size()
                || entry.encrypted()
            {
                return Err(at("is compressed or encrypted; torch.save stores entries as they are"));
            }
            let size = entry.size();
            let start = entry.data_start().ok_or_else(|| at("has no place in the file"))?;
            let end = start.checked_add(size).filter(|end| *end <= bytes.len() as u64);
            let (Ok(start), Some(Ok(end))) = (usize::try_from(start), end.map(usize::try_from)) else {
                return Err(at("ends after the file"));
            };
            // To the end: the checksum is compared there.
            std::io::copy(&mut entry, &mut std::io::sink()).map_err(|e| at(&format!("is damaged: {e}")))?;
            if entries.insert(rest.to_owned(), &bytes[start..end]).is_some() {
                return Err(at("is there twice"));
            }
        }
        let archive = Self { file, entries };
        if archive.entries.contains_key("constants.pkl") {
            return Err(fault("a TorchScript program, expected the state dict of an adapter".to_owned()));
        }
        match archive.get("byteorder") {
            None | Some(b"little") => Ok(archive),
            Some(other) => Err(fault(format!(
                "byte order {:?}, expected little",
                excerpt(&String::from_utf8_lossy(&other[..other.len().min(16)]))
            ))),
        }
    }

    /// An entry's bytes.
    pub fn get(&self, name: &str) -> Option<&'m [u8]> {
        self.entries.get(name).copied()
    }

    /// The pickle.
    pub fn pickle(&self) -> Loaded<&'m [u8]> {
        self.get("data.pkl").ok_or_else(|| {
            Reject::new(Code::PickleArchive, format!("{}: no entry data.pkl, so not what torch.save writes", self.file))
        })
    }
}
