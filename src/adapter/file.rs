//! Untrusted files: what is one, how long it is, and what it looks like before anything parses it.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use mmap_io::MemoryMappedFile;

use super::json::Limits;
use super::reject::{Code, Loaded, Reject};

/// Opens a regular file and gives its length in bytes.
///
/// A pipe, a device or a directory under the name is refused: opening a pipe would wait for ever.
pub(super) fn open(path: &Path) -> Loaded<(File, u64)> {
    let meta = std::fs::metadata(path).map_err(|e| unreadable(path, &e))?;
    if !meta.is_file() {
        return Err(Reject::new(
            Code::NotFound,
            format!("{}: found something that is no regular file", path.display()),
        ));
    }
    let file = File::open(path).map_err(|e| unreadable(path, &e))?;
    Ok((file, meta.len()))
}

/// The error for a file that can't be read.
pub(super) fn unreadable(path: &Path, error: &dyn std::fmt::Display) -> Box<Reject> {
    Reject::new(Code::NotFound, format!("{}: {error}", path.display()))
}

/// The whole of a text file, and whether a byte order mark was dropped from its start.
pub(super) fn read_text(path: &Path, limits: Limits) -> Loaded<(String, bool)> {
    let name = path.display();
    let (file, len) = open(path)?;
    if len > limits.bytes {
        let message = format!("{name}: {len} bytes, expected at most {}", limits.bytes);
        return Err(Reject::new(Code::FileTooLarge, message));
    }
    let mut bytes = Vec::with_capacity(len as usize);
    // The file may grow while it is read.
    file.take(limits.bytes).read_to_end(&mut bytes).map_err(|e| unreadable(path, &e))?;
    sniff(path, &bytes)?;
    let bom = bytes.starts_with(b"\xef\xbb\xbf");
    if bom {
        bytes.drain(..3);
    }
    match String::from_utf8(bytes) {
        Ok(text) => Ok((text, bom)),
        Err(error) => {
            let at = error.utf8_error().valid_up_to();
            Err(Reject::new(Code::ConfigJson, format!("{name}: byte {at} is not UTF-8; expected JSON in UTF-8")))
        }
    }
}

/// Names the usual things that lie where a file should: nothing, a Git LFS pointer, a web page, a pickle.
pub(super) fn sniff(path: &Path, start: &[u8]) -> Loaded<()> {
    let name = path.display();
    let start = &start[..start.len().min(256)];
    if start.is_empty() {
        return Err(Reject::new(Code::FileEmpty, format!("{name}: the file is empty (0 bytes)")));
    }
    if start.starts_with(b"version https://git-lfs") {
        let message = format!("{name}: found a Git LFS pointer instead of the file; fetch it with `git lfs pull`");
        return Err(Reject::new(Code::FileLfsPointer, message));
    }
    let text = String::from_utf8_lossy(start).trim_start_matches('\u{feff}').trim_start().to_ascii_lowercase();
    if ["<!doctype", "<html", "<head", "<?xml", "<!--"].iter().any(|tag| text.starts_with(tag)) {
        let message = format!("{name}: found a web page instead of the file; the download failed or needs a log-in");
        return Err(Reject::new(Code::FileHtml, message));
    }
    if start.starts_with(b"GGUF") {
        let message =
            format!("{name}: found a GGUF file under this name; a LoRA of llama.cpp's is read from a file *.gguf");
        return Err(Reject::new(Code::WeightsGguf, message));
    }
    if start.starts_with(b"PK\x03\x04") || (start[0] == 0x80 && start.get(1).is_some_and(|v| (2..=5).contains(v))) {
        let message = format!("{name}: found a PyTorch pickle under this name; convert it to safetensors");
        return Err(Reject::new(Code::WeightsPickle, message));
    }
    Ok(())
}

/// Whether a regular file starts with these bytes.
pub(super) fn starts_with(path: &Path, magic: &[u8]) -> bool {
    let mut start = Vec::new();
    let read = open(path).map(|(file, _)| file.take(magic.len() as u64).read_to_end(&mut start));
    matches!(read, Ok(Ok(_))) && start == magic
}

/// Maps a file for reading. The map lives while an adapter is loaded; the weights are copied out of it.
pub(super) fn map(path: &Path) -> Loaded<MemoryMappedFile> {
    open(path)?;
    MemoryMappedFile::open_ro(path).map_err(|e| unreadable(path, &e))
}
