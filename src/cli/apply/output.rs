//! The output file: its header first, then tensor after tensor, visible under its name only when whole.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tempfile::NamedTempFile;

use super::super::failure::Failure;

/// A safetensors file of f32 tensors in the making.
#[derive(Debug)]
pub struct Output {
    target: PathBuf,
    sink: Sink,
}

#[derive(Debug)]
enum Sink {
    /// Beside the target, renamed to it at the end.
    Temporary(BufWriter<NamedTempFile>),
    /// A pipe or device: there is nothing to rename.
    Direct(BufWriter<File>),
}

impl Output {
    /// Starts a file of these tensors, written in this order.
    pub fn create<'a>(path: &Path, tensors: impl IntoIterator<Item = (&'a str, &'a [usize])>) -> Result<Self, Failure> {
        let fail = |error| Failure::io(path.display(), error);
        // A link is followed, so that it goes on being one.
        let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let sink = match std::fs::metadata(&target) {
            Ok(meta) if meta.is_dir() => {
                return Err(fail(std::io::ErrorKind::IsADirectory.into()));
            }
            Ok(meta) if !meta.is_file() => {
                Sink::Direct(BufWriter::new(File::options().write(true).open(&target).map_err(fail)?))
            }
            _ => {
                let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
                Sink::Temporary(BufWriter::new(temporary(folder).map_err(fail)?))
            }
        };
        let mut output = Self { target, sink };
        output.write(&header(tensors))?;
        Ok(output)
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let written = match &mut self.sink {
            Sink::Temporary(file) => file.write_all(bytes),
            Sink::Direct(file) => file.write_all(bytes),
        };
        written.map_err(|error| Failure::io(self.target.display(), error))
    }

    /// Makes the file visible.
    pub fn finish(self) -> Result<(), Failure> {
        let Self { target, sink } = self;
        let finish = || -> std::io::Result<()> {
            match sink {
                Sink::Temporary(file) => {
                    let file = file.into_inner().map_err(|error| error.into_error())?;
                    file.as_file().sync_all()?;
                    file.persist(&target).map_err(|error| error.error)?;
                }
                Sink::Direct(mut file) => file.flush()?,
            }
            Ok(())
        };
        finish().map_err(|error| Failure::io(target.display(), error))
    }
}

/// A new file with the permissions that any new file gets.
fn temporary(folder: &Path) -> std::io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".lorapool-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder)
}

/// Header length and header, padded to a multiple of 8 bytes.
fn header<'a>(tensors: impl IntoIterator<Item = (&'a str, &'a [usize])>) -> Vec<u8> {
    let mut entries = Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let start = end;
        end += shape.iter().product::<usize>() as u64 * 4;
        entries.insert(name.to_owned(), json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, end] }));
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut text);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_one_that_the_safetensors_crate_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.safetensors");
        let mut output = Output::create(&path, [("b|y", &[2, 1][..]), ("a|y", &[]), ("none|y", &[0, 3])]).unwrap();
        assert!(!path.exists());
        output.write(&[1.0f32, 2.0, 3.0].map(f32::to_le_bytes).concat()).unwrap();
        output.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("b|y").unwrap().shape(), [2, 1]);
        assert_eq!(file.tensor("a|y").unwrap().data(), 3f32.to_le_bytes());
        assert_eq!(file.len(), 3);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_unfinished_file_leaves_the_old_one_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.safetensors");
        std::fs::write(&path, "old").unwrap();
        let mut output = Output::create(&path, [("y", &[1][..])]).unwrap();
        output.write(&[0; 4]).unwrap();
        drop(output);
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
