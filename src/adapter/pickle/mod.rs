//! `adapter_model.bin`: tensors out of the zip that `torch.save` writes, with nothing of it run.

mod archive;
mod machine;

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use mmap_io::MemoryMappedFile;
use safetensors::{Dtype, View};

use self::archive::Archive;
use self::machine::{Tensor, state_dict};
use super::file;
use super::json::excerpt;
use super::reject::{Code, Loaded, Reject};
use crate::error::{Error, Result};

/// How much more than the file its tensors may be: tied weights are written once and named twice.
const MAX_GROWTH: u64 = 4;

/// A PyTorch state dict on disk, mapped.
pub struct StateDict {
    name: String,
    map: MemoryMappedFile,
    tensors: Vec<Placed>,
}

/// A tensor and where its elements lie.
struct Placed {
    name: Box<str>,
    dtype: Dtype,
    shape: Vec<usize>,
    strides: Vec<usize>,
    /// First byte of its first element in the file.
    start: usize,
    /// Bytes of the tensor when its elements lie side by side.
    bytes: usize,
    contiguous: bool,
}

impl std::fmt::Debug for StateDict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StateDict({:?}, {} tensors)", self.name, self.tensors.len())
    }
}

impl StateDict {
    /// Reads which tensors a `.bin` file has and checks that every one lies in the file. Nothing in it is run.
    ///
    /// # Errors
    /// [`Error::Reject`] with a code that starts with `E_PICKLE_` or `E_FILE_`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Ok(Self::read(path.as_ref())?)
    }

    fn read(path: &Path) -> Loaded<Self> {
        let name = path.display().to_string();
        let (_, len) = file::open(path)?;
        if len == 0 {
            return Err(Reject::new(Code::FileEmpty, format!("{name}: the file is empty (0 bytes)")));
        }
        let map = file::map(path)?;
        let tensors = {
            let bytes = map.as_slice_bytes(0, len).map_err(|e| file::unreadable(path, &e))?;
            match file::sniff(path, bytes) {
                Err(reject) if reject.code != Code::WeightsPickle => return Err(reject),
                _ => {}
            }
            place(&name, bytes)?
        };
        Ok(Self { name, map, tensors })
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes as u64).sum()
    }

    /// Writes the tensors as a safetensors file, one at a time, bits unchanged.
    ///
    /// # Errors
    /// [`Error::Io`] for a file that can't be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let io =
            |message: String| Error::Io { path: path.display().to_string(), source: std::io::Error::other(message) };
        let file = self.map.as_slice_bytes(0, self.map.len()).map_err(|e| io(e.to_string()))?;
        let views = self.tensors.iter().map(|tensor| (&*tensor.name, Strided { file, tensor }));
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        safetensors::serialize_to_file(views, Some(metadata), path).map_err(|e| io(e.to_string()))
    }
}

/// A tensor of the file, gathered when it is written.
struct Strided<'a> {
    file: &'a [u8],
    tensor: &'a Placed,
}

impl View for Strided<'_> {
    fn dtype(&self) -> Dtype {
        self.tensor.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.tensor.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let Placed { shape, strides, start, bytes, contiguous, dtype, .. } = self.tensor;
        if *contiguous {
            return Cow::Borrowed(&self.file[*start..start + bytes]);
        }
        let size = dtype.bitsize() / 8;
        let mut out = Vec::with_capacity(*bytes);
        let mut index = vec![0; shape.len()];
        while out.len() < *bytes {
            let at = start + size * index.iter().zip(strides).map(|(i, stride)| i * stride).sum::<usize>();
            out.extend_from_slice(&self.file[at..at + size]);
            for (i, extent) in index.iter_mut().zip(shape).rev() {
                *i += 1;
                if *i < *extent {
                    break;
                }
                *i = 0;
            }
        }
        Cow::Owned(out)
    }

    fn data_len(&self) -> usize {
        self.tensor.bytes
    }
}

/// Finds every tensor of a state dict in the bytes of its file.
fn place(file: &str, bytes: &[u8]) -> Loaded<Vec<Placed>> {
    let archive = Archive::open(file, bytes)?;
    let mut placed = Vec::new();
    let mut total = 0u64;
    for (name, tensor) in state_dict(file, archive.pickle()?)? {
        let fault =
            |what: String| Reject::new(Code::PickleTensor, format!("{file}: tensor {:?} {what}", excerpt(&name)));
        if &*name == "__metadata__" {
            return Err(fault("has a name that safetensors keeps for itself".to_owned()));
        }
        let Tensor { storage, offset, shape, strides } = &*tensor;
        let entry = format!("data/{}", storage.key);
        let Some(data) = archive.get(&entry) else {
            return Err(fault(format!("is in entry {:?} of the zip, which is not there", excerpt(&entry))));
        };
        let size = storage.dtype.bitsize() / 8;
        if storage.elements.checked_mul(size) != Some(data.len()) {
            return Err(fault(format!(
                "is in a storage of {} elements of {}, but entry {:?} of the zip has {} bytes",
                storage.elements,
                storage.dtype,
                excerpt(&entry),
                data.len()
            )));
        }
        let count = shape.iter().try_fold(1usize, |n, extent| n.checked_mul(*extent));
        // Of the last element; of nothing, none.
        let last = match count {
            Some(0) => Some(0),
            _ => shape
                .iter()
                .zip(strides)
                .try_fold(*offset, |at, (extent, stride)| at.checked_add((extent - 1).checked_mul(*stride)?)),
        };
        let (Some(count), Some(last)) = (count, last) else {
            return Err(fault(format!("has shape {shape:?} and strides {strides:?}, whose size overflows")));
        };
        let inside = if count == 0 { *offset <= storage.elements } else { last < storage.elements };
        // One element may be read many times over, which no saved adapter needs and which could grow without bound.
        if !inside || count > storage.elements {
            return Err(fault(format!(
                "has shape {shape:?}, strides {strides:?} and offset {offset}, beyond its storage of {} elements",
                storage.elements
            )));
        }
        let mut dense = 1;
        let contiguous = count == 0
            || shape.iter().zip(strides).rev().all(|(extent, stride)| {
                let fits = *extent == 1 || *stride == dense;
                dense *= extent;
                fits
            });
        total += (count * size) as u64;
        if total > MAX_GROWTH * bytes.len() as u64 {
            let message =
                format!("{file}: its tensors are more than {MAX_GROWTH} times the file's {} bytes", bytes.len());
            return Err(Reject::new(Code::PickleSize, message));
        }
        placed.push(Placed {
            name: (&*name).into(),
            dtype: storage.dtype,
            shape: shape.clone(),
            strides: strides.clone(),
            start: data.as_ptr().addr() - bytes.as_ptr().addr() + offset * size,
            bytes: count * size,
            contiguous,
        });
    }
    Ok(placed)
}
