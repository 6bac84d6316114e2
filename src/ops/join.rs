//! Outputs of one launch, sorted into operands that don't overlap.
//!
//! Outputs of q, k and v often interleave in one buffer: their rows' byte ranges overlap though no
//! element does. Such outputs become one operand, each at its own offset in it.

use super::{Matrix, Output};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// One y operand: a matrix that holds the outputs of one or more sites.
pub(super) struct Joined {
    /// Rows from the first output's row 0 on.
    pub matrix: Matrix,
    /// Elements of a row from the operand's start to the end of the last output.
    pub width: u32,
}

/// Where a site's output is: which operand, which element of its row 0.
#[derive(Clone, Copy)]
pub(super) struct At {
    pub operand: u32,
    pub offset: u32,
}

/// One output's byte range in its allocation, and the elements of a row that it takes.
struct Span<'a> {
    output: &'a Output<'a>,
    start: u64,
    end: u64,
    width: u32,
}

/// Joins the outputs that share bytes, or a device's binding granule of `align` bytes.
///
/// # Errors
/// [`Error::Shape`] when two outputs share an element, or interleave with different strides.
pub(super) fn join(
    outputs: &[Output<'_>],
    widths: &[u32],
    rows: u32,
    act: DType,
    align: u64,
) -> Result<(Vec<Joined>, Vec<At>)> {
    let spans: Vec<Span<'_>> = outputs
        .iter()
        .zip(widths)
        .map(|(output, &width)| {
            let start = output.y.region().offset();
            Span { output, start, end: start + output.y.extent(rows, width, act), width }
        })
        .collect();
    let mut order: Vec<usize> = (0..spans.len()).collect();
    order.sort_by_key(|&i| spans[i].start);
    let mut joined: Vec<(Joined, u64, u64)> = Vec::new(); // with the byte range
    let mut at = vec![At { operand: 0, offset: 0 }; spans.len()];
    let mut members: Vec<Vec<usize>> = Vec::new();
    for i in order {
        let span = &spans[i];
        let region = span.output.y.region();
        let host = joined
            .iter()
            .position(|(j, _, end)| j.matrix.region().same_allocation(region) && span.start / align * align < *end);
        let Some(host) = host else {
            at[i] = At { operand: joined.len() as u32, offset: 0 };
            joined.push((Joined { matrix: span.output.y.clone(), width: span.width }, span.start, span.end));
            members.push(vec![i]);
            continue;
        };
        for &other in &members[host] {
            apart(&spans[other], span, act)?;
        }
        let (join, start, end) = &mut joined[host];
        let offset = (span.start - *start) / act.size();
        let width = offset + u64::from(span.width);
        let limit = u64::from(u32::MAX);
        if width > limit {
            let hint = " (give the outputs separate allocations)";
            return Err(Error::Limit { what: "elements between outputs of one launch", found: width, limit, hint });
        }
        at[i] = At { operand: host as u32, offset: offset as u32 };
        join.width = join.width.max(width as u32);
        *end = (*end).max(span.end);
        let region =
            join.matrix.region().union(region).ok_or_else(|| Error::shape("outputs", "two allocations", "one"))?;
        join.matrix = Matrix::new(region, join.matrix.stride());
        members[host].push(i);
    }
    Ok((joined.into_iter().map(|(j, ..)| j).collect(), at))
}

/// Checks that two outputs in one operand share no element. `a` starts first.
fn apart(a: &Span<'_>, b: &Span<'_>, act: DType) -> Result<()> {
    let (stride, other) = (a.output.y.stride(), b.output.y.stride());
    if b.start >= a.end && stride == other {
        return Ok(());
    }
    if stride != other {
        let expected = "one stride for outputs that share memory, or separate allocations";
        return Err(Error::shape("outputs of one launch", format!("strides {stride} and {other}"), expected));
    }
    let bytes = b.start - a.start;
    let gap = bytes / act.size() % u64::from(stride.max(1));
    let clear =
        bytes.is_multiple_of(act.size()) && gap >= u64::from(a.width) && gap + u64::from(b.width) <= u64::from(stride);
    if !clear {
        let found =
            format!("outputs of {} and {} elements, {bytes} bytes apart, rows {stride} apart", a.width, b.width);
        return Err(Error::shape("outputs of one launch", found, "no element in both"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::any::Any;
    use std::sync::Arc;

    use super::*;
    use crate::memory::{Allocation, DevicePtr, Region};

    #[derive(Debug)]
    struct Memory;

    impl Allocation for Memory {
        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    fn memory(len: u64) -> Region {
        Region::new(DevicePtr(1 << 32), len, Arc::new(Memory))
    }

    fn joined(ys: &[(Matrix, u32)], rows: u32, align: u64) -> Result<(Vec<Joined>, Vec<At>)> {
        let outputs: Vec<Output<'_>> = ys.iter().enumerate().map(|(site, (y, _))| Output { site, y }).collect();
        let widths: Vec<u32> = ys.iter().map(|(_, width)| *width).collect();
        join(&outputs, &widths, rows, DType::Bf16, align)
    }

    #[test]
    fn interleaved_outputs_become_one_operand_and_separate_ones_stay_apart() {
        let qkv = memory(10 * 64 * 2);
        let part = |at: u64| Matrix::new(qkv.slice(at * 2, qkv.len() - at * 2).unwrap(), 64);
        let other = Matrix::new(memory(10 * 8 * 2), 8);
        let (operands, at) = joined(&[(part(48), 16), (other, 8), (part(0), 32), (part(32), 16)], 10, 1).unwrap();
        assert_eq!(operands.len(), 2);
        let shared = at[0].operand;
        assert_eq!((at[0].offset, at[2].offset, at[3].offset), (48, 0, 32));
        assert_eq!((at[2].operand, at[3].operand), (shared, shared));
        assert_ne!(at[1].operand, shared);
        assert_eq!(operands[shared as usize].width, 64);
    }

    #[test]
    fn neighbours_within_one_binding_granule_are_joined_too() {
        let both = memory(2 * 40 * 2);
        let first = Matrix::new(both.slice(0, 80).unwrap(), 40);
        let second = Matrix::new(both.slice(80, 80).unwrap(), 40);
        assert_eq!(joined(&[(first.clone(), 40), (second.clone(), 40)], 1, 1).unwrap().0.len(), 2);
        let (operands, at) = joined(&[(first, 40), (second, 40)], 1, 256).unwrap();
        assert_eq!((operands.len(), at[1].offset), (1, 40));
    }

    #[test]
    fn outputs_that_share_an_element_are_refused() {
        let y = memory(10 * 64 * 2);
        let part = |at: u64, stride| Matrix::new(y.slice(at * 2, y.len() - at * 2).unwrap(), stride);
        assert!(joined(&[(part(0, 64), 33), (part(32, 64), 16)], 9, 1).is_err());
        assert!(joined(&[(part(0, 64), 16), (part(48, 64), 17)], 9, 1).is_err(), "wraps into the next row");
        assert!(joined(&[(part(0, 64), 16), (part(16, 32), 16)], 9, 1).is_err(), "strides differ");
    }
}
