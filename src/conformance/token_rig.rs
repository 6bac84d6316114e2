//! The kernels of token ids and replaced rows, launch by launch, as [`raw`](super::raw) does for the others: memory laid
//! out by hand, poisoned and guarded.
//!
//! A gather has no arithmetic, so embed_shrink and overlay_embed are held to the bit; the sums of overlay_logits to
//! `(k + 1) * 2^-24 * sum|terms|` and one ulp. Everything that isn't replaced must keep its bits. Ids behind a slot's last
//! one continue the list; rows behind the last one are NaN.

use super::operand::Operand;
use super::oracle::{Check, dot};
use super::token_case::{Case, Data};
use super::window::Window;
use crate::backend::{Encoder, GpuBackend, Launch, Pipeline};
use crate::contract::{Kernel, Params, RowRef, SiteParams};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Region;

/// What surrounds data that must not be touched.
const FILL: f32 = 1.5;

/// A case in a device's memory.
pub(super) struct Rig<'b> {
    backend: &'b dyn GpuBackend,
    pub case: Case,
    data: Data,
    pipeline: Pipeline,
    /// Batch, tables, weights, and ids where the kernel has them.
    fixed: Vec<(Region, Vec<u8>)>,
    x: Operand,
    pub out: Operand,
    site: SiteParams,
}

impl<'b> Rig<'b> {
    pub fn new(backend: &'b dyn GpuBackend, case: &Case, data: Data) -> Result<Self> {
        let rows: Vec<RowRef> =
            data.slots.iter().zip(&data.scales).map(|(slot, scale)| RowRef { slot: *slot, scale: *scale }).collect();
        let weights = backend.alloc((u64::from(case.slots) * case.part_bytes()).max(16), "conformance weights")?;
        let (tables, site) = tables(case, &data, weights.ptr().0, weights.len());
        let (x_stride, out_stride) = (u64::from(case.width + case.pad), u64::from(case.out_width() + case.pad));
        let mut numbers = data.x.iter();
        let mut column = 0;
        let x = Operand::new(
            ("x".into(), case.act),
            (u64::from(case.rows) * x_stride, x_stride, case.shift),
            || f32::NAN,
            || {
                column += 1;
                match (column - 1) % x_stride < u64::from(case.width) {
                    true => numbers.next().copied().unwrap_or(f32::NAN),
                    false => f32::NAN,
                }
            },
        );
        let dtype = if case.is_embedding() { DType::F32 } else { case.act };
        let shape = (u64::from(case.rows) * out_stride, out_stride, case.shift);
        let mut out = Operand::new(("output".into(), dtype), shape, || FILL, || FILL);
        let width = (u64::from(case.out_width()) * dtype.size()) as usize;
        for (row, bytes) in data.out.chunks(width).enumerate() {
            let range = out.range(row, 0, case.out_width().into());
            out.image[range].copy_from_slice(bytes);
        }
        let mut x = x;
        for operand in [&mut x, &mut out] {
            operand.all = Some(backend.alloc(operand.image.len() as u64, "conformance matrix")?);
        }
        let upload = |bytes: Vec<u8>, label| Ok::<_, crate::Error>((backend.alloc(bytes.len() as u64, label)?, bytes));
        let fixed = vec![
            upload(bytemuck::cast_slice(&rows).to_vec(), "conformance batch")?,
            upload(bytemuck::cast_slice(&tables).to_vec(), "conformance tables")?,
            (weights, self::weights(case, &data)),
            upload(bytemuck::cast_slice(&data.ids).to_vec(), "conformance ids")?,
        ];
        let pipeline = backend.load(case.kernel, case.spec())?;
        let rig = Self { backend, case: case.clone(), data, pipeline, fixed, x, out, site };
        backend.submit(&mut |encoder| {
            rig.fixed.iter().try_for_each(|(region, bytes)| encoder.write(region, bytes))?;
            encoder.write(rig.x.device(), &rig.x.image)
        })?;
        Ok(rig)
    }

    pub fn reset(&self, encoder: &mut dyn Encoder) -> Result<()> {
        encoder.write(self.out.device(), &self.out.image)
    }

    pub fn record(&self, encoder: &mut dyn Encoder) -> Result<()> {
        let case = &self.case;
        let mut windows = Window::all((case.rows, case.chunk), (case.slots, case.window));
        windows.try_for_each(|window| self.launch(encoder, window))
    }

    fn launch(&self, encoder: &mut dyn Encoder, window: Window) -> Result<()> {
        let case = &self.case;
        let Window { rows: (first, rows), slots } = window;
        let part = case.part_bytes();
        let weights = self.fixed[2].0.slice(u64::from(slots.0) * part, u64::from(slots.1) * part)?;
        let read = match case.kernel {
            Kernel::OverlayLogits => self.x.rows(first, rows, case.width.into())?,
            _ => self.fixed[3].0.slice(u64::from(first) * 4, u64::from(rows) * 4)?,
        };
        let out = self.out.rows(first, rows, case.out_width().into())?;
        let mut params = Params {
            sites: 1,
            in_features: if case.is_embedding() { case.vocabulary } else { case.width },
            x_stride: self.x.stride as u32,
            a_stride: case.a_stride(),
            z_stride: self.out.stride as u32,
            max_rank: if case.is_embedding() { case.width } else { case.capacity },
            ..window.params(case.slots)
        };
        params.site[0] = SiteParams { y_stride: self.out.stride as u32, ..self.site };
        let operands = [self.fixed[0].0.clone(), self.fixed[1].0.clone(), weights, read, out];
        encoder.launch(&[Launch::new(&self.pipeline, &operands, params)?])
    }

    pub fn run(&self) -> Result<Vec<u8>> {
        self.backend.submit(&mut |encoder| {
            self.reset(encoder)?;
            self.record(encoder)
        })?;
        self.backend.read(self.out.device())
    }

    /// Compares every element with what it must be, and every byte that a run must not touch with what it was.
    pub fn check(&self, got: &[u8]) -> Result<Check> {
        let (case, data) = (&self.case, &self.data);
        let mut check = Check::default();
        let mut kept = self.out.image.clone();
        let width = case.width as usize;
        for row in 0..case.rows as usize {
            check.elements += u64::from(case.out_width());
            let Some(held) = data.held(row) else { continue };
            let (id, name) = (data.ids[row], case.kernel.name());
            match case.kernel {
                Kernel::EmbedShrink => {
                    let count = held.count as usize;
                    let range = self.out.range(row, 0, held.count.into());
                    let mut want = vec![0; count * 4];
                    if id < case.vocabulary {
                        want = bytemuck::cast_slice(&held.rows[id as usize * count..][..count]).to_vec();
                    }
                    check.bits(name, row, DType::F32, &want, &got[range.clone()]);
                    kept[range.clone()].copy_from_slice(&got[range]);
                }
                Kernel::OverlayEmbed => {
                    let Some(j) = held.ids.iter().position(|of| *of == id) else { continue };
                    let range = self.out.range(row, 0, case.width.into());
                    let mut want = Vec::new();
                    case.act.encode(&held.rows[j * width..][..width], &mut want);
                    check.bits(name, row, case.act, &want, &got[range.clone()]);
                    kept[range.clone()].copy_from_slice(&got[range]);
                }
                _ => {
                    let x = &data.x[row * width..][..width];
                    for (j, id) in held.ids.iter().enumerate().filter(|(_, id)| **id < case.vocabulary) {
                        let expected = dot(&held.rows[j * width..][..width], x, case.act);
                        let range = self.out.range(row, (*id).into(), 1);
                        check.row(name, row, case.act, &expected, &case.act.decode(&got[range.clone()]));
                        kept[range.clone()].copy_from_slice(&got[range]);
                    }
                }
            }
        }
        self.out.check_kept(&kept, got, &mut check);
        for (region, bytes) in self.fixed.iter().chain([&(self.x.device().clone(), self.x.image.clone())]) {
            if bytes.len() <= 1 << 18 {
                check.bits("an operand that is only read", 0, DType::F32, bytes, &self.backend.read(region)?);
            }
        }
        Ok(check)
    }

    /// The bytes of a row of what was written.
    pub fn row<'o>(&self, out: &'o [u8], row: usize) -> &'o [u8] {
        let held = if self.case.is_embedding() { self.data.held(row).map_or(0, |held| held.count) } else { u32::MAX };
        &out[self.out.range(row, 0, self.case.out_width().min(held).into())]
    }
}

/// Slot after slot; NaN wherever a slot has no element, and ids that go on behind its last one.
fn weights(case: &Case, data: &Data) -> Vec<u8> {
    let (mut nan, size) = (Vec::new(), case.weight.size() as usize);
    case.weight.encode(&[f32::NAN], &mut nan);
    let mut bytes = nan.repeat((u64::from(case.slots) * case.part_bytes()) as usize / size);
    for (part, held) in bytes.chunks_mut(case.part_bytes() as usize).zip(&data.held) {
        let Some(held) = held else { continue };
        let (ids, rows) = part.split_at_mut(case.ids_bytes() as usize);
        let mut next = held.ids.last().copied().unwrap_or(0);
        for (i, word) in ids.chunks_mut(4).enumerate() {
            next = held.ids.get(i).copied().unwrap_or(next.wrapping_add(1));
            word.copy_from_slice(&next.to_le_bytes());
        }
        let width = if case.is_embedding() { held.count } else { case.width } as usize;
        let mut row = Vec::new();
        for (to, values) in rows.chunks_mut(case.a_stride() as usize * size).zip(held.rows.chunks(width)) {
            row.clear();
            case.weight.encode(values, &mut row);
            to[..row.len()].copy_from_slice(&row);
        }
    }
    bytes
}

fn tables(case: &Case, data: &Data, weights: u64, len: u64) -> (Vec<u32>, SiteParams) {
    let slots = case.slots as usize;
    let (cells, ranks, scales) = (4, 5 + 2 * slots, 5 + 3 * slots);
    let mut words = vec![u32::MAX; 5 + 4 * slots];
    let most = if case.is_embedding() { case.width } else { case.capacity };
    for (slot, held) in data.held.iter().enumerate() {
        let right = weights + slot as u64 * case.part_bytes();
        let (cell, count) = match held {
            Some(held) => (right, held.count),
            // Of hostile tables every other one; an empty slot otherwise.
            None if case.hostile => match slot / 2 % 6 {
                0 => (weights - 16, 1),
                1 => (weights + len - case.part_bytes() + 16, 1),
                2 => (right, most + 1),
                3 => (right, u32::MAX),
                4 => (right ^ (1 << 32), 1),
                _ => (u64::MAX - 15, 1),
            },
            None => (0, 1),
        };
        words[cells + 2 * slot] = cell as u32;
        words[cells + 2 * slot + 1] = (cell >> 32) as u32;
        words[ranks + slot] = count;
        words[scales + slot] = 0.25f32.to_bits();
    }
    let site = SiteParams {
        cells: cells as u32,
        ranks: ranks as u32,
        scales: scales as u32,
        span: (case.part_bytes() / 4) as u32,
        out_features: case.vocabulary,
        ..SiteParams::default()
    };
    (words, site)
}
