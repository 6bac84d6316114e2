//! From an adapter's experts to the bytes of a slot's area.

use std::ops::Range;

use super::{ExpertPool, Part};
use crate::adapter::Adapter;
use crate::backend::Encoder;
use crate::error::{Error, Result};
use crate::memory::Region;

/// An adapter's experts as they lie in a slot, whichever one.
#[derive(Debug)]
pub struct ExpertImage {
    bytes: Vec<u8>,
    pairs: Vec<PackedExpert>,
}

/// One expert's pair in an image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedExpert {
    pub site: usize,
    pub expert: u32,
    /// Offset of A.
    pub a: u64,
    /// Offset of B.
    pub b: u64,
    pub rank: u32,
    pub scale: f32,
}

impl ExpertImage {
    /// Packs the experts of `adapter`, one pair behind the other. Rank tails and row padding are zero.
    ///
    /// # Errors
    /// [`Error::Shape`] for an expert or a linear that the pool does not have or has in another shape, [`Error::Limit`]
    /// for a rank above the pool's or more pairs than a slot holds, [`Error::Overflow`] for a value that the pool's type
    /// can't hold.
    pub fn new(pool: &ExpertPool, adapter: &Adapter) -> Result<Self> {
        let dtype = pool.dtype();
        let element = dtype.size() as usize;
        let mut image = Self { bytes: Vec::new(), pairs: Vec::with_capacity(adapter.experts.len()) };
        let full = || Error::Limit {
            what: "bytes of an adapter's experts",
            found: pool.spec().adapter_bytes(adapter, dtype),
            limit: pool.spec().slot_bytes,
            hint: " (raise the expert pool's slot_bytes)",
        };
        let mut cursor = 0;
        let mut seen = std::collections::HashSet::new();
        for pair in &adapter.experts {
            let site = pool.fit(pair)?;
            if !seen.insert((site, pair.expert)) {
                let what = format!("expert {} of {}", pair.expert, pair.site.path);
                return Err(Error::shape(what, "two pairs", "one"));
            }
            let mut offsets = [0; 2];
            for (part, matrix, stride) in [(Part::A, &pair.a, pool.a_stride(site)), (Part::B, &pair.b, pool.b_stride())]
            {
                let len = pool.part_bytes(site, part);
                let start = pool.area.take(&mut cursor, len).ok_or_else(full)?;
                image.bytes.resize(cursor as usize, 0);
                offsets[part as usize] = start;
                let values = matrix.to(dtype).map_err(|(index, value)| {
                    let tensor = format!("lora_{part:?} of expert {} of {}", pair.expert, pair.site.path);
                    Error::Overflow { tensor, index, value, dtype }
                })?;
                let rows = image.bytes[start as usize..].chunks_mut(stride as usize * element);
                for (to, from) in rows.zip(values.chunks(matrix.cols * element)) {
                    to[..from.len()].copy_from_slice(from);
                }
            }
            let [a, b] = offsets;
            image.pairs.push(PackedExpert {
                site,
                expert: pair.expert,
                a,
                b,
                rank: pair.rank() as u32,
                scale: pair.scale,
            });
        }
        Ok(image)
    }

    /// The bytes from the area's start to the last pair's end.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn pairs(&self) -> &[PackedExpert] {
        &self.pairs
    }

    /// Where the image's bytes go in `slot`.
    pub(crate) fn spans(&self, pool: &ExpertPool, slot: u32) -> Result<Vec<(Range<usize>, Region)>> {
        let (len, chunk) = (self.bytes.len() as u64, pool.area.chunk());
        let starts = (0..len).step_by(chunk as usize);
        starts
            .map(|start| {
                let end = (start + chunk).min(len);
                Ok((start as usize..end as usize, pool.region(slot, start..end)?))
            })
            .collect()
    }

    /// Records the writes of the image to `slot`. Table entries stay as they are.
    pub(crate) fn write(&self, pool: &ExpertPool, slot: u32, encoder: &mut dyn Encoder) -> Result<()> {
        let mut spans = self.spans(pool, slot)?.into_iter();
        spans.try_for_each(|(range, region)| encoder.write(&region, &self.bytes[range]))
    }
}
