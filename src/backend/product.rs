//! A product of the base model, which a backend with a vendor's matrix library can run for comparison.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Region;

/// `y[rows][out_features] = x[rows][in_features] * w[out_features][in_features]^T`, without padding.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// Rows of x and y.
    pub rows: u32,
    /// Columns of x and w.
    pub in_features: u32,
    /// Rows of w, columns of y.
    pub out_features: u32,
    /// The input.
    pub x: &'a Region,
    /// The weight.
    pub w: &'a Region,
    /// The output.
    pub y: &'a Region,
}

impl Product<'_> {
    /// Checks that each operand holds its matrix, of elements of `dtype`.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn check(&self, dtype: DType) -> Result<()> {
        let matrices = [
            ("x", self.x, self.rows, self.in_features),
            ("w", self.w, self.out_features, self.in_features),
            ("y", self.y, self.rows, self.out_features),
        ];
        for (name, region, rows, cols) in matrices {
            let bytes = (u64::from(rows) * u64::from(cols)).saturating_mul(dtype.size());
            if region.len() < bytes {
                let found = format!("{} bytes", region.len());
                return Err(Error::shape(format!("{name} of a product"), found, format!("at least {bytes} bytes")));
            }
        }
        Ok(())
    }
}
