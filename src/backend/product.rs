//! A product of the base model, which a backend with a vendor's matrix library can run for comparison.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Region;

/// `y[rows][out_features] = x[rows][in_features] * w[groups][out_features][in_features]^T`, without padding. Rows lie group
/// by group, and each group has a weight of its own: an expert. A plain linear is one group.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// Rows of x and y, of each group.
    pub rows: &'a [u32],
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
        let rows: u64 = self.rows.iter().copied().map(u64::from).sum();
        let weights = (self.rows.len() as u64).saturating_mul(self.out_features.into());
        let matrices = [
            ("x", self.x, rows, self.in_features),
            ("w", self.w, weights, self.in_features),
            ("y", self.y, rows, self.out_features),
        ];
        for (name, region, rows, cols) in matrices {
            let bytes = rows.saturating_mul(cols.into()).saturating_mul(dtype.size());
            if region.len() < bytes {
                let found = format!("{} bytes", region.len());
                return Err(Error::shape(format!("{name} of a product"), found, format!("at least {bytes} bytes")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::open;

    #[test]
    fn a_product_of_groups_needs_every_groups_weight_and_the_rows_of_all() {
        let gpu = open("cpu", 0).unwrap();
        let [x, w, y] = [5 * 3, 4 * 2 * 3, 5 * 2].map(|elements| gpu.alloc(elements * 4, "matrix").unwrap());
        let product = |rows| Product { rows, in_features: 3, out_features: 2, x: &x, w: &w, y: &y };
        assert!(product(&[2, 0, 1, 2]).check(DType::F32).is_ok());
        assert!(product(&[2, 1, 1, 2]).check(DType::F32).unwrap_err().to_string().contains("x of"));
        assert!(product(&[2, 0, 1, 1, 1]).check(DType::F32).unwrap_err().to_string().contains("w of"));
    }
}
