//! Offsets past 2^31 and 2^32 bytes and past 2^32 elements, in every operand: a few rows far apart.
//!
//! Nearly all of the memory is never touched; only devices with room for it run these.

use super::case::kernels;
use super::data::{Dice, Y_UNIT};
use super::oracle::{Check, Oracle, Pair};
use super::{Outcome, Trial};
use crate::backend::{Caps, DeviceClass, GpuBackend, Launch};
use crate::contract::{Params, RowRef, SiteParams, Spec, Tile};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::ops::Op;

/// What lies far from its operand's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Far {
    /// The last row of x.
    X,
    /// The last row of z.
    Z,
    /// The last row of y.
    Y,
    /// The last row of A.
    A,
    /// The last row of B.
    B,
    /// The last slot.
    Slot,
    /// The last of 87,390 rows of 12,288 outputs, no padding between them.
    Rows,
}

const ALL: [Far; 7] = [Far::X, Far::Z, Far::Y, Far::A, Far::B, Far::Slot, Far::Rows];
const IN: u32 = 40;
const RANK: u32 = 5;
const SLOTS: u32 = 2;
/// Elements before and after a row of y that must keep their bits.
const GUARD: u64 = 96;

/// A trial for each operand, distance and op.
pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for op in Op::ALL {
        let spec = match op {
            Op::Bgmv => Spec { act: DType::F16, weight: DType::Bf16 },
            Op::Sgmv => Spec { act: DType::Bf16, weight: DType::F32 },
        };
        for far in ALL {
            for (name, distance) in [("2^31", 1 << 31), ("2^32", 1 << 32), ("2^33", 1 << 33), ("largest", 0)] {
                if far == Far::Rows && name != "2^31" {
                    continue;
                }
                let name = format!("{}[{}x{}] far {far:?}, {name} bytes", op.name(), spec.act, spec.weight);
                trials.push(Trial::new(name, move |backend| run(backend, op, spec, far, distance)));
            }
        }
    }
    trials
}

/// The bytes that an operand may have here.
fn largest(caps: &Caps) -> u64 {
    caps.max_alloc.min(caps.max_binding)
}

fn run(backend: &dyn GpuBackend, op: Op, spec: Spec, far: Far, distance: u64) -> Result<Outcome> {
    let caps = backend.caps();
    let ignored = |reason: String| Ok(Outcome::Ignored(reason));
    if caps.class == DeviceClass::Software {
        return ignored("gigabytes of memory, on a driver that computes on the CPU".into());
    }
    let distance = match distance {
        // As far as one operand reaches, with room for the last row; a matrix of 5 rows reaches 4/5 of its size.
        0 if largest(caps) > 1 << 33 => return ignored("operands may be larger than the fixed distances".into()),
        0 => largest(caps) / 4 * 3 / 4096 * 4096,
        fixed => fixed,
    };
    let rig = Rig::plan(op, spec, far, distance);
    let sizes = [rig.x_len(), rig.z_len(), rig.y_len(), rig.weights_len()];
    if let Some(size) = sizes.into_iter().find(|size| *size > largest(caps)) {
        return ignored(format!("an operand of {size} bytes; the device takes {}", largest(caps)));
    }
    let total: u64 = sizes.into_iter().sum();
    if caps.memory != 0 && caps.memory < total / 4 * 5 {
        return ignored(format!("{total} bytes; the device has {}", caps.memory));
    }
    match rig.run(backend) {
        Err(error @ Error::OutOfMemory { .. }) => ignored(error.to_string()),
        result => result.map(Outcome::Checked),
    }
}

/// Strides and counts of one trial.
struct Rig {
    op: Op,
    spec: Spec,
    rows: u32,
    out: u32,
    x_stride: u64,
    z_stride: u64,
    y_stride: u64,
    a_stride: u64,
    b_stride: u64,
    /// Bytes from a slot's A to the next slot's.
    slot_stride: u64,
}

impl Rig {
    fn plan(op: Op, spec: Spec, far: Far, distance: u64) -> Self {
        let (act, weight) = (spec.act.size(), spec.weight.size());
        let mut rig = Self {
            op,
            spec,
            rows: 3,
            out: 23,
            x_stride: u64::from(IN),
            z_stride: u64::from(RANK),
            // Guards of neighbouring rows don't touch.
            y_stride: 23 + 2 * GUARD,
            a_stride: u64::from(IN),
            b_stride: 8,
            slot_stride: 0,
        };
        // The last of n rows starts a little past the distance; where that wraps, it hits a guard or a neighbour.
        let far_stride = |rows: u64, size: u64| distance / (rows - 1) / size + 64;
        match far {
            Far::X => rig.x_stride = far_stride(3, act),
            Far::Z => rig.z_stride = far_stride(3, 4),
            Far::Y => rig.y_stride = far_stride(3, act),
            Far::A => rig.a_stride = far_stride(RANK.into(), weight).next_multiple_of(8),
            Far::B => rig.b_stride = far_stride(rig.out.into(), weight).next_multiple_of(8),
            Far::Slot | Far::Rows => {}
        }
        if far == Far::Rows {
            (rig.rows, rig.out, rig.y_stride) = (87_390, 12_288, 12_288);
        }
        rig.slot_stride = match far {
            Far::Slot => (distance + 256).next_multiple_of(256),
            // The slots' rows lie side by side, in the gaps of far strides: a row is less than 1 KiB.
            Far::A | Far::B => 4096,
            _ => rig.pair_len().next_multiple_of(256),
        };
        rig
    }

    fn a_len(&self) -> u64 {
        u64::from(RANK) * self.a_stride * self.spec.weight.size()
    }

    fn pair_len(&self) -> u64 {
        self.a_len() + u64::from(self.out) * self.b_stride * self.spec.weight.size()
    }

    fn weights_len(&self) -> u64 {
        u64::from(SLOTS - 1) * self.slot_stride + self.pair_len()
    }

    fn span(&self, stride: u64, width: u32, size: u64) -> u64 {
        (u64::from(self.rows - 1) * stride + u64::from(width)) * size
    }

    fn x_len(&self) -> u64 {
        self.span(self.x_stride, IN, self.spec.act.size())
    }

    fn z_len(&self) -> u64 {
        self.span(self.z_stride, RANK, 4)
    }

    /// y and a guard on each side.
    fn y_len(&self) -> u64 {
        (self.span(self.y_stride, self.out, self.spec.act.size()) + 2 * GUARD * self.spec.act.size())
            .next_multiple_of(4)
    }

    fn run(&self, backend: &dyn GpuBackend) -> Result<Check> {
        let (act, weight) = (self.spec.act, self.spec.weight);
        let active = [0, self.rows / 2, self.rows - 1];
        let mut dice = Dice::new(0xb16);
        let mut grid = |n: u64, steps: u32, of: f32| -> Vec<f32> {
            (0..n).map(|_| (dice.below(2 * steps + 1) as f32 - steps as f32) / of).collect()
        };
        let pairs: Vec<_> =
            (0..SLOTS).map(|_| (grid((RANK * IN).into(), 2, 2.0), grid((self.out * RANK).into(), 2, 2.0))).collect();
        let xs: Vec<_> = active.iter().map(|_| grid(IN.into(), 4, 4.0)).collect();
        // Each row with the bytes around it: a dense row's neighbours are no one's to write either.
        let ys: Vec<_> = active.iter().map(|_| grid(u64::from(self.out) + 2 * GUARD, 127, 16.0)).collect();

        let weights = backend.alloc(self.weights_len().next_multiple_of(4), "far weights")?;
        let x = backend.alloc(self.x_len().next_multiple_of(4), "far x")?;
        let z = backend.alloc(self.z_len(), "far z")?;
        let y = backend.alloc(self.y_len(), "far y")?;
        let write = |region: &Region, at: u64, dtype: DType, values: &[f32]| -> Result<()> {
            let mut bytes = Vec::new();
            dtype.encode(values, &mut bytes);
            backend.submit(&mut |e| e.write(&region.slice(at, bytes.len() as u64)?, &bytes))?;
            Ok(())
        };
        let mut tables = Vec::new();
        for (slot, (a, b)) in pairs.iter().enumerate() {
            let at = slot as u64 * self.slot_stride;
            for (row, values) in a.chunks(IN as usize).enumerate() {
                write(&weights, at + row as u64 * self.a_stride * weight.size(), weight, values)?;
            }
            let at = at + self.a_len();
            for (row, values) in b.chunks(RANK as usize).enumerate() {
                // Whole words; the pad column is not to be read.
                let padded: Vec<f32> = values.iter().copied().chain([f32::NAN]).collect();
                write(&weights, at + row as u64 * self.b_stride * weight.size(), weight, &padded)?;
            }
        }
        for part in [0, self.a_len()] {
            for slot in 0..u64::from(SLOTS) {
                let address = weights.ptr().0 + slot * self.slot_stride + part;
                tables.extend([address as u32, (address >> 32) as u32]);
            }
        }
        tables.extend([RANK; SLOTS as usize]);
        tables.extend([0.5f32.to_bits(); SLOTS as usize]);
        let mut rows = vec![RowRef { slot: -1, scale: 1.0 }; self.rows as usize];
        let mut tiles = Vec::new();
        for (i, row) in active.into_iter().enumerate() {
            rows[row as usize].slot = (i as i32 + 1) % SLOTS as i32;
            tiles.push(Tile { slot: rows[row as usize].slot, first_row: row, rows: 1, reserved: 0 });
            let x_at = u64::from(row) * self.x_stride * act.size();
            write(&x, x_at, act, &xs[i])?;
            backend.submit(&mut |e| {
                let region = z.slice(u64::from(row) * self.z_stride * 4, u64::from(RANK) * 4)?;
                e.write(&region, bytemuck::cast_slice(&[f32::NAN; RANK as usize]))
            })?;
        }
        // A row may start in the middle of a word: whole words are written, its own bytes changed.
        let mut images = Vec::new();
        for (i, row) in active.into_iter().enumerate() {
            let at = u64::from(row) * self.y_stride * act.size();
            let mut bytes = Vec::new();
            act.encode(&ys[i], &mut bytes);
            let start = at & !3;
            let mut whole = backend.read(&y.slice(start, at - start + bytes.len() as u64)?)?;
            whole.resize(whole.len().next_multiple_of(4), 0);
            whole[(at - start) as usize..][..bytes.len()].copy_from_slice(&bytes);
            backend.submit(&mut |e| e.write(&y.slice(start, whole.len() as u64)?, &whole))?;
            images.push(at);
        }
        let before = images
            .iter()
            .map(|at| backend.read(&y.slice(*at, (u64::from(self.out) + 2 * GUARD) * act.size())?))
            .collect::<Result<Vec<_>>>()?;

        let mut batch: Vec<u8> = bytemuck::cast_slice(&rows).to_vec();
        batch.resize(batch.len().next_multiple_of(16), 0);
        let tiles_at = batch.len() as u32 / 4;
        batch.extend_from_slice(bytemuck::cast_slice(&tiles));
        let batch_region = backend.alloc(batch.len() as u64, "far batch")?;
        let tables_region = backend.alloc(tables.len() as u64 * 4, "far tables")?;
        let words = |bytes: u64| (bytes / 4) as u32;
        let site = SiteParams {
            ranks: 4 * SLOTS,
            scales: 5 * SLOTS,
            out_features: self.out,
            y_stride: self.y_stride as u32,
            ..SiteParams::default()
        };
        let mut params = Params {
            rows: self.rows,
            slots: SLOTS,
            slot_count: SLOTS,
            sites: 1,
            in_features: IN,
            x_stride: self.x_stride as u32,
            a_stride: self.a_stride as u32,
            b_stride: self.b_stride as u32,
            z_stride: self.z_stride as u32,
            max_rank: RANK,
            tiles_at,
            tiles: tiles.len() as u32,
            max_out: self.out,
            ..Params::default()
        };
        let fixed = [batch_region.clone(), tables_region.clone(), weights.clone()];
        let [shrink, expand] = kernels(self.op).map(|kernel| backend.load(kernel, self.spec));
        let (shrink, expand) = (shrink?, expand?);
        let y_used = y.slice(GUARD * act.size(), self.span(self.y_stride, self.out, act.size()))?;
        backend.submit(&mut |e| {
            e.write(&batch_region, &batch)?;
            e.write(&tables_region, bytemuck::cast_slice(&tables))?;
            params.site[0] = SiteParams { cells: 0, span: words(self.a_len()), ..site };
            let operands = [&fixed[..], &[x.clone(), z.clone()]].concat();
            e.launch(&[Launch::new(&shrink, &operands, params)?])?;
            params.site[0] = SiteParams { cells: 2 * SLOTS, span: words(self.pair_len() - self.a_len()), ..site };
            let operands = [&fixed[..], &[z.clone(), y_used.clone()]].concat();
            e.launch(&[Launch::new(&expand, &operands, params)?])
        })?;

        let mut check = Check::default();
        for (i, row) in active.into_iter().enumerate() {
            let (a, b) = &pairs[rows[row as usize].slot as usize];
            let (rank, in_features, out_features) = (RANK as usize, IN as usize, self.out as usize);
            let oracle = Oracle::new(Pair { a, b, rank, in_features, out_features }, &xs[i]);
            let after = backend.read(&y.slice(images[i], before[i].len() as u64)?)?;
            let guard = (GUARD * act.size()) as usize;
            let inner = guard..before[i].len() - guard;
            let old = act.decode(&before[i][inner.clone()]);
            let expected = oracle.expand(&old, 0.5, act, Some(Y_UNIT));
            check.row("y", row as usize, act, &expected, &act.decode(&after[inner.clone()]));
            check.bits("before y", row as usize, act, &before[i][..guard], &after[..guard]);
            check.bits("after y", row as usize, act, &before[i][inner.end..], &after[inner.end..]);
        }
        Ok(check)
    }
}
