//! One operand of a launch in memory, between guards.

use super::oracle::{Check, Mismatch};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Region;

/// Bytes of guard before an operand and at least after it.
const GUARD: u64 = 512;

/// An operand with what surrounds it: host image, and device memory.
#[derive(Clone, Debug)]
pub(super) struct Operand {
    pub name: String,
    pub dtype: DType,
    /// Elements between its rows.
    pub stride: u64,
    /// Where it starts in `image`, in bytes.
    pub at: u64,
    /// Guard, operand, guard: what is on the device before a run.
    pub image: Vec<u8>,
    /// The image on the device.
    pub all: Option<Region>,
}

impl Operand {
    /// An operand of `len` elements that starts `shift` elements after a multiple of 256 bytes.
    /// `inside` and `outside` give what it and its guards hold.
    pub fn new(
        (name, dtype): (String, DType),
        (len, stride, shift): (u64, u64, u32),
        mut outside: impl FnMut() -> f32,
        mut inside: impl FnMut() -> f32,
    ) -> Self {
        let lead = GUARD / dtype.size() + u64::from(shift);
        let total = ((lead + len) * dtype.size() + GUARD).next_multiple_of(256) / dtype.size();
        let values: Vec<f32> =
            (0..total).map(|i| if (lead..lead + len).contains(&i) { inside() } else { outside() }).collect();
        let mut image = Vec::new();
        dtype.encode(&values, &mut image);
        Self { name, dtype, stride, at: lead * dtype.size(), image, all: None }
    }

    /// Byte range in the image of `width` elements from `column` of `row` on.
    pub fn range(&self, row: usize, column: u64, width: u64) -> std::ops::Range<usize> {
        let start = self.at + (row as u64 * self.stride + column) * self.dtype.size();
        start as usize..(start + width * self.dtype.size()) as usize
    }

    /// Device memory of `rows` rows from `first` on, the last one of `width` elements.
    pub fn rows(&self, first: u32, rows: u32, width: u64) -> Result<Region> {
        let range = self.range(first as usize, 0, (u64::from(rows) - 1) * self.stride + width);
        self.device().slice(range.start as u64, range.len() as u64)
    }

    pub fn device(&self) -> &Region {
        self.all.as_ref().expect("operands get their memory when the rig is made")
    }

    /// Compares everything with `kept`, which differs from the image only where a run had to write.
    pub fn check_kept(&self, kept: &[u8], got: &[u8], check: &mut Check) {
        let size = self.dtype.size() as usize;
        if kept == got {
            return;
        }
        for (i, (want, got)) in kept.chunks(size).zip(got.chunks(size)).enumerate().filter(|(_, (w, g))| w != g) {
            let element = (i * size) as i64 - self.at as i64;
            let place = if element < 0 { "guard before" } else { "untouched part of" };
            let element = element.max(0) as usize / size;
            let value = |bytes: &[u8]| self.dtype.decode(bytes)[0];
            check.mismatch(Mismatch {
                site: format!("{place} {}", self.name),
                row: element / self.stride as usize,
                column: element % self.stride as usize,
                got: value(got),
                want: value(want).into(),
                bound: 0.0,
            });
        }
    }
}
