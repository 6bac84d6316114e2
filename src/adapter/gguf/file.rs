//! The GGUF format, versions 2 and 3: metadata, then declarations of tensors, then their bytes, each at a multiple of the
//! alignment. Every count and length is held against the bytes that are left before anything is made of it.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use safetensors::Dtype;

use super::super::file as files;
use super::super::header::TensorInfo;
use super::super::json::excerpt;
use super::super::reject::{Code, Loaded, Reject};

/// Bytes that a tensor's offset is a multiple of, where the file does not say.
const ALIGNMENT: u64 = 32;
/// Most dimensions of a tensor.
const MAX_DIMS: u32 = 4;
/// Longest name of a key or tensor, in bytes.
const MAX_NAME: u64 = 65_535;

/// What a LoRA file's metadata says, of all that it may.
#[derive(Debug, Default)]
pub(super) struct Meta<'f> {
    /// `general.architecture`
    pub architecture: Option<&'f str>,
    /// `general.type`
    pub kind: Option<&'f str>,
    /// `adapter.type`
    pub adapter: Option<&'f str>,
    /// `adapter.lora.alpha`
    pub alpha: Option<f64>,
    /// Whether `adapter.alora.invocation_tokens` is there.
    pub invocation: bool,
    /// `general.base_model.0.name`
    pub base_name: Option<&'f str>,
    alignment: Option<u64>,
}

/// A file, taken apart.
#[derive(Debug)]
pub(super) struct Gguf<'f> {
    pub meta: Meta<'f>,
    /// In the order of their bytes, which is that of their declarations. Shapes have the slowest dimension first.
    pub tensors: Vec<TensorInfo>,
}

impl<'f> Gguf<'f> {
    /// Reads and checks all but the tensors' bytes. `path` is for messages.
    pub fn parse(path: &Path, bytes: &'f [u8]) -> Loaded<Self> {
        let name = path.display().to_string();
        let mut cursor = Cursor { name: &name, bytes, at: 0 };
        if !bytes.starts_with(b"GGUF") {
            files::sniff(path, bytes)?;
            return Err(cursor.fault("does not start with \"GGUF\"".into()));
        }
        cursor.at = 4;
        match cursor.u32("the version")? {
            2 | 3 => {}
            version if version.swap_bytes() <= 3 => {
                let message =
                    format!("{name}: a GGUF file for machines of the other byte order, expected little-endian");
                return Err(Reject::new(Code::WeightsGguf, message));
            }
            version => {
                let message = format!("{name}: GGUF version {version}, expected 2 or 3");
                return Err(Reject::new(Code::WeightsGguf, message));
            }
        }
        let (tensors, entries) = (cursor.u64("the number of tensors")?, cursor.u64("the number of metadata entries")?);
        // A length, a type and a byte at least; a length, a count, a dimension, a type and an offset.
        cursor.holds(entries, 8 + 4 + 1, "metadata entries")?;
        cursor.holds(tensors, 8 + 4 + 8 + 4 + 8, "tensors")?;
        let meta = Meta::read(&mut cursor, entries)?;
        let declared = (0..tensors).map(|_| Declared::read(&mut cursor)).collect::<Loaded<Vec<_>>>()?;
        let mut names = HashSet::with_capacity(declared.len());
        if let Some(twice) = declared.iter().find(|tensor| !names.insert(tensor.name)) {
            let message = format!("{name}: tensor {:?} is declared twice", excerpt(twice.name));
            return Err(Reject::new(Code::FileDuplicate, message));
        }
        let alignment = meta.alignment.unwrap_or(ALIGNMENT);
        let data_at = (cursor.at as u64).next_multiple_of(alignment);
        let len = bytes.len() as u64;
        let file: Arc<Path> = path.into();
        let (mut offset, mut end) = (0u64, data_at.min(len));
        let mut infos = Vec::with_capacity(declared.len());
        for tensor in declared {
            let at = format!("{name}: tensor {:?}", excerpt(tensor.name));
            if tensor.offset != offset {
                let message = format!("{at} starts at byte {} of the data, expected {offset}", tensor.offset);
                return Err(Reject::new(Code::FileOffsets, message));
            }
            let start = data_at.checked_add(offset);
            let stop = start.and_then(|start| start.checked_add(tensor.bytes)).filter(|stop| *stop <= len);
            let (Some(start), Some(stop)) = (start, stop) else {
                let message = format!("{at} needs {} bytes at {offset} of the data: the file was cut", tensor.bytes);
                return Err(Reject::new(Code::FileTruncated, message));
            };
            // Within the file, so far from the end of u64.
            offset = (offset + tensor.bytes).next_multiple_of(alignment);
            end = stop;
            infos.push(TensorInfo {
                name: tensor.name.into(),
                dtype: tensor.dtype,
                shape: tensor.shape().into(),
                start,
                end: stop,
                file: file.clone(),
            });
        }
        // Writers pad the last tensor as every other, or don't.
        if len > end.max(data_at.saturating_add(offset)) {
            let message = format!("{name}: {} bytes follow the last tensor, expected none", len - end);
            return Err(Reject::new(Code::FileTrailing, message));
        }
        Ok(Self { meta, tensors: infos })
    }
}

impl<'f> Meta<'f> {
    fn read(cursor: &mut Cursor<'f, '_>, entries: u64) -> Loaded<Self> {
        let mut meta = Self::default();
        let mut seen = HashSet::new();
        for _ in 0..entries {
            let key = cursor.text("a metadata key")?;
            if !seen.insert(key) {
                let message = format!("{}: metadata key {:?} appears twice", cursor.name, excerpt(key));
                return Err(Reject::new(Code::FileDuplicate, message));
            }
            let kind = cursor.u32(key)?;
            match key {
                "general.architecture" => meta.architecture = Some(cursor.expect_text(key, kind)?),
                "general.type" => meta.kind = Some(cursor.expect_text(key, kind)?),
                "adapter.type" => meta.adapter = Some(cursor.expect_text(key, kind)?),
                "general.base_model.0.name" => meta.base_name = Some(cursor.expect_text(key, kind)?),
                "adapter.lora.alpha" => meta.alpha = Some(cursor.expect_float(key, kind)?),
                "general.alignment" => {
                    let alignment = match kind {
                        4 => u64::from(cursor.u32(key)?),
                        _ => return Err(cursor.fault(format!("{key} has type {kind}, expected a u32"))),
                    };
                    if !alignment.is_power_of_two() || !(8..=1 << 20).contains(&alignment) {
                        return Err(cursor.fault(format!("{key} is {alignment}, expected a power of two from 8 on")));
                    }
                    meta.alignment = Some(alignment);
                }
                _ => {
                    meta.invocation |= key == "adapter.alora.invocation_tokens";
                    cursor.skip(key, kind)?;
                }
            }
        }
        Ok(meta)
    }
}

/// A tensor's declaration.
struct Declared<'f> {
    name: &'f str,
    dims: [u64; MAX_DIMS as usize],
    rank: usize,
    dtype: Dtype,
    offset: u64,
    bytes: u64,
}

impl<'f> Declared<'f> {
    fn read(cursor: &mut Cursor<'f, '_>) -> Loaded<Self> {
        let name = cursor.text("a tensor's name")?;
        let at = || format!("tensor {:?}", excerpt(name));
        let rank = cursor.u32(name)?;
        if !(1..=MAX_DIMS).contains(&rank) {
            return Err(cursor.fault(format!("{} has {rank} dimensions, expected 1 to {MAX_DIMS}", at())));
        }
        let mut dims = [1; MAX_DIMS as usize];
        for dim in dims.iter_mut().take(rank as usize) {
            *dim = cursor.u64(name)?;
        }
        let kind = cursor.u32(name)?;
        let offset = cursor.u64(name)?;
        let dtype = match kind {
            0 => Dtype::F32,
            1 => Dtype::F16,
            28 => Dtype::F64,
            30 => Dtype::BF16,
            other => {
                let found = quantised(other).map_or_else(|| format!("number {other}"), str::to_owned);
                let message = format!(
                    "{}: {} has type {found}, expected F32, F16, BF16 or F64: convert the adapter with --outtype f16",
                    cursor.name,
                    at()
                );
                return Err(Reject::new(Code::WeightsGguf, message));
            }
        };
        let elements = dims.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim));
        let size = dtype.bitsize() as u64 / 8;
        let Some(bytes) = elements.and_then(|elements| elements.checked_mul(size)).filter(|b| *b < 1 << 62) else {
            return Err(cursor.fault(format!("{} has dimensions {dims:?}, whose size overflows", at())));
        };
        if bytes == 0 {
            let message = format!("{}: {} has dimensions {dims:?}, so no element", cursor.name, at());
            return Err(Reject::new(Code::TensorEmpty, message));
        }
        Ok(Self { name, dims, rank: rank as usize, dtype, offset, bytes })
    }

    /// The slowest dimension first.
    fn shape(&self) -> Vec<usize> {
        self.dims[..self.rank].iter().rev().map(|dim| *dim as usize).collect()
    }
}

/// Names of other element types.
fn quantised(kind: u32) -> Option<&'static str> {
    Some(match kind {
        2 => "Q4_0",
        3 => "Q4_1",
        6 => "Q5_0",
        7 => "Q5_1",
        8 => "Q8_0",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return None,
    })
}

/// Reads a file from its start on, never past its end.
struct Cursor<'f, 'n> {
    name: &'n str,
    bytes: &'f [u8],
    at: usize,
}

impl<'f> Cursor<'f, '_> {
    fn fault(&self, what: String) -> Box<Reject> {
        Reject::new(Code::FileHeader, format!("{}: byte {}: {what}", self.name, self.at))
    }

    fn cut(&self, what: &str) -> Box<Reject> {
        let message = format!("{}: ends at byte {} within {:?}", self.name, self.bytes.len(), excerpt(what));
        Reject::new(Code::FileTruncated, message)
    }

    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// Refuses a count of things that the rest of the file can't hold.
    fn holds(&self, count: u64, size: u64, what: &str) -> Loaded<()> {
        match count.checked_mul(size) {
            Some(bytes) if bytes <= self.left() => Ok(()),
            _ => {
                let message = format!(
                    "{}: declares {count} {what}, but only {} bytes follow: it was cut, or is damaged",
                    self.name,
                    self.left()
                );
                Err(Reject::new(Code::FileTruncated, message))
            }
        }
    }

    fn take(&mut self, len: u64, what: &str) -> Loaded<&'f [u8]> {
        if len > self.left() {
            return Err(self.cut(what));
        }
        let taken = &self.bytes[self.at..self.at + len as usize];
        self.at += len as usize;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Loaded<[u8; N]> {
        self.take(N as u64, what)?.try_into().map_err(|_| self.cut(what))
    }

    fn u32(&mut self, what: &str) -> Loaded<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Loaded<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A name, which has to be text.
    fn text(&mut self, what: &str) -> Loaded<&'f str> {
        let len = self.u64(what)?;
        if len > MAX_NAME {
            // A length beyond the file is a cut file; within it, no name.
            self.holds(len, 1, "bytes of a name")?;
            return Err(self.fault(format!("{what} of {len} bytes, expected at most {MAX_NAME}")));
        }
        let at = self.at;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes).map_err(|_| {
            let message = format!("{}: byte {at}: {} is not UTF-8", self.name, excerpt(what));
            Reject::new(Code::FileHeader, message)
        })
    }

    fn expect_text(&mut self, key: &str, kind: u32) -> Loaded<&'f str> {
        match kind {
            8 => self.text(key),
            _ => Err(self.fault(format!("{key} has type {kind}, expected a string"))),
        }
    }

    fn expect_float(&mut self, key: &str, kind: u32) -> Loaded<f64> {
        match kind {
            6 => self.array(key).map(f32::from_le_bytes).map(f64::from),
            12 => self.array(key).map(f64::from_le_bytes),
            _ => Err(self.fault(format!("{key} has type {kind}, expected a float"))),
        }
    }

    /// Passes over a value of any type.
    fn skip(&mut self, key: &str, kind: u32) -> Loaded<()> {
        match kind {
            8 => {
                let len = self.u64(key)?;
                self.take(len, key).map(drop)
            }
            9 => {
                let (kind, count) = (self.u32(key)?, self.u64(key)?);
                match (kind, scalar(kind)) {
                    (8, _) => {
                        self.holds(count, 8, "strings")?;
                        (0..count).try_for_each(|_| self.skip(key, 8))
                    }
                    (_, Some(size)) => {
                        self.holds(count, size, "numbers")?;
                        self.take(count * size, key).map(drop)
                    }
                    (other, None) => Err(self
                        .fault(format!("{:?} is a list of type {other}, expected numbers or strings", excerpt(key)))),
                }
            }
            kind => match scalar(kind) {
                Some(size) => self.take(size, key).map(drop),
                None => Err(self.fault(format!("{:?} has type {kind}, which GGUF does not have", excerpt(key)))),
            },
        }
    }
}

/// Bytes of a number or bool.
fn scalar(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}
