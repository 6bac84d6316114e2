//! The header of a safetensors file, checked before a byte of it is believed.
//!
//! Read by a visitor of our own and not by the safetensors crate's parser, because that one takes the last of two
//! equal names, builds a map for whatever a header holds, and can't say which tensor is at fault.

use std::cell::RefCell;
use std::fmt;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use safetensors::Dtype;
use serde::de::value::StrDeserializer;
use serde::de::{Deserialize, DeserializeSeed, Error as _, IgnoredAny, MapAccess, Visitor};

use super::file;
use super::json::excerpt;
use super::reject::{Code, Loaded, Reject};

/// Longest header that is read, in bytes; the format's own limit.
const MAX_HEADER: u64 = 100_000_000;
/// Most dimensions of a tensor.
const MAX_DIMS: usize = 8;

/// A tensor as the header declares it; bytes, dtype and shape agree.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Its name.
    pub name: Box<str>,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, the slowest first.
    pub shape: Box<[usize]>,
    /// First byte in the file.
    pub start: u64,
    /// Byte after the last.
    pub end: u64,
    /// The file.
    pub file: Arc<Path>,
}

/// A file's tensors.
#[derive(Clone, Debug)]
pub struct Header {
    /// In the order of their bytes.
    pub tensors: Vec<TensorInfo>,
}

impl Header {
    /// Reads and checks the header; no tensor's bytes are touched.
    ///
    /// # Errors
    /// A refusal whose code starts with `E_FILE_`, or [`Code::NotFound`], [`Code::Dtype`].
    pub fn read(path: &Path) -> Loaded<Header> {
        let name = path.display();
        let (mut file, len) = file::open(path)?;
        let mut start = Vec::with_capacity(256);
        (&mut file).take(256).read_to_end(&mut start).map_err(|e| file::unreadable(path, &e))?;
        file::sniff(path, &start)?;
        let Some(header_len) = start.first_chunk::<8>().map(|n| u64::from_le_bytes(*n)) else {
            let message = format!("{name}: {len} bytes, expected at least the 8 of a safetensors header length");
            return Err(Reject::new(Code::FileTruncated, message));
        };
        if header_len > MAX_HEADER {
            let message = format!(
                "{name}: declares a header of {header_len} bytes in a file of {len}, expected at most {MAX_HEADER}: \
                 not a safetensors file, or a damaged one"
            );
            return Err(Reject::new(Code::FileHeader, message));
        }
        // Nothing is allocated for a header that the file is too short to hold.
        if header_len > len - 8 {
            let message = format!(
                "{name}: declares a header of {header_len} bytes, but only {} follow; the file was cut",
                len - 8
            );
            return Err(Reject::new(Code::FileTruncated, message));
        }
        let mut text = Vec::with_capacity(header_len as usize + 1);
        text.extend_from_slice(&start[8..start.len().min(8 + header_len as usize)]);
        let rest = header_len - text.len() as u64;
        file.take(rest).read_to_end(&mut text).map_err(|e| file::unreadable(path, &e))?;
        Self::parse(path, &text, len - 8 - header_len)
    }

    /// Checks header text that `data_len` bytes of tensors follow.
    fn parse(path: &Path, text: &[u8], data_len: u64) -> Loaded<Header> {
        let name = path.display().to_string();
        let path: Arc<Path> = path.into();
        let text = std::str::from_utf8(text).map_err(|e| {
            let message = format!("{name}: byte {} of the header is not UTF-8", e.valid_up_to());
            Reject::new(Code::FileHeader, message)
        })?;
        let fault = RefCell::new(None);
        let data_at = 8 + text.len() as u64;
        let mut reader = serde_json::Deserializer::from_str(text);
        let parsed = Entries { path: &path, file: &name, data_at, data_len, fault: &fault }.deserialize(&mut reader);
        let parsed = parsed.and_then(|tensors| {
            reader.end()?;
            Ok(tensors)
        });
        let mut tensors = parsed.map_err(|error| {
            fault.take().unwrap_or_else(|| {
                Reject::new(
                    Code::FileHeader,
                    format!("{name}: the safetensors header is not what it should be: {error}"),
                )
            })
        })?;
        tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
            let message = format!("{name}: tensor {:?} appears twice in the header", excerpt(&pair[0].name));
            return Err(Reject::new(Code::FileDuplicate, message));
        }
        tensors.sort_by_key(|t| (t.start, t.end));
        let mut end = data_at;
        for tensor in &tensors {
            if tensor.start != end {
                let fault = if tensor.start < end { "overlaps the one before it" } else { "leaves a hole before it" };
                let message = format!(
                    "{name}: tensor {:?} {fault}: it starts at byte {}, expected {}",
                    excerpt(&tensor.name),
                    tensor.start - data_at,
                    end - data_at
                );
                return Err(Reject::new(Code::FileOffsets, message));
            }
            end = tensor.end;
        }
        let used = end - data_at;
        if used > data_len {
            let message = format!("{name}: the tensors need {used} bytes, the file has {data_len}: it was cut");
            return Err(Reject::new(Code::FileTruncated, message));
        }
        if used < data_len {
            let message = format!("{name}: {} bytes follow the last tensor, expected none", data_len - used);
            return Err(Reject::new(Code::FileTrailing, message));
        }
        Ok(Header { tensors })
    }
}

/// Reads the header's object entry by entry.
#[derive(Clone, Copy)]
struct Entries<'a> {
    path: &'a Arc<Path>,
    file: &'a str,
    data_at: u64,
    data_len: u64,
    fault: &'a RefCell<Option<Box<Reject>>>,
}

impl<'de> DeserializeSeed<'de> for Entries<'_> {
    type Value = Vec<TensorInfo>;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Entries<'_> {
    type Value = Vec<TensorInfo>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut tensors = Vec::new();
        let mut metadata = false;
        while let Some(name) = access.next_key::<Box<str>>()? {
            if &*name == "__metadata__" {
                if std::mem::replace(&mut metadata, true) {
                    let message = format!("{}: __metadata__ appears twice in the header", self.file);
                    *self.fault.borrow_mut() = Some(Reject::new(Code::FileDuplicate, message));
                    return Err(A::Error::custom("refused"));
                }
                access.next_value::<IgnoredAny>()?;
                continue;
            }
            let raw = access.next_value_seed(Entry { entries: self, name: &name })?;
            match raw.check(self, &name) {
                Ok((dtype, start, end)) => {
                    let (shape, file) = (raw.shape.into(), self.path.clone());
                    tensors.push(TensorInfo { name, dtype, shape, start, end, file })
                }
                Err(reject) => {
                    *self.fault.borrow_mut() = Some(reject);
                    return Err(A::Error::custom("refused"));
                }
            }
        }
        Ok(tensors)
    }
}

/// One tensor's entry as written.
struct Raw {
    dtype: Box<str>,
    shape: Vec<usize>,
    offsets: [u64; 2],
}

impl Raw {
    fn check(&self, of: Entries<'_>, name: &str) -> Loaded<(Dtype, u64, u64)> {
        let at = format!("{}: tensor {:?}", of.file, excerpt(name));
        let dtype = Dtype::deserialize(StrDeserializer::<serde::de::value::Error>::new(&self.dtype)).map_err(|_| {
            let message = format!("{at} has dtype {:?}, expected one of F32, F16, BF16, F64", excerpt(&self.dtype));
            Reject::new(Code::Dtype, message)
        })?;
        let [start, end] = self.offsets;
        if start > end {
            return Err(Reject::new(
                Code::FileOffsets,
                format!("{at} starts at byte {start} and ends before it, at {end}"),
            ));
        }
        let bits = self.shape.iter().try_fold(dtype.bitsize() as u64, |bits, dim| bits.checked_mul(*dim as u64));
        match bits {
            Some(bits) if bits % 8 == 0 && bits / 8 == end - start => {}
            Some(bits) => {
                let message = format!(
                    "{at} has {} bytes, expected the {} of {dtype} {:?}",
                    end - start,
                    bits.div_ceil(8),
                    self.shape
                );
                return Err(Reject::new(Code::FileOffsets, message));
            }
            None => {
                let message = format!("{at} has shape {:?}, whose size overflows", self.shape);
                return Err(Reject::new(Code::FileOffsets, message));
            }
        }
        if end > of.data_len {
            let message =
                format!("{at} ends at byte {end}, the file has {}: it was cut, or the offset is wrong", of.data_len);
            return Err(Reject::new(Code::FileTruncated, message));
        }
        Ok((dtype, of.data_at + start, of.data_at + end))
    }
}

/// Reads one tensor's entry.
struct Entry<'a> {
    entries: Entries<'a>,
    name: &'a str,
}

impl Entry<'_> {
    fn fault<E: serde::de::Error>(&self, message: &str) -> E {
        let message = format!("{}: tensor {:?}: {message}", self.entries.file, excerpt(self.name));
        *self.entries.fault.borrow_mut() = Some(Reject::new(Code::FileHeader, message));
        E::custom("refused")
    }
}

impl<'de> DeserializeSeed<'de> for Entry<'_> {
    type Value = Raw;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Raw, D::Error> {
        let here = Entry { entries: self.entries, name: self.name };
        let raw = deserializer.deserialize_map(self);
        raw.map_err(|error| match here.entries.fault.take() {
            Some(fault) => {
                *here.entries.fault.borrow_mut() = Some(fault);
                error
            }
            None => here.fault(&error.to_string()),
        })
    }
}

impl<'de> Visitor<'de> for Entry<'_> {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Raw, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(field) = access.next_key::<Box<str>>()? {
            let again = match &*field {
                "dtype" => dtype.replace(access.next_value::<Box<str>>()?).is_some(),
                "shape" => shape.replace(access.next_value::<Shape>()?.0).is_some(),
                "data_offsets" => offsets.replace(access.next_value::<[u64; 2]>()?).is_some(),
                other => return Err(self.fault(&format!("field {:?} is not part of the format", excerpt(other)))),
            };
            if again {
                return Err(self.fault(&format!("field {field:?} appears twice")));
            }
        }
        match (dtype, shape, offsets) {
            (Some(dtype), Some(shape), Some(offsets)) => Ok(Raw { dtype, shape, offsets }),
            _ => Err(self.fault("expected dtype, shape and data_offsets")),
        }
    }
}

/// A shape of at most [`MAX_DIMS`] dimensions: a header can't make us keep a longer one.
struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dims;
        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX_DIMS} dimensions")
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut access: A) -> Result<Shape, A::Error> {
                let mut dims = Vec::with_capacity(2);
                while let Some(dim) = access.next_element::<usize>()? {
                    if dims.len() == MAX_DIMS {
                        return Err(A::Error::invalid_length(MAX_DIMS + 1, &self));
                    }
                    dims.push(dim);
                }
                Ok(Shape(dims))
            }
        }
        deserializer.deserialize_seq(Dims)
    }
}
