//! The values of a base's linears, a few rows at a time: from its files, or from the host where the files hold them
//! quantised or there are none.

use std::fmt::Debug;
use std::sync::Arc;

use mmap_io::MemoryMappedFile;

use super::base::{BaseModel, Linear};
use super::file;
use super::float::Float;
use super::header::TensorInfo;
use super::reject::{Code, Loaded, Reject};
use super::source::bytes_of;
use super::weights::widen;
use crate::dtype::DType;
use crate::error::Result;

/// A base's weights as the host computes with them: dequantised, where it keeps them quantised. Called from several
/// threads at once. An adapter of DoRA can't be served without.
pub trait BaseWeights: Debug + Send + Sync {
    /// Fills `out` with rows `first..` of the linear `W[out_features][in_features]` at `path`, `out.len() / in_features` of
    /// them; `false`, and `out` as it was, for a linear that it does not have.
    ///
    /// # Errors
    /// The host's; the adapter is refused with them.
    fn rows(&self, path: &str, first: usize, out: &mut [f32]) -> Result<bool>;

    /// `bias[out_features]` of the linear at `path`; `None` where it has none.
    ///
    /// # Errors
    /// As for [`rows`](BaseWeights::rows).
    fn bias(&self, path: &str) -> Result<Option<Vec<f32>>>;
}

impl BaseModel {
    /// The same base with weights of the host's, which count before those of its files.
    pub fn with_weights(mut self, weights: Arc<dyn BaseWeights>) -> Self {
        self.values = Some(weights);
        self
    }
}

/// One linear's weight.
pub(super) enum Weight<'b> {
    /// The host's, and its path.
    Host(&'b dyn BaseWeights, &'b str),
    /// A file's.
    File(Stored<'b>),
}

/// A weight in a file.
pub(super) struct Stored<'b> {
    map: MemoryMappedFile,
    tensor: &'b TensorInfo,
    float: Float,
    /// Widths of input and output.
    widths: [usize; 2],
    /// Stored `[in][out]`.
    transposed: bool,
}

impl<'b> Weight<'b> {
    /// The weight of a linear; none where neither host nor files have its values.
    pub fn open(base: &'b BaseModel, linear: &'b Linear) -> Loaded<Option<Self>> {
        let path = &*linear.site.path;
        let widths = [linear.in_features, linear.out_features];
        if let Some(host) = base.values.as_deref() {
            let mut row = vec![0.0; linear.in_features];
            if host.rows(path, 0, &mut row).map_err(|error| of_host(path, &error))? {
                return Ok(Some(Self::Host(host, path)));
            }
        }
        let Some(tensor) = base.weight(&format!("{path}.weight")) else { return Ok(None) };
        let transposed = base.is_transposed(path);
        let stored = if transposed { widths } else { [widths[1], widths[0]] };
        let Some(float) = Float::of(tensor.dtype).filter(|_| *tensor.shape == stored) else { return Ok(None) };
        Ok(Some(Self::File(Stored { map: file::map(&tensor.file)?, tensor, float, widths, transposed })))
    }

    /// Fills `out` with rows `first..` of `W[out_features][in_features]`.
    pub fn rows(&self, first: usize, out: &mut [f64]) -> Loaded<()> {
        match self {
            Self::Host(host, path) => {
                let mut rows = vec![0.0; out.len()];
                if !host.rows(path, first, &mut rows).map_err(|error| of_host(path, &error))? {
                    let message = format!("the host's weights have row 0 of {path} and no rows from {first} on");
                    return Err(Reject::new(Code::Dora, message));
                }
                out.iter_mut().zip(rows).for_each(|(out, value)| *out = value.into());
                Ok(())
            }
            Self::File(stored) => stored.rows(first, out),
        }
    }

    /// The bias beside it, if there is one.
    pub fn bias(&self, base: &BaseModel, linear: &Linear) -> Loaded<Option<Vec<f64>>> {
        let path = &*linear.site.path;
        let expected = linear.out_features;
        let wrong = |found: String| {
            let message = format!("{}: the bias of {path} has {found}, expected {expected} numbers", base.source());
            Reject::new(Code::BaseFile, message)
        };
        if let Self::Host(host, ..) = self {
            let bias = host.bias(path).map_err(|error| of_host(path, &error))?;
            return match bias {
                Some(bias) if bias.len() != expected => Err(wrong(bias.len().to_string())),
                bias => Ok(bias.map(|bias| bias.into_iter().map(f64::from).collect())),
            };
        }
        let Some(tensor) = base.weight(&format!("{path}.bias")) else { return Ok(None) };
        let Some(float) = Float::of(tensor.dtype).filter(|_| *tensor.shape == [expected]) else {
            return Err(wrong(format!("{} {:?}", tensor.dtype, tensor.shape)));
        };
        let map = file::map(&tensor.file)?;
        Ok(Some(float.values(bytes_of(&map, tensor)?).collect()))
    }
}

impl Stored<'_> {
    fn rows(&self, first: usize, out: &mut [f64]) -> Loaded<()> {
        let bytes = bytes_of(&self.map, self.tensor)?;
        let [inputs, outputs] = self.widths;
        let size = self.float.size();
        let count = out.len() / inputs.max(1);
        let mut buffer = vec![0.0; if self.transposed { count } else { inputs }];
        if self.transposed {
            let mut column = vec![0.0; count];
            for k in 0..inputs {
                self.float.widen(&bytes[(k * outputs + first) * size..][..count * size], &mut buffer, &mut column);
                column.iter().enumerate().for_each(|(row, value)| out[row * inputs + k] = *value);
            }
        } else {
            for (row, out) in out.chunks_mut(inputs.max(1)).enumerate() {
                self.float.widen(&bytes[(first + row) * inputs * size..][..inputs * size], &mut buffer, out);
            }
        }
        Ok(())
    }
}

impl Float {
    /// Bytes of an element.
    fn size(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// The elements, exactly; `buffer` is as long as `out`.
    fn widen(self, bytes: &[u8], buffer: &mut [f32], out: &mut [f64]) {
        let dtype = match self {
            Self::F16 => DType::F16,
            Self::Bf16 => DType::Bf16,
            Self::F32 => DType::F32,
            Self::F64 => {
                out.iter_mut().zip(bytes.as_chunks().0).for_each(|(out, b)| *out = f64::from_le_bytes(*b));
                return;
            }
        };
        widen(dtype, bytes, buffer);
        out.iter_mut().zip(buffer).for_each(|(out, value)| *out = (*value).into());
    }
}

fn of_host(path: &str, error: &crate::Error) -> Box<Reject> {
    Reject::new(Code::Dora, format!("the host's weights of {path}: {error}"))
}
