//! Whole pools through the public API: packing, tables, plans, launches in parts, swaps.

use std::sync::Arc;

use super::bench::{Bench, Io, Place};
use super::data::Dice;
use super::oracle::Check;
use super::{Outcome, Trial, synthetic};
use crate::adapter::{Adapter, HostPair, RowVectors, SiteId};
use crate::backend::{DeviceClass, GpuBackend};
use crate::contract::{MAX_SITES, RowRef};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ops::Op;
use crate::pool::{Capacity, Part, Plan, PoolSpec, SiteSpec};

/// A model of two layers, with sites that share inputs.
fn model() -> Vec<SiteSpec> {
    const MODULES: [(&str, u32, u32); 7] = [
        ("self_attn.q_proj", 48, 64),
        ("self_attn.k_proj", 48, 31),
        ("self_attn.v_proj", 48, 31),
        ("self_attn.o_proj", 64, 48),
        ("mlp.gate_proj", 48, 80),
        ("mlp.up_proj", 48, 80),
        ("mlp.down_proj", 80, 48),
    ];
    let site = |layer: usize, (module, in_features, out_features): (&str, u32, u32)| {
        SiteSpec::linear(SiteId::from_path(&format!("model.layers.{layer}.{module}")), in_features, out_features)
    };
    (0..2).flat_map(|layer| MODULES.map(|module| site(layer, module))).collect()
}

/// An adapter of some of the sites, ranks 1..=max_rank, its file in one of the three types.
fn adapter(sites: &[SiteSpec], max_rank: u32, seed: u64) -> Adapter {
    let mut dice = Dice::new(seed);
    let dtype = DType::ALL[seed as usize % 3];
    let mut pairs = Vec::new();
    for site in sites {
        if dice.below(4) == 0 {
            continue;
        }
        let (a, b, scale) = synthetic::pair(&mut dice, dtype, max_rank, [site.in_features, site.out_features]);
        // Two adapters in three have vectors, the third has none.
        let vectors = (seed % 3 != 1 && dice.below(4) != 0).then(|| RowVectors {
            gain: (0..site.out_features).map(|_| if dice.below(4) == 0 { 1.0 } else { dice.unit() * 2.0 }).collect(),
            offset: (0..site.out_features).map(|_| dice.unit()).collect(),
        });
        pairs.push(HostPair { vectors, ..HostPair::new(site.id.clone(), a, b, scale) });
    }
    Adapter::from_pairs(pairs)
}

/// x and y of every site for a batch; x the same within a layer's attention and feed-forward groups.
fn activations(spec: &PoolSpec, act: DType, rows: usize) -> (Vec<Vec<f32>>, Vec<Vec<u8>>) {
    let mut dice = Dice::new(rows as u64);
    let mut x = vec![Vec::new(); spec.sites.len()];
    for group in spec.groups() {
        let width = spec.sites[group[0]].in_features as usize;
        let values: Vec<f32> = (0..rows * width).map(|_| act.round(dice.unit())).collect();
        group.into_iter().for_each(|site| x[site] = values.clone());
    }
    let y = spec.sites.iter().map(|site| {
        let values: Vec<f32> = (0..rows * site.out_features as usize).map(|_| dice.unit() * 4.0).collect();
        let mut bytes = Vec::new();
        act.encode(&values, &mut bytes);
        bytes
    });
    let y = y.collect();
    (x, y)
}

/// Slots of a mixed batch: every slot, none, a slot that nothing is in, and row scales.
fn mixed(rows: usize, slots: u32, op: Op) -> Vec<RowRef> {
    let mut dice = Dice::new(7 + rows as u64);
    let mut batch = synthetic::batch(&mut dice, rows, slots);
    if op == Op::Sgmv {
        batch.sort_by_key(|row| row.slot);
    }
    batch
}

const SLOTS: u32 = 6;
const MAX_RANK: u32 = 20;
const ROWS: usize = 33;

/// A bench of five adapters and a vacant slot, and a mixed batch.
fn stage<'b>(
    backend: &'b dyn GpuBackend,
    op: Op,
    (act, dtype): (DType, DType),
    scratch: Option<u64>,
    place: Place,
) -> Result<(Bench<'b>, Io)> {
    let spec = PoolSpec { sites: model(), max_rank: MAX_RANK, max_loras: SLOTS, dtype, vectors: true };
    let (x, y) = activations(&spec, act, ROWS);
    let capacity = Capacity::any(ROWS as u32);
    let mut bench = Bench::new(backend, spec, act, capacity, scratch)?;
    for slot in (0..SLOTS).filter(|slot| *slot != 2) {
        bench.put(slot, Some(&adapter(&model(), MAX_RANK, slot.into())))?;
    }
    let io = bench.io(mixed(ROWS, SLOTS, op), x, y, place)?;
    Ok((bench, io))
}

/// All trials of pools.
pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for op in Op::ALL {
        let name = op.name();
        for act in DType::ALL {
            for dtype in DType::ALL {
                let types = (act, dtype);
                trials.push(Trial::new(format!("pool {name}[{act}x{dtype}] mixed"), move |backend| {
                    let (bench, io) = stage(backend, op, types, None, Place::Apart)?;
                    Ok(Outcome::Checked(bench.check(&io, &bench.run(op, &io)?)))
                }));
            }
            let types = (act, DType::Bf16);
            trials.push(Trial::new(format!("pool {name}[{act}xbf16] interleaved outputs"), move |backend| {
                let (bench, io) = stage(backend, op, types, None, Place::Interleaved)?;
                Ok(Outcome::Checked(bench.check(&io, &bench.run(op, &io)?)))
            }));
            trials.push(Trial::new(format!("pool {name}[{act}xbf16] scratch for few rows"), move |backend| {
                few_rows(backend, op, types)
            }));
            trials.push(Trial::new(format!("pool {name}[{act}xbf16] swaps under a graph"), move |backend| {
                swaps(backend, op, types)
            }));
            trials
                .push(Trial::new(format!("pool {name}[{act}xbf16] batches of 1..=16 by one graph"), move |backend| {
                    batches(backend, op, types)
                }));
            trials.push(Trial::new(
                format!("pool {name}[{act}xbf16] mixes of few tiles and packs by one graph"),
                move |backend| mixes(backend, op, types),
            ));
        }
        trials.push(Trial::new(format!("pool {name}[f32xbf16] larger than a binding"), move |backend| {
            large(backend, op)
        }));
    }
    trials
}

/// Launches that take 1, 3 or all rows at a time leave the same bits.
fn few_rows(backend: &dyn GpuBackend, op: Op, types: (DType, DType)) -> Result<Outcome> {
    let (bench, io) = stage(backend, op, types, None, Place::Apart)?;
    let whole = bench.run(op, &io)?;
    let mut check = bench.check(&io, &whole);
    for rows in [1, 3] {
        let row = MAX_SITES as u64 * u64::from(MAX_RANK) * 4;
        let (bench, io) = stage(backend, op, types, Some(rows * row), Place::Apart)?;
        for (i, (want, got)) in whole.iter().zip(bench.run(op, &io)?).enumerate() {
            check.bits(&format!("memory {i}, {rows} rows at a time"), 0, types.0, want, &got);
        }
    }
    Ok(Outcome::Checked(check))
}

/// Adapters come, go and come back while one captured graph serves; nothing of an old one is left.
fn swaps(backend: &dyn GpuBackend, op: Op, types: (DType, DType)) -> Result<Outcome> {
    let (mut bench, io) = stage(backend, op, types, None, Place::Apart)?;
    let plan = Plan::new(io.rows.clone());
    let capacity = plan.capacity();
    let graph = backend.capture(&mut |encoder| bench.encode(encoder, op, capacity, &io))?;
    let replay = |bench: &Bench<'_>| {
        backend.submit(&mut |encoder| {
            io.reset(encoder)?;
            bench.applier.write_batch(encoder, &plan, capacity)
        })?;
        graph.replay()?;
        io.read(backend)
    };
    let first = replay(&bench)?;
    let mut check = bench.check(&io, &first);
    let kept: Vec<Vec<u8>> = backend_slots(&bench, backend, 1)?;
    for incoming in [Some(17), None, Some(11), Some(1)] {
        let incoming = incoming.map(|seed| adapter(&model(), MAX_RANK, seed));
        bench.put(1, incoming.as_ref())?;
        check.merge(bench.check(&io, &replay(&bench)?));
    }
    // The last one in is the one that was there first: the same answers, and the same bytes in its slot.
    for (i, (want, got)) in first.iter().zip(replay(&bench)?).enumerate() {
        check.bits(&format!("memory {i}, adapter loaded again"), 0, types.0, want, &got);
    }
    for (want, got) in kept.iter().zip(backend_slots(&bench, backend, 1)?) {
        check.bits("slot of the adapter loaded again", 0, types.1, want, &got);
    }
    Ok(Outcome::Checked(check))
}

/// Every byte of a slot.
fn backend_slots(bench: &Bench<'_>, backend: &dyn GpuBackend, slot: u32) -> Result<Vec<Vec<u8>>> {
    let mut bytes = Vec::new();
    for site in 0..bench.pool.sites().len() {
        for part in [Part::A, Part::B] {
            bytes.push(backend.read(&bench.pool.part(slot, site, part)?)?);
        }
    }
    Ok(bytes)
}

/// One graph, recorded for 16 rows, serves smaller batches; rows past their end keep their bits.
fn batches(backend: &dyn GpuBackend, op: Op, types: (DType, DType)) -> Result<Outcome> {
    const MOST: usize = 16;
    let (bench, staged) = stage(backend, op, types, None, Place::Apart)?;
    let (x, y) = activations(bench.pool.spec(), types.0, MOST);
    let capacity = Capacity::any(MOST as u32);
    let mut io = bench.io(vec![RowRef { slot: -1, scale: 1.0 }; MOST], x, y, Place::Apart)?;
    let graph = backend.capture(&mut |encoder| bench.encode(encoder, op, capacity, &io))?;
    let mut check = Check::default();
    for rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 0, 16] {
        let rows = &staged.rows[ROWS - rows..];
        let plan = Plan::new(rows.to_vec());
        backend.submit(&mut |encoder| {
            io.reset(encoder)?;
            bench.applier.write_batch(encoder, &plan, capacity)
        })?;
        graph.replay()?;
        io.rows = rows.to_vec();
        io.rows.resize(MOST, RowRef { slot: -1, scale: 1.0 });
        check.merge(bench.check(&io, &io.read(backend)?));
    }
    Ok(Outcome::Checked(check))
}

/// One graph, recorded for no more tiles and packs than some mixes of rows need, serves them all; a mix that needs one more
/// is refused, and nothing changes.
fn mixes(backend: &dyn GpuBackend, op: Op, types: (DType, DType)) -> Result<Outcome> {
    // Rows of each slot; the rest are the base's. No adapter is in slot 2.
    const MIXES: [[usize; SLOTS as usize]; 8] = [
        [33, 0, 0, 0, 0, 0],
        [1, 31, 0, 1, 0, 0],
        [0, 17, 9, 0, 7, 0],
        [0; 6],
        [9, 0, 0, 9, 0, 9],
        [1, 1, 1, 1, 1, 1],
        [16, 0, 0, 0, 0, 16],
        [8, 8, 0, 8, 0, 8],
    ];
    let batch = |counts: [usize; SLOTS as usize]| -> Vec<RowRef> {
        let mut rows = vec![RowRef { slot: -1, scale: 1.0 }; ROWS];
        let slots = (0..).zip(counts).flat_map(|(slot, count)| std::iter::repeat_n(slot, count));
        for (i, slot) in slots.enumerate() {
            // Decode meets a slot's rows anywhere: 10 has no factor in common with 33.
            let at = if op == Op::Bgmv { i * 10 % ROWS } else { i };
            rows[at] = RowRef { slot, scale: 1.0 - i as f32 / 64.0 };
        }
        rows
    };
    let plans = MIXES.map(|mix| Plan::new(batch(mix)));
    let most = |of: fn(Capacity) -> u32| plans.iter().map(|plan| of(plan.capacity())).max().unwrap_or(0);
    let capacity = Capacity { rows: ROWS as u32, tiles: most(|c| c.tiles), packs: most(|c| c.packs) };
    let (bench, mut io) = stage(backend, op, types, None, Place::Apart)?;
    let graph = backend.capture(&mut |encoder| bench.encode(encoder, op, capacity, &io))?;
    let mut check = Check::default();
    let mut last = Vec::new();
    for plan in &plans {
        backend.submit(&mut |encoder| {
            io.reset(encoder)?;
            bench.applier.write_batch(encoder, plan, capacity)
        })?;
        graph.replay()?;
        io.rows = plan.rows().to_vec();
        last = io.read(backend)?;
        check.merge(bench.check(&io, &last));
    }
    let refused = |what: &str, result: Result<()>| match result {
        Err(Error::Limit { what: found, .. }) if found == what => Ok(()),
        other => Err(Error::Input(format!("the {what} is beyond the limit, and the answer was {other:?}"))),
    };
    let write = |plan: &Plan, capacity: Capacity| {
        backend.submit(&mut |encoder| bench.applier.write_batch(encoder, plan, capacity)).map(|_| ())
    };
    let packs = Plan::new(batch([9, 9, 0, 9, 1, 0]));
    refused("number of packs", write(&packs, capacity))?;
    refused("number of packs", write(&packs, Capacity { packs: ROWS as u32 + 1, ..capacity }))?;
    if op == Op::Sgmv {
        let tiles = Plan::from_slots((0..=capacity.tiles as i32).map(|i| i % 2));
        refused("number of tiles", write(&tiles, capacity))?;
    }
    // The batch written last is still there.
    backend.submit(&mut |encoder| io.reset(encoder))?;
    graph.replay()?;
    for (i, (want, got)) in last.iter().zip(io.read(backend)?).enumerate() {
        check.bits(&format!("memory {i}, after batches that were refused"), 0, types.0, want, &got);
    }
    Ok(Outcome::Checked(check))
}

/// A plane of one site that no binding holds, so that launches take some of the slots each.
fn large(backend: &dyn GpuBackend, op: Op) -> Result<Outcome> {
    const WIDTH: u32 = 12_288;
    const RANK: u32 = 512;
    let caps = backend.caps();
    let matrix = u64::from(WIDTH) * u64::from(RANK) * 2;
    if caps.max_binding == u64::MAX {
        return Ok(Outcome::Ignored("operands are addresses here: any pool is in reach of a launch".into()));
    }
    let slots = (caps.max_binding / matrix + 2) as u32;
    let total = 2 * u64::from(slots) * matrix;
    let plenty = caps.class != DeviceClass::Software || total <= 1 << 30;
    if total > 8 << 30 || !plenty {
        return Ok(Outcome::Ignored(format!("takes a pool of {total} bytes")));
    }
    let path: Arc<str> = "model.layers.0.self_attn.q_proj".into();
    let site = SiteSpec::linear(SiteId::from_path(&path), WIDTH, WIDTH);
    let spec = PoolSpec { sites: vec![site], max_rank: RANK, max_loras: slots, dtype: DType::Bf16, vectors: true };
    let (x, y) = activations(&spec, DType::F32, 4);
    let last = slots as i32 - 1;
    let rows = [0, last, -1, last - 1].map(|slot| RowRef { slot, scale: 1.0 });
    let mut bench = Bench::new(backend, spec, DType::F32, Plan::new(rows.to_vec()).capacity(), None)?;
    let parts = bench.pool.layout().windows(&[0], Part::A).len();
    assert!(parts > 1, "a plane of {} bytes in one binding of {}", u64::from(slots) * matrix, caps.max_binding);
    let (a_rank, b_rank) = (RANK, 3);
    for (slot, rank) in [(0, a_rank), (last, b_rank), (last - 1, 1)] {
        let mut one = adapter(&[bench.pool.sites()[0].clone()], rank, u64::from(slot as u32) * 4 + 3);
        if one.pairs.is_empty() {
            one = adapter(&[bench.pool.sites()[0].clone()], rank, 1);
        }
        bench.put(slot as u32, Some(&one))?;
    }
    let io = bench.io(rows.to_vec(), x, y, Place::Apart)?;
    Ok(Outcome::Checked(bench.check(&io, &bench.run(op, &io)?)))
}
