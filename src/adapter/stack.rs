//! Pairs added up into one: A's rows one below the other, B's columns side by side.
//!
//! `sum_i scale_i * B_i * A_i = scale * [r_1 B_1, r_2 B_2, ...] * [A_1; A_2; ...]` with `r_i = scale_i / scale`, exactly but
//! for one rounding of each `r_i B_i` where scales differ. The rank of the sum is the sum of the ranks.

use super::weights::HostMatrix;
use crate::dtype::DType;

/// A pair, and where its outputs lie among those of the sum.
pub(super) struct Block<'a> {
    pub a: &'a HostMatrix,
    pub b: &'a HostMatrix,
    /// First row of the sum's B that is this pair's.
    pub first_row: usize,
    /// What multiplies `B * A`.
    pub scale: f64,
}

/// A, B and scale of a sum with `outputs` rows. Rows of B outside of a block are zero there.
///
/// The scale is the largest of the blocks', so that no element grows when the ratio is folded into B; it is not folded
/// where all scales are equal, and then element types stay as they are.
pub(super) fn stack(blocks: &[Block<'_>], outputs: usize) -> (HostMatrix, HostMatrix, f32) {
    let first = blocks.first().map_or(0.0, |block| block.scale);
    let equal = blocks.iter().all(|block| block.scale == first);
    let scale = blocks.iter().map(|block| block.scale).max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap_or(0.0) as f32;
    let rank = blocks.iter().map(|block| block.a.rows).sum();
    let inputs = blocks.first().map_or(0, |block| block.a.cols);

    let dtype = common(blocks.iter().map(|block| block.a.dtype));
    let mut bytes = Vec::with_capacity(rank * inputs * dtype.size() as usize);
    blocks.iter().for_each(|block| bytes.extend_from_slice(&elements(block.a, dtype)));
    let a = HostMatrix { dtype, rows: rank, cols: inputs, bytes };

    let dtype = if equal { common(blocks.iter().map(|block| block.b.dtype)) } else { DType::F32 };
    let element = dtype.size() as usize;
    let mut bytes = vec![0; outputs * rank * element];
    let mut column = 0;
    for block in blocks {
        let mut part = elements(block.b, dtype);
        if !equal {
            let ratio = block.scale / f64::from(scale);
            for value in part.as_chunks_mut::<4>().0 {
                *value = ((f64::from(f32::from_le_bytes(*value)) * ratio) as f32).to_le_bytes();
            }
        }
        let width = block.a.rows * element;
        for (row, from) in part.chunks_exact(width.max(1)).enumerate() {
            let at = (block.first_row + row) * rank * element + column;
            bytes[at..at + width].copy_from_slice(from);
        }
        column += width;
    }
    (a, HostMatrix { dtype, rows: outputs, cols: rank, bytes }, scale)
}

/// The one type of all, or F32, which holds every value of every other.
fn common(mut dtypes: impl Iterator<Item = DType>) -> DType {
    let first = dtypes.next().unwrap_or(DType::F32);
    if dtypes.all(|dtype| dtype == first) { first } else { DType::F32 }
}

/// A matrix's elements as its own type or as F32, both exact.
fn elements(matrix: &HostMatrix, dtype: DType) -> Vec<u8> {
    if matrix.dtype == dtype {
        return matrix.bytes.clone();
    }
    let mut bytes = Vec::with_capacity(matrix.rows * matrix.cols * dtype.size() as usize);
    dtype.encode(&matrix.values(), &mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::site::SiteId;
    use super::super::weights::HostPair;
    use super::*;

    fn pair(dtype: DType, rank: usize, inputs: usize, outputs: usize, scale: f32) -> HostPair {
        let matrix = |rows: usize, cols: usize, step: f32| {
            let values: Vec<f32> = (0..rows * cols).map(|i| dtype.round((i % 17) as f32 * step - 0.3)).collect();
            let mut bytes = Vec::new();
            dtype.encode(&values, &mut bytes);
            HostMatrix { dtype, rows, cols, bytes }
        };
        HostPair::new(SiteId::from_path("x"), matrix(rank, inputs, 0.11), matrix(outputs, rank, 0.07), scale)
    }

    fn delta(a: &HostMatrix, b: &HostMatrix, scale: f64) -> Vec<f64> {
        let (av, bv) = (a.values(), b.values());
        let dot = |o: usize, i: usize| -> f64 {
            (0..a.rows).map(|r| f64::from(bv[o * a.rows + r]) * f64::from(av[r * a.cols + i])).sum()
        };
        (0..b.rows).flat_map(|o| (0..a.cols).map(move |i| (o, i))).map(|(o, i)| scale * dot(o, i)).collect()
    }

    #[test]
    fn a_sum_is_the_sum_of_its_blocks_where_they_lie() {
        for (dtypes, scales) in [
            ([DType::F16, DType::F16], [2.0, 2.0]),
            ([DType::F16, DType::Bf16], [2.0, 2.0]),
            ([DType::Bf16, DType::Bf16], [0.1, -3.0]),
            ([DType::F32, DType::F32], [0.0, 0.7]),
        ] {
            let one = pair(dtypes[0], 2, 5, 3, 1.0);
            let two = pair(dtypes[1], 3, 5, 4, 1.0);
            let blocks = [
                Block { a: &one.a, b: &one.b, first_row: 1, scale: scales[0] },
                Block { a: &two.a, b: &two.b, first_row: 3, scale: scales[1] },
            ];
            let (a, b, scale) = stack(&blocks, 8);
            assert_eq!((a.rows, a.cols, b.rows, b.cols), (5, 5, 8, 5));
            let same = dtypes[0] == dtypes[1];
            assert_eq!(a.dtype, if same { dtypes[0] } else { DType::F32 });
            assert_eq!(b.dtype, if same && scales[0] == scales[1] { dtypes[0] } else { DType::F32 });
            let found = delta(&a, &b, scale.into());
            let mut expected = vec![0.0; 40];
            for block in &blocks {
                let one = delta(block.a, block.b, block.scale);
                expected[5 * block.first_row..].iter_mut().zip(one).for_each(|(sum, d)| *sum += d);
            }
            for (f, e) in found.iter().zip(&expected) {
                assert!((f - e).abs() < 1e-6, "{f} {e}");
            }
            // Rows that no block has stay zero to the bit.
            assert!(b.bytes[..5 * b.dtype.size() as usize].iter().all(|byte| *byte == 0));
        }
    }
}
