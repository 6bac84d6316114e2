//! A pool with adapters in it, and batches applied through the public API.

use super::oracle::{Check, Expected, Oracle, Pair};
use crate::adapter::{Adapter, HostMatrix, HostPair, RowVectors};
use crate::backend::{Encoder, GpuBackend};
use crate::contract::RowRef;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Region;
use crate::ops::{Applier, Matrix, Op, Output};
use crate::pool::{Capacity, Plan, Pool, PoolSpec, SiteKind, SlotImage};

/// Elements of guard around every matrix on the device.
const GUARD: usize = 96;

/// An adapter's pairs as the pool stores them, by site of the pool.
type Stored = Vec<Option<(HostPair, Vec<f32>, Vec<f32>)>>;

/// A pool, what its slots hold, and what applies it.
pub(super) struct Bench<'b> {
    backend: &'b dyn GpuBackend,
    pub pool: Pool,
    pub applier: Applier,
    slots: Vec<Stored>,
}

/// A batch's x and y of every site, on the host and on the device.
pub(super) struct Io {
    act: DType,
    pub rows: Vec<RowRef>,
    /// For each site `x[rows][in_features]`; sites of a group have the same.
    pub x: Vec<Vec<f32>>,
    /// For each site `y[rows][out_features]`, encoded.
    pub y: Vec<Vec<u8>>,
    groups: Vec<Vec<usize>>,
    /// For each group x; for each site y: the memory with its guards, and what is in it before a run.
    inputs: Vec<Matrix>,
    outputs: Vec<Matrix>,
    memory: Vec<(Region, Vec<u8>)>,
    /// For each site: which memory, and the byte where its row 0 starts in it.
    at: Vec<(usize, usize)>,
}

/// How the outputs of a group lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Each in an allocation of its own.
    Apart,
    /// Side by side in the rows of one, with a gap between them.
    Interleaved,
}

impl<'b> Bench<'b> {
    pub fn new(
        backend: &'b dyn GpuBackend,
        spec: PoolSpec,
        act: DType,
        capacity: Capacity,
        scratch: Option<u64>,
    ) -> Result<Self> {
        let slots = (0..spec.max_loras).map(|_| spec.sites.iter().map(|_| None).collect()).collect();
        let pool = Pool::new(backend, spec)?;
        let applier = match scratch {
            None => Applier::new(backend, &pool, act, capacity)?,
            Some(bytes) => Applier::with_scratch(backend, &pool, act, capacity, bytes)?,
        };
        Ok(Self { backend, pool, applier, slots })
    }

    /// Puts an adapter in a slot, or empties it.
    pub fn put(&mut self, slot: u32, adapter: Option<&Adapter>) -> Result<()> {
        let image = match adapter {
            Some(adapter) => SlotImage::new(&self.pool, adapter)?,
            None => SlotImage::empty(&self.pool),
        };
        let cells = image.cells(&self.pool, slot)?;
        self.pool.publish(self.backend, slot, &cells, image.scale(), &mut |e| image.write(&self.pool, slot, e))?;
        let dtype = self.pool.layout().dtype();
        let stored = |m: &HostMatrix| m.to(dtype).map(|bytes| dtype.decode(&bytes)).unwrap_or_default();
        let sites = self.pool.sites().iter().map(|site| {
            let linear = site.kind == SiteKind::Linear;
            let pair = adapter?.pairs.iter().find(|pair| linear && pair.site.path == site.id.path)?;
            Some((pair.clone(), stored(&pair.a), stored(&pair.b)))
        });
        self.slots[slot as usize] = sites.collect();
        Ok(())
    }

    /// A batch on the device. Sites whose x differs from that of their group's first are groups of their own.
    pub fn io(&self, rows: Vec<RowRef>, x: Vec<Vec<f32>>, y: Vec<Vec<u8>>, place: Place) -> Result<Io> {
        let (act, sites) = (self.applier.act(), self.pool.sites());
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for group in self.pool.spec().groups() {
            let (same, other): (Vec<_>, Vec<_>) = group.iter().partition(|site| x[**site] == x[group[0]]);
            groups.push(same);
            groups.extend(other.into_iter().map(|site| vec![site]));
        }
        let mut io = Io {
            act,
            x,
            y,
            inputs: Vec::new(),
            outputs: vec![],
            memory: Vec::new(),
            at: vec![(0, 0); sites.len()],
            groups: groups.clone(),
            rows,
        };
        let count = io.rows.len();
        let mut outputs: Vec<Option<Matrix>> = vec![None; sites.len()];
        for group in &groups {
            let width = sites[group[0]].in_features as usize;
            let mut bytes = Vec::new();
            act.encode(&io.x[group[0]], &mut bytes);
            let (region, _) = io.upload(self.backend, count, width + 1, &[(width, &bytes)], f32::NAN)?;
            io.inputs.push(Matrix::new(region, width as u32 + 1));
            let runs: Vec<&[usize]> = match place {
                Place::Apart => group.chunks(1).collect(),
                Place::Interleaved => vec![group],
            };
            for run in runs {
                let widths = run.iter().map(|site| sites[*site].out_features as usize);
                let stride = widths.clone().map(|width| width + 3).sum::<usize>();
                let parts: Vec<(usize, Vec<u8>)> =
                    widths.zip(run).map(|(width, site)| (width, io.y[*site].clone())).collect();
                let parts: Vec<(usize, &[u8])> = parts.iter().map(|(width, y)| (*width, &y[..])).collect();
                let (region, starts) = io.upload(self.backend, count, stride, &parts, 1.5)?;
                let size = act.size() as usize;
                for (site, start) in run.iter().zip(starts) {
                    io.at[*site] = (io.memory.len() - 1, (GUARD + start) * size);
                    let used = region.len() - (start * size) as u64;
                    outputs[*site] = Some(Matrix::new(region.slice((start * size) as u64, used)?, stride as u32));
                }
            }
        }
        // Sites of other kinds have no y here.
        let none = Matrix::new(io.memory[0].0.clone(), 0);
        io.outputs = outputs.into_iter().map(|y| y.unwrap_or_else(|| none.clone())).collect();
        Ok(io)
    }

    /// Records all groups.
    pub fn encode(&self, encoder: &mut dyn Encoder, op: Op, capacity: Capacity, io: &Io) -> Result<()> {
        for (group, x) in io.groups.iter().zip(&io.inputs) {
            let outputs: Vec<Output<'_>> =
                group.iter().map(|site| Output { site: *site, y: &io.outputs[*site] }).collect();
            self.applier.encode(encoder, &self.pool, op, capacity, x, &outputs)?;
        }
        Ok(())
    }

    /// Applies the adapters to the batch and reads every y, with its guards.
    pub fn run(&self, op: Op, io: &Io) -> Result<Vec<Vec<u8>>> {
        let plan = Plan::new(io.rows.clone());
        self.backend.submit(&mut |encoder| {
            io.reset(encoder)?;
            self.applier.write_batch(encoder, &plan, plan.capacity())?;
            self.encode(encoder, op, plan.capacity(), io)
        })?;
        io.read(self.backend)
    }

    /// What the oracle has for a row at a site: nothing where y must keep its bits.
    fn pair(&self, row: RowRef, site: usize) -> Option<(&HostPair, Pair<'_>)> {
        let slot = self.slots.get(usize::try_from(row.slot).ok()?)?;
        let (pair, a, b) = slot[site].as_ref()?;
        let (rank, in_features, out_features) = (pair.rank(), pair.in_features(), pair.out_features());
        Some((pair, Pair { a, b, rank, in_features, out_features }))
    }

    /// Compares every y with the oracle, and everything else with what it was.
    pub fn check(&self, io: &Io, memory: &[Vec<u8>]) -> Check {
        self.check_against(io, memory, |_, _, expected| expected)
    }

    /// As [`Bench::check`], with values of one's own: `truth(site, row, expected)`.
    pub fn check_against(
        &self,
        io: &Io,
        memory: &[Vec<u8>],
        truth: impl Fn(usize, usize, Expected) -> Expected,
    ) -> Check {
        let mut check = Check::default();
        let mut kept: Vec<Vec<u8>> = io.memory.iter().map(|(_, image)| image.clone()).collect();
        for (site, spec) in self.pool.sites().iter().enumerate() {
            if spec.kind != SiteKind::Linear {
                continue;
            }
            for (row, entry) in io.rows.iter().enumerate() {
                let range = io.range(site, row, spec.out_features as usize);
                let Some((pair, view)) = self.pair(*entry, site) else {
                    check.elements += u64::from(spec.out_features);
                    continue;
                };
                let width = spec.in_features as usize;
                let oracle = Oracle::new(view, &io.x[site][row * width..(row + 1) * width]);
                let before = io.act.decode(&io.memory[io.at[site].0].1[range.clone()]);
                let scales = [pair.scale, entry.scale].map(f64::from);
                let vectors = pair.vectors.as_ref().map(RowVectors::slices);
                let expected = truth(site, row, oracle.expand_shaped(&before, scales, vectors, io.act, None));
                let got = &memory[io.at[site].0][range.clone()];
                check.row(&spec.id.path, row, io.act, &expected, &io.act.decode(got));
                kept[io.at[site].0][range].copy_from_slice(got);
            }
        }
        for (i, (kept, got)) in kept.iter().zip(memory).enumerate() {
            let elements = check.elements;
            check.bits(&format!("untouched parts of memory {i}"), 0, io.act, kept, got);
            check.elements = elements;
        }
        check
    }
}

impl Io {
    /// A guarded matrix of `rows` rows, `stride` apart, with parts side by side in each row, 3 elements
    /// between them; `fill` everywhere else. Its used part, and the element where each part starts.
    fn upload(
        &mut self,
        backend: &dyn GpuBackend,
        rows: usize,
        stride: usize,
        parts: &[(usize, &[u8])],
        fill: f32,
    ) -> Result<(Region, Vec<usize>)> {
        let size = self.act.size() as usize;
        let mut image = Vec::new();
        self.act.encode(&vec![fill; (2 * GUARD + rows * stride).next_multiple_of(2)], &mut image);
        let mut starts = Vec::new();
        let mut start = 0;
        for (width, bytes) in parts {
            for (row, bytes) in bytes.chunks(width * size).enumerate() {
                let at = (GUARD + row * stride + start) * size;
                image[at..at + bytes.len()].copy_from_slice(bytes);
            }
            starts.push(start);
            start += width + 3;
        }
        let region = backend.alloc(image.len() as u64, "conformance matrix")?;
        backend.submit(&mut |encoder| encoder.write(&region, &image))?;
        let used = region.slice((GUARD * size) as u64, (rows * stride * size) as u64)?;
        if !fill.is_nan() {
            self.memory.push((region, image));
        }
        Ok((used, starts))
    }

    /// Brings every y back to what it was.
    pub fn reset(&self, encoder: &mut dyn Encoder) -> Result<()> {
        self.memory.iter().try_for_each(|(region, image)| encoder.write(region, image))
    }

    /// Every y, with its guards.
    pub fn read(&self, backend: &dyn GpuBackend) -> Result<Vec<Vec<u8>>> {
        self.memory.iter().map(|(region, _)| backend.read(region)).collect()
    }

    /// Bytes of a row of a site's y in its memory.
    pub fn range(&self, site: usize, row: usize, width: usize) -> std::ops::Range<usize> {
        let size = self.act.size() as usize;
        let start = self.at[site].1 + row * self.outputs[site].stride() as usize * size;
        start..start + width * size
    }

    /// Which of the memories holds a site's y.
    pub fn memory_of(&self, site: usize) -> usize {
        self.at[site].0
    }
}
