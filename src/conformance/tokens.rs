//! The kernels of token ids and replaced rows, launch by launch, as [`raw`](super::raw) does for the others: memory laid
//! out by hand, poisoned and guarded.
//!
//! A gather has no arithmetic, so embed_shrink and overlay_embed are held to the bit; the sums of overlay_logits to
//! `(k + 1) * 2^-24 * sum|terms|` and one ulp. Everything that isn't replaced must keep its bits. Ids behind a slot's last
//! one continue the list and are asked for by the batch; rows behind the last one are NaN.

use std::fmt;

use super::data::Dice;
use super::operand::Operand;
use super::oracle::{Check, EPS, Expected};
use super::{Outcome, Trial};
use crate::backend::{Encoder, GpuBackend, Launch, Pipeline};
use crate::contract::{Kernel, Params, RowRef, SiteParams, Spec, overlay_ids_bytes};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Region;

/// What surrounds data that must not be touched.
const FILL: f32 = 1.5;

/// One launch, or one in parts, over one site.
#[derive(Clone, Debug)]
struct Case {
    kernel: Kernel,
    act: DType,
    weight: DType,
    rows: u32,
    /// Largest rank of an embedding; width of a replaced row.
    width: u32,
    vocabulary: u32,
    /// Most rows of an overlay.
    capacity: u32,
    slots: u32,
    /// Elements of padding after each row of x, y and z.
    pad: u32,
    /// Elements by which they start past a multiple of 256 bytes.
    shift: u32,
    /// Rows and slots a launch takes; 0: all.
    chunk: u32,
    window: u32,
    /// Whether some slots have tables that no pool would write.
    hostile: bool,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            kernel: Kernel::OverlayEmbed,
            act: DType::F32,
            weight: DType::F32,
            rows: 33,
            width: 48,
            vocabulary: 131,
            capacity: 16,
            slots: 7,
            pad: 0,
            shift: 0,
            chunk: 0,
            window: 0,
            hostile: false,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, act, weight, rows, width, vocabulary, capacity, .. } = self;
        write!(f, "{}[{act}x{weight},width={width},vocabulary={vocabulary}", kernel.name())?;
        if *kernel != Kernel::EmbedShrink {
            write!(f, ",capacity={capacity}")?;
        }
        write!(f, ",rows={rows}")?;
        let numbers =
            [("slots", self.slots, 7), ("pad", self.pad, 0), ("shift", self.shift, 0), ("chunk", self.chunk, 0)];
        for (name, value, _) in
            numbers.into_iter().chain([("window", self.window, 0)]).filter(|(_, value, usual)| value != usual)
        {
            write!(f, ",{name}={value}")?;
        }
        f.write_str(if self.hostile { ",hostile]" } else { "]" })
    }
}

impl Case {
    fn spec(&self) -> Spec {
        Spec { act: self.act, weight: self.weight }
    }

    fn is_embedding(&self) -> bool {
        self.kernel == Kernel::EmbedShrink
    }

    fn a_stride(&self) -> u32 {
        self.width.next_multiple_of(crate::contract::STRIDE_ALIGN)
    }

    fn ids_bytes(&self) -> u64 {
        if self.is_embedding() { 0 } else { overlay_ids_bytes(self.capacity) }
    }

    /// Bytes of a slot.
    fn part_bytes(&self) -> u64 {
        let rows = if self.is_embedding() { self.vocabulary } else { self.capacity };
        self.ids_bytes() + u64::from(rows) * u64::from(self.a_stride()) * self.weight.size()
    }

    /// Elements of a row that is written.
    fn out_width(&self) -> u32 {
        if self.kernel == Kernel::OverlayLogits { self.vocabulary } else { self.width }
    }
}

/// What a slot has at the site.
#[derive(Clone, Debug)]
struct Held {
    /// Ids that are replaced, ascending; of an embedding none.
    ids: Vec<u32>,
    /// Rank of an embedding; number of replaced rows.
    count: u32,
    /// Replaced rows, or `A^T[vocabulary][count]`.
    rows: Vec<f32>,
}

/// A case's contents.
#[derive(Clone, Debug)]
struct Data {
    slots: Vec<i32>,
    scales: Vec<f32>,
    /// The token of each row.
    ids: Vec<u32>,
    /// `x[rows][width]`, values of the activation type.
    x: Vec<f32>,
    held: Vec<Option<Held>>,
    /// What is written, before: `[rows][out_width]`, encoded.
    out: Vec<u8>,
}

impl Data {
    fn new(case: &Case) -> Self {
        let mut dice = Dice::new(0x70c);
        let held: Vec<_> = (0..case.slots).map(|slot| held(case, slot, &mut dice)).collect();
        let slots: Vec<i32> = (0..case.rows)
            .map(|row| match dice.below(8) {
                0 => [-1, -2, i32::MIN][row as usize % 3],
                _ => dice.below(case.slots) as i32,
            })
            .collect();
        let ids = slots.iter().map(|slot| token(case, &held, *slot, &mut dice)).collect();
        let scales = slots.iter().map(|_| [1.0, 0.0, -0.5, 3.0][dice.below(4) as usize]).collect();
        let x = (0..case.rows * case.width).map(|_| case.act.round(dice.unit())).collect();
        // Any bits at all: most of them must be there afterwards.
        let size = if case.is_embedding() { 4 } else { case.act.size() };
        let out = (0..u64::from(case.rows) * u64::from(case.out_width()) * size).map(|_| dice.bits() as u8).collect();
        Self { slots, scales, ids, x, held, out }
    }

    fn held(&self, row: usize) -> Option<&Held> {
        self.held.get(usize::try_from(self.slots[row]).ok()?)?.as_ref()
    }

    /// These rows as a batch of their own.
    fn select(&self, case: &Case, rows: &[usize]) -> Self {
        let width = case.width as usize;
        let bytes = self.out.len() / self.slots.len();
        Self {
            slots: rows.iter().map(|row| self.slots[*row]).collect(),
            scales: rows.iter().map(|row| self.scales[*row]).collect(),
            ids: rows.iter().map(|row| self.ids[*row]).collect(),
            x: rows.iter().flat_map(|row| self.x[row * width..(row + 1) * width].to_vec()).collect(),
            held: self.held.clone(),
            out: rows.iter().flat_map(|row| self.out[row * bytes..(row + 1) * bytes].to_vec()).collect(),
        }
    }
}

/// Slot 2 is empty, slot 1 full, slot 3 has one row.
fn held(case: &Case, slot: u32, dice: &mut Dice) -> Option<Held> {
    if slot == 2 || (case.hostile && slot % 2 == 1) {
        return None;
    }
    let most = if case.is_embedding() { case.width } else { case.capacity.min(case.vocabulary) };
    let count = match slot {
        1 => most,
        3 => 1,
        _ => 1 + dice.below(most),
    };
    let (rows, ids) = match case.is_embedding() {
        true => (case.vocabulary * count, Vec::new()),
        false => {
            // Spread over the vocabulary, its first and last id among them.
            let mut ids: Vec<u32> =
                (0..count).map(|i| (u64::from(i) * u64::from(case.vocabulary) / u64::from(count)) as u32).collect();
            if slot.is_multiple_of(2) {
                let last = ids.len() - 1;
                ids[last] = case.vocabulary - 1;
            }
            (count * case.width, ids)
        }
    };
    Some(Held { ids, count, rows: (0..rows).map(|_| case.weight.round(dice.unit())).collect() })
}

/// A token: often one of its slot's, often one beside, sometimes none of the vocabulary.
fn token(case: &Case, held: &[Option<Held>], slot: i32, dice: &mut Dice) -> u32 {
    let of_slot = usize::try_from(slot).ok().and_then(|slot| held[slot].as_ref()).filter(|held| !held.ids.is_empty());
    match (dice.below(8), of_slot) {
        (0, _) => [case.vocabulary, u32::MAX, case.vocabulary + 1][dice.below(3) as usize],
        (1, Some(held)) => held.ids[0],
        (2, Some(held)) => held.ids[held.ids.len() - 1],
        (3, Some(held)) => held.ids[held.ids.len() - 1] + 1,
        (4 | 5, Some(held)) => held.ids[dice.below(held.ids.len() as u32) as usize],
        (6, Some(held)) => held.ids[dice.below(held.ids.len() as u32) as usize].wrapping_add(1),
        _ => dice.below(case.vocabulary),
    }
}

/// A case in a device's memory.
struct Rig<'b> {
    backend: &'b dyn GpuBackend,
    case: Case,
    data: Data,
    pipeline: Pipeline,
    /// Batch, tables, weights, and ids where the kernel has them.
    fixed: Vec<(Region, Vec<u8>)>,
    x: Operand,
    out: Operand,
    site: SiteParams,
}

impl<'b> Rig<'b> {
    fn new(backend: &'b dyn GpuBackend, case: &Case, data: Data) -> Result<Self> {
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

    fn reset(&self, encoder: &mut dyn Encoder) -> Result<()> {
        encoder.write(self.out.device(), &self.out.image)
    }

    fn record(&self, encoder: &mut dyn Encoder) -> Result<()> {
        let case = &self.case;
        let step = |n: u32, all: u32| if n == 0 { all } else { n };
        for first in (0..case.rows).step_by(step(case.chunk, case.rows) as usize) {
            let rows = step(case.chunk, case.rows).min(case.rows - first);
            for slot in (0..case.slots).step_by(step(case.window, case.slots) as usize) {
                let slots = step(case.window, case.slots).min(case.slots - slot);
                self.launch(encoder, (first, rows), (slot, slots))?;
            }
        }
        Ok(())
    }

    fn launch(&self, encoder: &mut dyn Encoder, (first, rows): (u32, u32), slots: (u32, u32)) -> Result<()> {
        let case = &self.case;
        let part = case.part_bytes();
        let weights = self.fixed[2].0.slice(u64::from(slots.0) * part, u64::from(slots.1) * part)?;
        let read = match case.kernel {
            Kernel::OverlayLogits => self.x.rows(first, rows, case.width.into())?,
            _ => self.fixed[3].0.slice(u64::from(first) * 4, u64::from(rows) * 4)?,
        };
        let out = self.out.rows(first, rows, case.out_width().into())?;
        let mut params = Params {
            rows,
            row_first: first,
            slots: case.slots,
            slot_first: slots.0,
            slot_count: slots.1,
            sites: 1,
            in_features: if case.is_embedding() { case.vocabulary } else { case.width },
            x_stride: self.x.stride as u32,
            a_stride: case.a_stride(),
            z_stride: self.out.stride as u32,
            max_rank: if case.is_embedding() { case.width } else { case.capacity },
            ..Params::default()
        };
        params.site[0] = SiteParams { y_stride: self.out.stride as u32, ..self.site };
        let operands = [self.fixed[0].0.clone(), self.fixed[1].0.clone(), weights, read, out];
        encoder.launch(&[Launch::new(&self.pipeline, &operands, params)?])
    }

    fn run(&self) -> Result<Vec<u8>> {
        self.backend.submit(&mut |encoder| {
            self.reset(encoder)?;
            self.record(encoder)
        })?;
        self.backend.read(self.out.device())
    }

    /// Compares every element with what it must be, and every byte that a run must not touch with what it was.
    fn check(&self, got: &[u8]) -> Result<Check> {
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
    fn row<'o>(&self, out: &'o [u8], row: usize) -> &'o [u8] {
        let held = if self.case.is_embedding() { self.data.held(row).map_or(0, |held| held.count) } else { u32::MAX };
        &out[self.out.range(row, 0, self.case.out_width().min(held).into())]
    }
}

/// A sum of products in f64, and how far f32 may stray from it.
pub(super) fn dot(a: &[f32], x: &[f32], act: DType) -> Expected {
    let products = a.iter().zip(x).map(|(a, x)| f64::from(*a) * f64::from(*x));
    let (mut sum, mut terms) = (0.0, 0.0);
    products.for_each(|product| {
        sum += product;
        terms += product.abs();
    });
    let tiny = f64::from(f32::MIN_POSITIVE) * (2.0 * a.len() as f64 + 2.0);
    Expected { want: vec![sum], bound: vec![(a.len() + 1) as f64 * EPS * terms + tiny + act.ulp(sum)] }
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

const KERNELS: [Kernel; 3] = [Kernel::EmbedShrink, Kernel::OverlayEmbed, Kernel::OverlayLogits];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for kernel in KERNELS {
        for act in DType::ALL {
            for weight in DType::ALL {
                let base = Case { kernel, act, weight, ..Case::default() };
                cases.push(base.clone());
                cases.push(Case { width: 37, capacity: 5, pad: 3, shift: 1, rows: 17, ..base.clone() });
                cases.push(Case { width: 1, capacity: 1, vocabulary: 2, rows: 5, shift: 1, ..base.clone() });
                cases.push(Case { hostile: true, slots: 13, width: 24, ..base.clone() });
                cases.push(Case { width: 131, capacity: 131, pad: 1, chunk: 5, window: 2, ..base });
            }
        }
        let large = Case { kernel, act: DType::Bf16, weight: DType::F16, ..Case::default() };
        cases.push(Case { vocabulary: 151_937, capacity: 300, rows: 9, slots: 4, width: 20, ..large.clone() });
        cases.push(Case { rows: 1000, capacity: 3, slots: 5, width: 9, ..large.clone() });
        cases.push(Case { width: 512, capacity: 70, rows: 3, ..large.clone() });
        cases.push(Case { width: 300, vocabulary: 70_000, capacity: 20_000, rows: 4, slots: 2, ..large });
    }
    // More workgroups than a dimension of a grid holds.
    cases.push(Case { kernel: Kernel::OverlayEmbed, rows: 70_000, width: 3, ..Case::default() });
    cases
}

/// A property: its name, and what it checks on a case.
type Property = (&'static str, fn(&dyn GpuBackend, &Case) -> Result<Check>);

const PROPERTIES: [Property; 5] = [
    ("row alone = row in a batch", alone),
    ("any slot", any_slot),
    ("any capacity, stride and alignment", any_shape),
    ("rows and slots in parts", in_parts),
    ("graph = eager, every time", graph),
];

/// All trials of these kernels.
pub(super) fn trials() -> Vec<Trial> {
    let mut trials: Vec<Trial> = cases()
        .into_iter()
        .map(|case| {
            Trial::new(case.to_string(), move |backend| {
                let rig = Rig::new(backend, &case, Data::new(&case))?;
                Ok(Outcome::Checked(rig.check(&rig.run()?)?))
            })
        })
        .collect();
    for (name, check) in PROPERTIES {
        for kernel in KERNELS {
            for act in DType::ALL {
                let case =
                    Case { kernel, act, weight: DType::ALL[(act as usize + 1) % 3], width: 37, ..Case::default() };
                let run = move |backend: &dyn GpuBackend| check(backend, &case).map(Outcome::Checked);
                trials.push(Trial::new(format!("{}[{act}] to the bit: {name}", kernel.name()), run));
            }
        }
    }
    trials
}

/// Compares rows of two runs: `(row, other row)`.
fn same(rig: &Rig<'_>, out: &[u8], other: &Rig<'_>, other_out: &[u8], rows: &[(usize, usize)], check: &mut Check) {
    let dtype = rig.out.dtype;
    for (row, at) in rows {
        check.bits(rig.case.kernel.name(), *row, dtype, rig.row(out, *row), other.row(other_out, *at));
    }
}

fn alone(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let data = Data::new(case);
    let whole = Rig::new(backend, case, data.clone())?;
    let out = whole.run()?;
    let mut check = whole.check(&out)?;
    let rows = case.rows as usize;
    let mut orders: Vec<Vec<usize>> = [0, 5, 16, 32].map(|row| vec![row]).to_vec();
    orders.push((7..23).collect());
    orders.push((0..rows).map(|i| (i * 5 + 3) % rows).collect());
    for order in orders {
        let part = Case { rows: order.len() as u32, ..case.clone() };
        let part = Rig::new(backend, &part, data.select(case, &order))?;
        let places: Vec<_> = order.iter().copied().zip(0..).collect();
        same(&whole, &out, &part, &part.run()?, &places, &mut check);
    }
    Ok(check)
}

fn any_slot(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let mut data = Data::new(case);
    // One row, with every slot in turn, which all hold the same.
    data.held = vec![data.held[1].clone(); case.slots as usize];
    let row = (0..case.rows as usize).find(|row| data.ids[*row] < case.vocabulary).unwrap_or(0);
    data.ids[row] = data.held[0].as_ref().and_then(|held| held.ids.get(1).copied()).unwrap_or(data.ids[row]);
    let mut data = data.select(case, &vec![row; case.slots as usize]);
    data.slots = (0..case.slots as i32).collect();
    let rig = Rig::new(backend, &Case { rows: case.slots, ..case.clone() }, data)?;
    let out = rig.run()?;
    let mut check = rig.check(&out)?;
    let places: Vec<_> = (1..case.slots as usize).map(|row| (0, row)).collect();
    same(&rig, &out, &rig, &out, &places, &mut check);
    Ok(check)
}

fn any_shape(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let data = Data::new(case);
    let plain = Rig::new(backend, case, data.clone())?;
    let out = plain.run()?;
    let mut check = plain.check(&out)?;
    let places: Vec<_> = (0..case.rows as usize).map(|row| (row, row)).collect();
    for (capacity, pad, shift) in [(case.capacity + 1, 0, 0), (64, 1, 0), (case.capacity, 0, 1), (1000, 5, 3)] {
        let other = Rig::new(backend, &Case { capacity, pad, shift, ..case.clone() }, data.clone())?;
        same(&plain, &out, &other, &other.run()?, &places, &mut check);
    }
    Ok(check)
}

fn in_parts(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let data = Data::new(case);
    let whole = Rig::new(backend, case, data.clone())?;
    let out = whole.run()?;
    let mut check = whole.check(&out)?;
    for (chunk, window) in [(1, 0), (5, 0), (0, 1), (7, 2)] {
        let parts = Rig::new(backend, &Case { chunk, window, ..case.clone() }, data.clone())?;
        check.bits("memory", 0, whole.out.dtype, &out, &parts.run()?);
    }
    Ok(check)
}

fn graph(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let rig = Rig::new(backend, case, Data::new(case))?;
    let out = rig.run()?;
    let mut check = rig.check(&out)?;
    let graph = backend.capture(&mut |encoder| rig.record(encoder))?;
    for _ in 0..3 {
        check.bits("eager", 0, rig.out.dtype, &out, &rig.run()?);
        backend.submit(&mut |encoder| rig.reset(encoder))?;
        graph.replay()?;
        check.bits("replay", 0, rig.out.dtype, &out, &backend.read(rig.out.device())?);
    }
    Ok(check)
}
