//! Embeddings, heads and replaced token rows of whole pools through the public API: adapters by PEFT with PEFT's own
//! outputs, and made-up ones in mixed batches, swapped while one graph serves.

use super::data::Dice;
use super::fixtures::{Expectation, Truth};
use super::oracle::{Check, EPS, Expected, dot};
use super::{Outcome, Trial, synthetic};
use crate::adapter::{Adapter, BaseModel, HostMatrix, HostPair, HostTokens, SiteId};
use crate::backend::{Encoder, GpuBackend};
use crate::contract::RowRef;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Region;
use crate::ops::{Applier, Matrix, Op, Output};
use crate::pool::{Capacity, Plan, Pool, PoolSpec, SiteSpec, SlotImage};

/// Elements of guard around every matrix on the device.
const GUARD: usize = 64;

/// A pool with an embedding and a head, what its slots hold, and what applies it.
pub(super) struct Bench<'b> {
    backend: &'b dyn GpuBackend,
    pool: Pool,
    applier: Applier,
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
struct Io {
    ids: Region,
    x: Matrix,
    /// Memory with its guards, what is in it before a run, and its rows: the gathered rows, and the logits.
    out: [(Region, Vec<u8>, Matrix); 2],
}

impl<'b> Bench<'b> {
    fn new(
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

    fn put(&mut self, slot: u32, adapter: Option<Adapter>) -> Result<()> {
        let image = match &adapter {
            Some(adapter) => SlotImage::new(&self.pool, adapter)?,
            None => SlotImage::empty(&self.pool),
        };
        let cells = image.cells(&self.pool, slot)?;
        self.pool.publish(self.backend, slot, &cells, image.scale(), &mut |e| image.write(&self.pool, slot, e))?;
        self.slots[slot as usize] = adapter;
        Ok(())
    }

    fn io(&self, batch: &Batch) -> Result<Io> {
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

    fn encode(&self, encoder: &mut dyn Encoder, op: Op, capacity: Capacity, io: &Io) -> Result<()> {
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

    fn reset(&self, encoder: &mut dyn Encoder, io: &Io) -> Result<()> {
        io.out.iter().try_for_each(|(region, image, _)| encoder.write(region, image))
    }

    fn read(&self, io: &Io) -> Result<[Vec<u8>; 2]> {
        Ok([self.backend.read(&io.out[0].0)?, self.backend.read(&io.out[1].0)?])
    }

    fn run(&self, op: Op, batch: &Batch, io: &Io) -> Result<[Vec<u8>; 2]> {
        let plan = Plan::new(batch.rows.clone());
        self.backend.submit(&mut |encoder| {
            self.reset(encoder, io)?;
            self.applier.write_batch(encoder, &plan, plan.capacity())?;
            self.encode(encoder, op, plan.capacity(), io)
        })?;
        self.read(io)
    }

    fn adapter(&self, row: RowRef) -> Option<&Adapter> {
        self.slots.get(usize::try_from(row.slot).ok()?)?.as_ref()
    }

    /// Compares every element with what it must be. `truth(table, row, expected)`: values of one's own, for the embedding
    /// (0) and the head (1).
    fn check(
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

/// An adapter that PEFT saved: its tokens' rows and logits, with it, without any, and with a vacant slot.
pub(super) fn fixture(
    backend: &dyn GpuBackend,
    base: &BaseModel,
    adapter: Adapter,
    expected: &Expectation,
    op: Op,
    act: DType,
) -> Result<Outcome> {
    let (Some(embedding), Some(head)) = (base.input_embedding(), base.head()) else {
        return Ok(Outcome::Ignored("the base has no embedding of tokens, or no head".into()));
    };
    let (embedding_path, head_path) = (embedding.site.path.clone(), head.site.path.clone());
    let none = [None, None, None, None];
    let of_embedding = expected.modules.get(&*embedding_path).unwrap_or(&none);
    let of_head = expected.modules.get(&*head_path).unwrap_or(&none);
    let count = |truth: &Option<Truth>| truth.as_ref().map_or(0, |t| t.values.len() / t.width.max(1));
    let ids_in_file: Vec<u32> = of_embedding[3].iter().flat_map(|truth| &truth.values).map(|id| *id as u32).collect();
    let n = ids_in_file.len().max(count(&of_head[0])).max(1);
    let rows: Vec<RowRef> =
        [1, -1, 0].into_iter().flat_map(|slot| std::iter::repeat_n(RowRef { slot, scale: 1.0 }, n)).collect();
    let (vocabulary, width) = (embedding.vocabulary, embedding.width);
    let mut dice = Dice::new(18);
    let mut matrix = |truth: &Option<Truth>, width: usize| -> Vec<f32> {
        let rows = count(truth).max(1);
        let values = (0..3 * n * width).map(|i| match truth {
            Some(truth) => truth.values[i / width % n % rows * width + i % width] as f32,
            None => dice.unit(),
        });
        values.map(|value| act.round(value)).collect()
    };
    let encoded = |values: Vec<f32>| {
        let mut bytes = Vec::new();
        act.encode(&values, &mut bytes);
        bytes
    };
    let batch = Batch {
        ids: (0..3 * n).map(|i| ids_in_file.get(i % n % ids_in_file.len().max(1)).copied().unwrap_or(0)).collect(),
        embedded: encoded(matrix(&of_embedding[1], width)),
        x: matrix(&of_head[0], width),
        logits: encoded(matrix(&of_head[1], vocabulary)),
        rows,
    };
    let spec = PoolSpec::for_base(base, adapter.max_rank().max(1) as u32, 3, act);
    let capacity = Plan::new(batch.rows.clone()).capacity();
    let mut bench = Bench::new(backend, spec, act, capacity, (&embedding_path, &head_path))?;
    bench.put(1, Some(adapter))?;
    let io = bench.io(&batch)?;
    let got = bench.run(op, &batch, &io)?;
    let compared = std::cell::Cell::new(0usize);
    let check = bench.check(&batch, &io, &got, |table, row, oracle| {
        let of = [of_embedding, of_head][table];
        let (Some(y_base), Some(y), DType::F32) = (&of[1], &of[2], act) else { return oracle };
        // PEFT's own value. Its y_base is f64: rounding it to f32 moves the result by as much.
        let file_row = row % n % count(&of[2]);
        let at = file_row * y.width..(file_row + 1) * y.width;
        let moved = y_base.values[at.clone()].iter().map(|y| (y - f64::from(*y as f32)).abs());
        compared.set(compared.get() + at.len());
        Expected {
            bound: oracle.bound.iter().zip(moved).map(|(bound, moved)| bound + moved).collect(),
            want: y.values[at].to_vec(),
        }
    });
    if act == DType::F32 && compared.get() == 0 {
        let what = "no output of PEFT's was compared: the file and the adapter share no table of tokens";
        return Err(crate::Error::Input(what.into()));
    }
    Ok(Outcome::Checked(check))
}

const SLOTS: u32 = 5;
const VOCABULARY: usize = 131;
const WIDTH: usize = 37;
const ROWS: usize = 33;
const MAX_RANK: u32 = 11;
const CAPACITY: u32 = 9;

fn paths() -> [SiteId; 2] {
    ["model.embed_tokens", "lm_head"].map(SiteId::from_path)
}

fn spec(dtype: DType, rows: DType) -> PoolSpec {
    let ([embedding, head], [v, w]) = (paths(), [VOCABULARY as u32, WIDTH as u32]);
    let sites = vec![
        SiteSpec::embedding(embedding.clone(), v, w),
        SiteSpec::token_rows(embedding, v, w, CAPACITY, rows),
        SiteSpec::linear(head.clone(), w, v),
        SiteSpec::token_rows(head, v, w, CAPACITY, rows),
    ];
    PoolSpec { sites, max_rank: MAX_RANK, max_loras: SLOTS, dtype, vectors: true }
}

/// An adapter with LoRA on one of the tables or both, and replaced rows where it has none.
fn adapter(seed: u64, rows: DType) -> Adapter {
    let mut dice = Dice::new(seed);
    let dtype = DType::ALL[seed as usize % 3];
    let (mut pairs, mut tokens) = (Vec::new(), Vec::new());
    for (table, site) in paths().into_iter().enumerate() {
        let (inputs, outputs) = if table == 0 { (VOCABULARY, WIDTH) } else { (WIDTH, VOCABULARY) };
        match (seed >> (2 * table)) & 3 {
            0 => {}
            1 => {
                let (a, b, scale) = synthetic::pair(&mut dice, dtype, MAX_RANK, [inputs as u32, outputs as u32]);
                pairs.push(HostPair { embedding: table == 0, ..HostPair::new(site, a, b, scale) });
            }
            _ => {
                let count = 1 + dice.below(CAPACITY) as usize;
                let mut ids: Vec<u32> = (0..count).map(|_| dice.below(VOCABULARY as u32)).collect();
                ids.push([0, VOCABULARY as u32 - 1][seed as usize % 2]);
                ids.sort_unstable();
                ids.dedup();
                ids.truncate(CAPACITY as usize);
                let rows = synthetic::matrix(&mut dice, rows, ids.len() as u32, WIDTH as u32);
                tokens.push(HostTokens { site, vocabulary: VOCABULARY, ids, rows });
            }
        }
    }
    Adapter::from_pairs(pairs).with_tokens(tokens)
}

fn batch(bench: &Bench<'_>, act: DType, op: Op) -> Batch {
    let mut dice = Dice::new(5);
    let mut rows = synthetic::batch(&mut dice, ROWS, SLOTS);
    if op == Op::Sgmv {
        rows.sort_by_key(|row| row.slot);
    }
    let ids = rows.iter().map(|row| {
        let tokens = bench.adapter(*row).and_then(|adapter| adapter.tokens.first());
        match (dice.below(4), tokens) {
            (0, _) => [VOCABULARY as u32, u32::MAX][dice.below(2) as usize],
            (1 | 2, Some(tokens)) => tokens.ids[dice.below(tokens.ids.len() as u32) as usize],
            _ => dice.below(VOCABULARY as u32),
        }
    });
    let ids = ids.collect();
    let mut values = |count: usize| -> Vec<f32> { (0..count).map(|_| act.round(dice.unit())).collect() };
    let encoded = |values: Vec<f32>| {
        let mut bytes = Vec::new();
        act.encode(&values, &mut bytes);
        bytes
    };
    let embedded = encoded(values(ROWS * WIDTH));
    let x = values(ROWS * WIDTH);
    Batch { ids, embedded, x, logits: encoded(values(ROWS * VOCABULARY)), rows }
}

/// Adapters whose parts take all combinations, in all slots but one.
fn stage<'b>(
    backend: &'b dyn GpuBackend,
    op: Op,
    act: DType,
    (dtype, rows): (DType, DType),
) -> Result<(Bench<'b>, Batch)> {
    let capacity = Capacity { rows: ROWS as u32, tiles: ROWS as u32 };
    let [embedding, head] = paths();
    let mut bench = Bench::new(backend, spec(dtype, rows), act, capacity, (&embedding.path, &head.path))?;
    for (slot, seed) in [(0, 0b0101), (1, 0b1010), (3, 0b0111), (4, 0b1101)] {
        bench.put(slot, Some(adapter(seed, rows)))?;
    }
    let batch = batch(&bench, act, op);
    Ok((bench, batch))
}

/// All trials of made-up adapters.
pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for op in Op::ALL {
        for act in DType::ALL {
            for dtype in DType::ALL {
                let types = (dtype, DType::ALL[(dtype as usize + act as usize) % 3]);
                let name = format!("pool tokens {}[{act}x{dtype}, rows {}] mixed", op.name(), types.1);
                trials.push(Trial::new(name, move |backend| {
                    let (bench, batch) = stage(backend, op, act, types)?;
                    let io = bench.io(&batch)?;
                    let got = bench.run(op, &batch, &io)?;
                    Ok(Outcome::Checked(bench.check(&batch, &io, &got, |_, _, expected| expected)))
                }));
            }
            let name = format!("pool tokens {}[{act}] swaps under a graph", op.name());
            trials.push(Trial::new(name, move |backend| swaps(backend, op, act)));
        }
    }
    trials
}

/// Adapters come, go and come back while one captured graph serves; nothing of an old one is left.
fn swaps(backend: &dyn GpuBackend, op: Op, act: DType) -> Result<Outcome> {
    let types = (DType::Bf16, DType::F32);
    let (mut bench, batch) = stage(backend, op, act, types)?;
    let io = bench.io(&batch)?;
    let plan = Plan::new(batch.rows.clone());
    let capacity = plan.capacity();
    let graph = backend.capture(&mut |encoder| bench.encode(encoder, op, capacity, &io))?;
    let replay = |bench: &Bench<'_>| {
        backend.submit(&mut |encoder| {
            bench.reset(encoder, &io)?;
            bench.applier.write_batch(encoder, &plan, capacity)
        })?;
        graph.replay()?;
        bench.read(&io)
    };
    let first = replay(&bench)?;
    let mut check = bench.check(&batch, &io, &first, |_, _, expected| expected);
    for incoming in [Some(0b0101), Some(0b0010), None, Some(0b1000), Some(0b1010)] {
        bench.put(1, incoming.map(|seed| adapter(seed, types.1)))?;
        check.merge(bench.check(&batch, &io, &replay(&bench)?, |_, _, expected| expected));
    }
    // The last one in is the one that was there first.
    for (want, got) in first.iter().zip(replay(&bench)?) {
        check.bits("adapter loaded again", 0, act, want, &got);
    }
    Ok(Outcome::Checked(check))
}
