//! A strided matrix in device memory.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Region;

/// Rows of activations: row `i` starts `i * stride` elements into the region.
#[derive(Clone, Debug)]
pub struct Matrix {
    region: Region,
    stride: u32,
}

impl Matrix {
    /// `region` as rows that are `stride` elements apart. The last row may end before a full stride.
    pub fn new(region: Region, stride: u32) -> Self {
        Self { region, stride }
    }

    /// The memory, from row 0 on.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Elements between rows.
    pub fn stride(&self) -> u32 {
        self.stride
    }

    /// Bytes that `rows` rows of `width` elements take.
    pub(super) fn extent(&self, rows: u32, width: u32, dtype: DType) -> u64 {
        match rows {
            0 => 0,
            _ => (u64::from(rows - 1) * u64::from(self.stride) + u64::from(width)) * dtype.size(),
        }
    }

    /// The memory of rows `first..first + rows`.
    pub(super) fn rows(&self, first: u32, rows: u32, width: u32, dtype: DType) -> Result<Region> {
        let start = u64::from(first) * u64::from(self.stride) * dtype.size();
        self.region.slice(start, self.extent(rows, width, dtype))
    }

    /// # Errors
    /// [`Error::Shape`] when rows overlap or `rows` rows don't fit.
    pub(super) fn check(&self, what: &str, rows: u32, width: u32, dtype: DType) -> Result<()> {
        if self.stride < width && rows > 1 {
            return Err(Error::shape(format!("stride of {what}"), self.stride, format!("at least {width} elements")));
        }
        let extent = self.extent(rows, width, dtype);
        if self.region.len() < extent {
            let expected = format!("{extent} bytes for {rows} rows of {width} {dtype}, {} apart", self.stride);
            return Err(Error::shape(what, format!("{} bytes", self.region.len()), expected));
        }
        if !self.region.offset().is_multiple_of(dtype.size()) {
            return Err(Error::shape(
                what,
                format!("offset {}", self.region.offset()),
                format!("a multiple of {}", dtype.size()),
            ));
        }
        Ok(())
    }
}
