//! Embeddings, heads and replaced token rows of whole pools: adapters by PEFT with PEFT's own outputs, and made-up ones in
//! mixed batches, swapped while one graph serves.

use super::data::Dice;
use super::fixtures::{Expectation, Truth};
use super::oracle::Expected;
use super::token_bench::{Batch, Bench};
use super::{Outcome, Trial, synthetic};
use crate::adapter::{Adapter, BaseModel, HostPair, HostTokens, SiteId};
use crate::backend::GpuBackend;
use crate::contract::RowRef;
use crate::dtype::DType;
use crate::error::Result;
use crate::ops::Op;
use crate::pool::{Capacity, Plan, PoolSpec, SiteSpec};

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
    let capacity = Capacity::any(ROWS as u32);
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
