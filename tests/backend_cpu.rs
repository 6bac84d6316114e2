//! What only the CPU backend has: threads of its own, memory that the host can reach, allocations past
//! 4 GiB, and a process that must survive whatever tables say.

use std::num::NonZeroUsize;
use std::sync::{PoisonError, RwLock};

use lorapool::adapter::{Adapter, HostMatrix, HostTokens, SiteId};
use lorapool::backend::cpu::CpuBackend;
use lorapool::backend::{GpuBackend, Launch};
use lorapool::conformance::raw::{Outputs, Rig};
use lorapool::conformance::{Case, Dice, Mix, Op, Ranks, Values};
use lorapool::contract::{Kernel, MAX_SITES, Params, SiteParams, Spec};
use lorapool::ops::{Applier, Matrix, Output};
use lorapool::pool::{Plan, Pool, PoolSpec, SiteSpec, SlotImage};
use lorapool::{DType, Region, Result};
use rayon::prelude::*;

fn with_threads(threads: usize) -> CpuBackend {
    CpuBackend::with_threads(NonZeroUsize::new(threads).unwrap())
}

/// Written by the test that takes all memory, read by those that need some.
static MEMORY: RwLock<()> = RwLock::new(());

/// Enough work to be spread over threads, by rows and by columns.
fn large(op: Op, rows: u32, mix: Mix) -> Case {
    Case {
        op,
        act: DType::Bf16,
        weight: DType::F16,
        rows,
        in_features: 3_001,
        outs: vec![2_999, 517],
        ranks: Ranks::Mixed,
        max_rank: 43,
        slots: 5,
        mix,
        values: Values::Real,
        ..Case::default()
    }
}

#[test]
fn results_have_the_same_bits_on_any_number_of_threads() -> Result<()> {
    let _memory = MEMORY.read().unwrap_or_else(PoisonError::into_inner);
    for op in Op::ALL {
        for (rows, mix) in [(1, Mix::Distinct), (4, Mix::Distinct), (61, Mix::Zipf)] {
            let case = large(op, rows, mix);
            let run = |threads| -> Result<Outputs> {
                let backend = with_threads(threads);
                let rig = Rig::new(&backend, &case)?;
                let outputs = rig.run()?;
                let check = rig.check(&outputs)?;
                assert_eq!(check.mismatches, 0, "{case}: {check:?}");
                Ok(outputs)
            };
            let one = run(1)?;
            for threads in [2, 3, 8] {
                assert!(run(threads)? == one, "{case} on {threads} threads");
            }
        }
    }
    Ok(())
}

#[test]
fn logits_of_replaced_rows_have_the_same_bits_on_any_number_of_threads() -> Result<()> {
    const WIDTH: usize = 1_003;
    const VOCABULARY: u32 = 5_000;
    let _memory = MEMORY.read().unwrap_or_else(PoisonError::into_inner);
    let head = SiteId::from_path("lm_head");
    // Tokens all over the vocabulary, its last ones, one alone, and its first and its last.
    let ids: [Vec<u32>; 4] =
        [(0..200).map(|i| i * 25).collect(), (4_797..VOCABULARY).collect(), vec![77], vec![0, VOCABULARY - 1]];
    for (act, dtype) in [(DType::F32, DType::F16), (DType::Bf16, DType::Bf16)] {
        let mut dice = Dice::new(3);
        let mut values = |count: usize, dtype: DType| {
            let values: Vec<f32> = (0..count).map(|_| dice.unit()).collect();
            let mut bytes = Vec::new();
            dtype.encode(&values, &mut bytes);
            bytes
        };
        let adapters = ids.each_ref().map(|ids| {
            let rows = HostMatrix { dtype, rows: ids.len(), cols: WIDTH, bytes: values(ids.len() * WIDTH, dtype) };
            let tokens = HostTokens { site: head.clone(), vocabulary: VOCABULARY as usize, ids: ids.clone(), rows };
            Adapter::from_pairs(Vec::new()).with_tokens(vec![tokens])
        });
        // Neighbours of one slot, more of them than a piece takes, and rows of the base.
        let slots = [vec![0; 19], vec![1, 2, -1, 3, 0, -1, 1, 1]].concat();
        let (x, y) = (values(slots.len() * (WIDTH + 1), act), values(slots.len() * VOCABULARY as usize, act));
        let run = |threads| -> Result<Vec<u8>> {
            let gpu = with_threads(threads);
            let sites = vec![SiteSpec::token_rows(head.clone(), VOCABULARY, WIDTH as u32, 203, dtype)];
            let spec = PoolSpec { sites, max_rank: 8, max_loras: 4, dtype, vectors: false };
            let pool = Pool::new(&gpu, spec)?;
            for (slot, adapter) in (0..).zip(&adapters) {
                let image = SlotImage::new(&pool, adapter)?;
                pool.publish_image(&gpu, slot, &image, &mut |encoder| image.write(&pool, slot, encoder))?;
            }
            let plan = Plan::from_slots(slots.iter().copied());
            let applier = Applier::new(&gpu, &pool, act, plan.capacity())?;
            let (x_at, y_at) = (gpu.alloc(x.len() as u64, "x")?, gpu.alloc(y.len() as u64, "y")?);
            let (x_rows, y_rows) = (Matrix::new(x_at.clone(), WIDTH as u32 + 1), Matrix::new(y_at.clone(), VOCABULARY));
            gpu.submit(&mut |encoder| {
                encoder.write(&x_at, &x)?;
                encoder.write(&y_at, &y)?;
                applier.write_batch(encoder, &plan, plan.capacity())?;
                applier.encode_logits(encoder, &pool, plan.capacity(), &x_rows, Output { site: 0, y: &y_rows })
            })?;
            gpu.read(&y_at)
        };
        let one = run(1)?;
        let size = act.size() as usize;
        for (row, slot) in slots.iter().enumerate() {
            let named = usize::try_from(*slot).map_or(&[][..], |slot| &ids[slot]);
            for token in 0..VOCABULARY as usize {
                let at = (row * VOCABULARY as usize + token) * size..(row * VOCABULARY as usize + token + 1) * size;
                let replaced = named.contains(&(token as u32));
                assert!(replaced || one[at.clone()] == y[at], "row {row}, token {token}: not the slot's to change");
            }
        }
        for threads in [2, 3, 8] {
            assert!(run(threads)? == one, "{act}x{dtype} on {threads} threads");
        }
    }
    Ok(())
}

#[test]
fn threads_of_a_rayon_pool_may_submit_while_they_wait_for_each_other() -> Result<()> {
    let _memory = MEMORY.read().unwrap_or_else(PoisonError::into_inner);
    let backend = with_threads(3);
    let case = large(Op::Sgmv, 40, Mix::Uniform);
    let rig = Rig::new(&backend, &case)?;
    let expected = rig.run()?;
    // Each of these may be picked up by a thread that waits for another one's inner work.
    (0..24).into_par_iter().for_each(|i| {
        (0..2).into_par_iter().for_each(|_| {
            backend
                .submit(&mut |encoder| {
                    rig.reset(encoder)?;
                    rig.record(encoder)
                })
                .unwrap_or_else(|error| panic!("submission {i}: {error}"));
        });
    });
    assert!(rig.outputs()? == expected);
    Ok(())
}

#[test]
fn the_host_reads_and_writes_in_place() -> Result<()> {
    let _memory = MEMORY.read().unwrap_or_else(PoisonError::into_inner);
    let backend = with_threads(1);
    let region = backend.alloc(64, "shared")?.slice(16, 32)?;
    backend.with_bytes_mut(&region, |bytes| bytes.copy_from_slice(&[5; 32]))?;
    assert_eq!(backend.with_bytes(&region, |bytes| (bytes.len(), bytes[31]))?, (32, 5));
    assert_eq!(backend.read(&region)?, [5; 32]);
    Ok(())
}

#[test]
fn more_memory_than_there_is_gives_an_error() -> Result<()> {
    let _memory = MEMORY.write().unwrap_or_else(PoisonError::into_inner);
    let backend = with_threads(1);
    let memory = backend.caps().memory;
    if memory == 0 {
        return Ok(()); // a system that doesn't say
    }
    let error = backend.alloc(backend.caps().max_alloc, "everything").unwrap_err();
    assert_eq!(error.code(), "E_OUT_OF_MEMORY", "{error}");
    // Untouched memory counts as well: it was promised.
    let piece = memory / 8;
    let held: Vec<Result<Region>> = (0..9).map(|_| backend.alloc(piece, "a piece")).collect();
    assert!(held.iter().any(|r| r.as_ref().is_err_and(|e| e.code() == "E_OUT_OF_MEMORY")));
    drop(held);
    backend.alloc(1 << 20, "after that").map(drop)
}

#[test]
fn weights_and_rows_may_lie_past_4_gib() -> Result<()> {
    let _memory = MEMORY.read().unwrap_or_else(PoisonError::into_inner);
    const FAR: u64 = (4 << 30) + (3 << 20);
    let backend = with_threads(2);
    // Three allocations of this size, of which a few pages are touched.
    let Ok(huge) = (0..3).map(|_| backend.alloc(FAR + 4096, "huge")).collect::<Result<Vec<_>>>() else {
        return Ok(()); // no such memory here
    };
    let small = backend.alloc(4096, "after")?;
    let mut ranges: Vec<_> = huge.iter().chain([&small]).map(|r| r.ptr().0..r.ptr().0 + r.len()).collect();
    ranges.sort_by_key(|r| r.start);
    assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "{ranges:x?}");

    // Two rows, the second one past 4 GiB in x and y; an identity of rank 1 past 4 GiB in the weights.
    let [weights, x, y] = [&huge[0], &huge[1], &huge[2]];
    let stride = (FAR / 4) as u32;
    let cell = weights.ptr().0 + FAR;
    let tables = [cell as u32, (cell >> 32) as u32, 1, 2f32.to_bits()];
    let batch = [0, 1f32.to_bits(), 0, 1f32.to_bits()];
    let place = |region: &Region, offset, word: u32| {
        let at = region.slice(offset, 4)?;
        backend.submit(&mut |encoder| encoder.write(&at, &word.to_le_bytes()))
    };
    place(weights, FAR, 1f32.to_bits())?;
    place(x, 0, 3f32.to_bits())?;
    place(x, FAR, 4f32.to_bits())?;
    let upload = |words: &[u32]| -> Result<Region> {
        let region = backend.alloc(words.len() as u64 * 4, "words")?;
        backend.submit(&mut |encoder| encoder.write(&region, bytemuck::cast_slice(words)))?;
        Ok(region)
    };
    let (batch, tables, z) = (upload(&batch)?, upload(&tables)?, backend.alloc(8, "z")?);
    let site = SiteParams { ranks: 2, scales: 3, span: 8, out_features: 1, y_stride: stride, ..SiteParams::default() };
    let params = Params {
        rows: 2,
        slots: 1,
        slot_count: 1,
        sites: 1,
        in_features: 1,
        x_stride: stride,
        a_stride: 8,
        b_stride: 8,
        z_stride: 1,
        max_rank: 1,
        max_out: 1,
        site: [site, SiteParams::default(), SiteParams::default(), SiteParams::default()],
        ..Params::default()
    };
    let spec = Spec { act: DType::F32, weight: DType::F32 };
    let (shrink, expand) = (backend.load(Kernel::BgmvShrink, spec)?, backend.load(Kernel::BgmvExpand, spec)?);
    backend.submit(&mut |encoder| {
        let operands = [batch.clone(), tables.clone(), weights.clone(), x.clone(), z.clone()];
        encoder.launch(&[Launch::new(&shrink, &operands, params)?])?;
        let operands = [batch.clone(), tables.clone(), weights.clone(), z.clone(), y.clone()];
        encoder.launch(&[Launch::new(&expand, &operands, params)?])
    })?;
    assert_eq!(DType::F32.decode(&backend.read(&y.slice(0, 4)?)?), [6.0]);
    assert_eq!(DType::F32.decode(&backend.read(&y.slice(FAR, 4)?)?), [8.0]);
    Ok(())
}

/// Launches that pass the check, over batches and tables of noise: nothing panics, and nothing but y or z
/// changes, and of those no byte outside the rows.
#[test]
fn noise_in_tables_tiles_and_parameters_is_survived() -> Result<()> {
    let _memory = MEMORY.read().unwrap_or_else(PoisonError::into_inner);
    let backend = with_threads(2);
    let mut dice = Dice::new(77);
    let (mut launched, mut written) = (0, 0);
    for _ in 0..12_000 {
        let spec = Spec { act: DType::ALL[dice.below(3) as usize], weight: DType::ALL[dice.below(3) as usize] };
        let kernel = Kernel::ALL[dice.below(4) as usize];
        let noise = |dice: &mut Dice, len: u32, of: &dyn Fn(&mut Dice, u32) -> u32| -> Result<(Region, Vec<u8>)> {
            let words: Vec<u32> = (0..len).map(|i| of(dice, i)).collect();
            let region = backend.alloc(u64::from(len) * 4, "noise")?;
            backend.submit(&mut |encoder| encoder.write(&region, bytemuck::cast_slice(&words)))?;
            Ok((region, bytemuck::cast_slice(&words).to_vec()))
        };
        let small = |dice: &mut Dice, _| match dice.below(8) {
            0 => dice.bits() as u32,
            1 => u32::MAX - dice.below(3),
            _ => dice.below(7),
        };
        let value = |dice: &mut Dice, _| dice.unit().to_bits();
        let weights = noise(&mut dice, 128, &value)?;
        let address = weights.0.ptr().0;
        // First addresses in or near the weights, then ranks and scales; one word in eight is anything.
        let table = |dice: &mut Dice, i: u32| match (dice.below(8), i) {
            (0, _) => dice.bits() as u32,
            (1, 0..32) => (address as u32).wrapping_add(dice.below(700)).wrapping_sub(64),
            (_, 0..32) if i.is_multiple_of(2) => address as u32 + 16 * dice.below(24),
            (_, 0..32) => (address >> 32) as u32,
            _ => small(dice, i),
        };
        let operands = [
            noise(&mut dice, 64, &small)?,
            noise(&mut dice, 64, &table)?,
            weights,
            noise(&mut dice, 128, &value)?,
            noise(&mut dice, 128, &value)?,
        ];
        let mut params = Params {
            rows: dice.below(6),
            row_first: dice.below(6),
            slots: 1 + dice.below(5),
            sites: 1 + dice.below(4),
            in_features: dice.below(9),
            x_stride: dice.below(12),
            a_stride: [8, 8, 16, small(&mut dice, 0)][dice.below(4) as usize],
            b_stride: [8, 8, 16, small(&mut dice, 0)][dice.below(4) as usize],
            z_stride: dice.below(20),
            max_rank: dice.below(9),
            tiles_at: dice.below(30),
            tiles: dice.below(8),
            max_out: 8,
            ..Params::default()
        };
        params.slot_first = dice.below(params.slots);
        params.slot_count = dice.below(params.slots - params.slot_first + 1);
        for site in &mut params.site[..(params.sites as usize).min(MAX_SITES)] {
            let out_features = dice.below(9);
            let (rows, stride) = match kernel.is_expand() {
                true => (out_features, params.b_stride),
                false => (params.max_rank, params.a_stride),
            };
            // What the matrix takes, or less: that is refused.
            let whole = rows.saturating_mul(stride).saturating_mul(spec.weight.size() as u32) / 4;
            let span = if dice.below(8) == 0 { dice.below(whole.max(1)) } else { whole };
            *site = SiteParams {
                cells: if dice.below(8) == 0 { 1 } else { 2 * dice.below(12) },
                ranks: 32 + dice.below(20),
                scales: dice.below(50),
                span,
                out_features,
                y_offset: dice.below(12),
                y_stride: dice.below(20),
                z_offset: dice.below(12),
                ..SiteParams::default()
            };
        }
        let pipeline = backend.load(kernel, spec)?;
        let regions: Vec<Region> = operands.iter().map(|(region, _)| region.clone()).collect();
        let Ok(launch) = Launch::new(&pipeline, &regions, params) else { continue };
        backend.submit(&mut |encoder| encoder.launch(std::slice::from_ref(&launch)))?;
        launched += 1;
        for (region, before) in &operands[..4] {
            assert_eq!(backend.read(region)?, *before, "{pipeline:?} {params:?}");
        }
        let (size, end) = if kernel.is_expand() { (spec.act.size(), 4) } else { (4, 4) };
        let extent = kernel.extents(spec, &params)[end] as usize;
        let after = backend.read(&operands[4].0)?;
        assert_eq!(after[extent..], operands[4].1[extent..], "{pipeline:?} {params:?}, elements of {size} bytes");
        written += usize::from(after != operands[4].1);
    }
    assert!(launched > 1_000 && written > 50, "{launched} launched, {written} of them wrote: the noise is too wild");
    Ok(())
}
