//! A pool with an embedding and a head, and batches applied through the public API.

use super::oracle::{Check, EPS, Expected, dot};
use crate::adapter::{Adapter, HostMatrix, HostPair, HostTokens};
use crate::backend::{Encoder, GpuBackend};
use crate::contract::RowRef;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Region;
use crate::ops::{Applier, Matrix, Op, Output};
use crate::pool::{Capacity, Plan, Pool, PoolSpec, SlotImage};

/// Elements of guard around every matrix on the device.
const GUARD: usize = 64;

/// A pool with an embedding and a head, what its slots hold, and what applies it.
pub(super) struct Bench<'b> {
    backend: &'b dyn GpuBackend,
    pool: Pool,
    pub applier: Applier,
    slots: Vec<Option<Adapter>>,
    embedding: String,
    head: String,
    vocabulary: usize,
    width: usize,
}

/// A batch: tokens for the embedding, hidden states for the head, and what both are added to.
pub(super) struct Batch {
    pub rows: Vec<RowRef>,
    pub ids: Vec<u32>,
    /// `[rows][width]`, encoded.
    pub embedded: Vec<u8>,
    /// `[rows][width]`
    pub x: Vec<f32>,
    /// `[rows][vocabulary]`, encoded.
    pub logits: Vec<u8>,
}

/// A batch on the device.
pub(super) struct Io {
    ids: Region,
    x: Matrix,
    /// Memory with its guards, what is in it before a run, and its rows: the gathered rows, and the logits.
    out: [(Region, Vec<u8>, Matrix); 2],
}

impl<'b> Bench<'b> {
    pub fn new(
        backend: &'b dyn GpuBackend,
        spec: PoolSpec,
        act: DType,
        capacity: Capacity,
        (embedding, head): (&str, &str),
    ) -> Result<Self> {
        let slots = (0..spec.max_loras).map(|_| None).collect();
        let rows = spec.sites.iter().find(|s| s.is_token_rows()).map(|s| (s.out_features, s.in_features));
        let (vocabulary, width) = rows.unwrap_or_default();
        let pool = Pool::new(backend, spec)?;
        let applier = Applier::new(backend, &pool, act, capacity)?;
        let (embedding, head) = (embedding.to_owned(), head.to_owned());
        let (vocabulary, width) = (vocabulary as usize, width as usize);
        Ok(Self { backend, pool, applier, slots, embedding, head, vocabulary, width })
    }

    pub fn put(&mut self, slot: u32, adapter: Option<Adapter>) -> Result<()> {
        let image = match &adapter {
            Some(adapter) => SlotImage::new(&self.pool, adapter)?,
            None => SlotImage::empty(&self.pool),
        };
        let cells = image.cells(&self.pool, slot)?;
        self.pool.publish(self.backend, slot, &cells, image.scale(), &mut |e| image.write(&self.pool, slot, e))?;
        self.slots[slot as usize] = adapter;
        Ok(())
    }

    pub fn io(&self, batch: &Batch) -> Result<Io> {
        let (act, rows) = (self.applier.act(), batch.rows.len());
        let upload = |bytes: &[u8]| -> Result<Region> {
            let mut padded = bytes.to_vec();
            padded.resize(bytes.len().next_multiple_of(4).max(4), 0);
            let region = self.backend.alloc(padded.len() as u64, "conformance input")?;
            self.backend.submit(&mut |encoder| encoder.write(&region, &padded))?;
            Ok(region)
        };
        let mut x = Vec::new();
        act.encode(&batch.x, &mut x);
        let out = [(&batch.embedded, self.width), (&batch.logits, self.vocabulary)].map(|(y, width)| {
            let (size, stride) = (act.size() as usize, width + 1);
            let mut image = Vec::new();
            act.encode(&vec![1.5; (2 * GUARD + rows * stride).next_multiple_of(2)], &mut image);
            for (row, bytes) in y.chunks(width * size).enumerate() {
                let at = (GUARD + row * stride) * size;
                image[at..at + bytes.len()].copy_from_slice(bytes);
            }
            let region = upload(&image)?;
            let used = region.slice((GUARD * size) as u64, (rows * stride * size) as u64)?;
            Ok::<_, crate::Error>((region, image, Matrix::new(used, stride as u32)))
        });
        let [embedded, logits] = out;
        Ok(Io {
            ids: upload(bytemuck::cast_slice(&batch.ids))?,
            x: Matrix::new(upload(&x)?, self.width as u32),
            out: [embedded?, logits?],
        })
    }

    pub fn encode(&self, encoder: &mut dyn Encoder, op: Op, capacity: Capacity, io: &Io) -> Result<()> {
        let [(.., embedded), (.., logits)] = &io.out;
        if let Some(site) = self.pool.site_at(&self.embedding) {
            let output = Output { site, y: embedded };
            self.applier.encode_embedding(encoder, &self.pool, op, capacity, &io.ids, output)?;
        }
        if let Some(site) = self.pool.token_site_at(&self.embedding) {
            let output = Output { site, y: embedded };
            self.applier.encode_token_rows(encoder, &self.pool, capacity, &io.ids, output)?;
        }
        if let Some(site) = self.pool.site_at(&self.head) {
            self.applier.encode(encoder, &self.pool, op, capacity, &io.x, &[Output { site, y: logits }])?;
        }
        if let Some(site) = self.pool.token_site_at(&self.head) {
            self.applier.encode_logits(encoder, &self.pool, capacity, &io.x, Output { site, y: logits })?;
        }
        Ok(())
    }

    pub fn reset(&self, encoder: &mut dyn Encoder, io: &Io) -> Result<()> {
        io.out.iter().try_for_each(|(region, image, _)| encoder.write(region, image))
    }

    pub fn read(&self, io: &Io) -> Result<[Vec<u8>; 2]> {
        Ok([self.backend.read(&io.out[0].0)?, self.backend.read(&io.out[1].0)?])
    }

    pub fn run(&self, op: Op, batch: &Batch, io: &Io) -> Result<[Vec<u8>; 2]> {
        let plan = Plan::new(batch.rows.clone());
        self.backend.submit(&mut |encoder| {
            self.reset(encoder, io)?;
            self.applier.write_batch(encoder, &plan, plan.capacity())?;
            self.encode(encoder, op, plan.capacity(), io)
        })?;
        self.read(io)
    }

    pub fn adapter(&self, row: RowRef) -> Option<&Adapter> {
        self.slots.get(usize::try_from(row.slot).ok()?)?.as_ref()
    }

    /// Compares every element with what it must be. `truth(table, row, expected)`: values of one's own, for the embedding
    /// (0) and the head (1).
    pub fn check(
        &self,
        batch: &Batch,
        io: &Io,
        got: &[Vec<u8>; 2],
        truth: impl Fn(usize, usize, Expected) -> Expected,
    ) -> Check {
        let mut check = Check::default();
        let (act, size) = (self.applier.act(), self.applier.act().size() as usize);
        let dtype = self.pool.layout().dtype();
        for (table, (path, width)) in [(&self.embedding, self.width), (&self.head, self.vocabulary)].iter().enumerate()
        {
            let (image, stride) = (&io.out[table].1, width + 1);
            let mut kept = image.clone();
            for (row, entry) in batch.rows.iter().enumerate() {
                check.elements += *width as u64;
                let Some(adapter) = self.adapter(*entry) else { continue };
                let range = (GUARD + row * stride) * size..(GUARD + row * stride + width) * size;
                let before = act.decode(&image[range.clone()]);
                let x = &batch.x[row * self.width..(row + 1) * self.width];
                let mut expected =
                    Expected { want: before.iter().map(|y| f64::from(*y)).collect(), bound: vec![0.0; *width] };
                let mut touched = vec![false; *width];
                let input = if table == 0 { Input::Token(batch.ids[row]) } else { Input::Row(x) };
                if let Some(pair) = adapter.pairs.iter().find(|pair| *pair.site.path == **path) {
                    expected = added(pair, input, entry.scale, &before, (act, dtype));
                    touched.fill(true);
                }
                if let Some(tokens) = adapter.tokens.iter().find(|tokens| *tokens.site.path == **path) {
                    self.replace(tokens, input, &mut expected, &mut touched);
                }
                let expected = truth(table, row, expected);
                let got = &got[table][range.clone()];
                for i in (0..*width).filter(|i| touched[*i]) {
                    let one = Expected { want: vec![expected.want[i]], bound: vec![expected.bound[i]] };
                    let element = &got[i * size..(i + 1) * size];
                    check.row(path, row, act, &one, &act.decode(element));
                    kept[range.start + i * size..][..size].copy_from_slice(element);
                }
            }
            check.bits(&format!("untouched parts at {path}"), 0, act, &kept, &got[table]);
        }
        check
    }

    /// Puts what must be where rows are replaced.
    fn replace(&self, tokens: &HostTokens, input: Input<'_>, expected: &mut Expected, touched: &mut [bool]) {
        let act = self.applier.act();
        let row = |j: usize| {
            let values = tokens.rows.values();
            values[j * self.width..(j + 1) * self.width].to_vec()
        };
        match input {
            Input::Token(id) => {
                let Ok(j) = tokens.ids.binary_search(&id) else { return };
                expected.want = row(j).iter().map(|value| f64::from(act.round(*value))).collect();
                expected.bound.fill(0.0);
                touched.fill(true);
            }
            Input::Row(x) => {
                for (j, id) in tokens.ids.iter().enumerate() {
                    let one = dot(&row(j), x, act);
                    expected.want[*id as usize] = one.want[0];
                    expected.bound[*id as usize] = one.bound[0];
                    touched[*id as usize] = true;
                }
            }
        }
    }
}

/// What a table is read by.
#[derive(Clone, Copy)]
pub(super) enum Input<'a> {
    Token(u32),
    Row(&'a [f32]),
}

/// `y + scale * B * (A x)`, where x is a row, or picks a column of A.
pub(super) fn added(
    pair: &HostPair,
    input: Input<'_>,
    row_scale: f32,
    y: &[f32],
    (act, dtype): (DType, DType),
) -> Expected {
    let stored =
        |matrix: &HostMatrix| matrix.values().into_iter().map(|v| f64::from(dtype.round(v))).collect::<Vec<_>>();
    let (a, b, rank, columns) = (stored(&pair.a), stored(&pair.b), pair.rank(), pair.in_features());
    let column = |r: usize| -> (f64, f64) {
        match input {
            Input::Token(id) if (id as usize) < columns => {
                let value = a[r * columns + id as usize];
                (value, value.abs())
            }
            Input::Token(_) => (0.0, 0.0),
            Input::Row(x) => {
                let products = x.iter().zip(&a[r * columns..]).map(|(x, a)| f64::from(*x) * a);
                products.fold((0.0, 0.0), |(sum, terms), product| (sum + product, terms + product.abs()))
            }
        }
    };
    let z: Vec<(f64, f64)> = (0..rank).map(column).collect();
    let scale = f64::from(pair.scale) * f64::from(row_scale);
    let mut expected = Expected::default();
    for (n, y) in y.iter().enumerate() {
        let row = &b[n * rank..(n + 1) * rank];
        let sum: f64 = row.iter().zip(&z).map(|(b, z)| b * z.0).sum();
        let terms: f64 = row.iter().zip(&z).map(|(b, z)| b.abs() * z.1).sum();
        let want = f64::from(*y) + scale * sum;
        let terms = f64::from(y.abs()) + scale.abs() * terms;
        let steps = if matches!(input, Input::Token(_)) { 0 } else { columns };
        expected.want.push(want);
        expected.bound.push((steps + rank + 3) as f64 * EPS * terms + 1e-36 + act.ulp(want));
    }
    expected
}
