//! What every backend promises by `GpuBackend`, `Encoder` and `Graph`, tried on each that opens.
//!
//! A backend without driver or device is ignored with the reason, unless `REQUIRE_BACKENDS` (names,
//! separated by commas) asks for it: then its trials fail.

use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use lorapool::backend::{self, Encoder, GpuBackend, Launch, Pipeline};
use lorapool::contract::{Kernel, Params, RowRef, SiteParams, Spec};
use lorapool::{Allocation, DType, DevicePtr, Error, Region, Result};

/// A promise: its name and how it is tried. `open` opens the backend once more.
type Promise = (&'static str, fn(&Bench) -> Result<()>);

/// The promise whose trials measure the process's memory, which no other trial may use meanwhile.
const MEASURES: &str = "two_thousand_allocations_leave_nothing_behind";
static TURN: RwLock<()> = RwLock::new(());

const PROMISES: &[Promise] = &[
    ("memory_is_zeroed_even_where_it_was_used_before", memory_is_zeroed),
    ("addresses_are_aligned_and_apart", addresses_are_apart),
    ("an_allocation_past_the_limit_is_refused", allocation_past_the_limit),
    (MEASURES, allocations_leave_nothing),
    ("any_range_can_be_read", any_range_can_be_read),
    ("writes_copies_and_launches_keep_their_order", order_is_kept),
    ("misaligned_and_overlong_writes_are_refused", bad_writes_are_refused),
    ("misaligned_and_overlapping_copies_are_refused", bad_copies_are_refused),
    ("memory_and_pipelines_of_others_are_refused", foreign_things_are_refused),
    ("a_failed_record_sends_nothing", failed_record_sends_nothing),
    ("a_capture_runs_only_when_replayed", capture_runs_when_replayed),
    ("a_graph_keeps_bytes_and_addresses_but_not_contents", graph_keeps_bytes),
    ("a_graph_keeps_its_memory_alive", graph_keeps_memory_alive),
    ("memory_may_be_dropped_while_work_uses_it", memory_may_be_dropped),
    ("tickets_increase_and_can_be_waited_for", tickets_increase),
    ("threads_may_submit_at_once", threads_may_submit),
    ("nothing_is_work_too", nothing_is_work_too),
    ("transfers_bring_every_byte_while_the_queue_works_on", transfers_beside_the_queue),
    ("overlong_and_foreign_transfers_are_refused", bad_transfers_are_refused),
    ("every_kernel_loads_for_every_type", every_kernel_loads),
    ("memory_and_graphs_may_outlive_the_backend", things_outlive_the_backend),
];

/// A backend under trial.
struct Bench {
    name: &'static str,
    backend: Arc<dyn GpuBackend>,
}

impl Bench {
    fn upload(&self, bytes: &[u8]) -> Result<Region> {
        let region = self.backend.alloc(bytes.len() as u64, "test")?;
        self.backend.submit(&mut |encoder| encoder.write(&region, bytes))?;
        Ok(region)
    }

    fn floats(&self, region: &Region) -> Result<Vec<f32>> {
        Ok(DType::F32.decode(&self.backend.read(region)?))
    }
}

/// Width and rank of the adapter below.
const WIDTH: u32 = 8;
const BYTES: u64 = WIDTH as u64 * 4;

/// One row, one site, and an adapter whose A and B are identities: `y += x`, exactly.
struct Rig {
    shrink: Pipeline,
    expand: Pipeline,
    params: Params,
    fixed: [Region; 3],
    x: Region,
    z: Region,
    y: Region,
}

impl Rig {
    fn new(bench: &Bench) -> Result<Self> {
        let spec = Spec { act: DType::F32, weight: DType::F32 };
        let identity = |scale: f32| (0..64).map(move |i| if i % 9 == 0 { scale } else { 0.0 });
        let weights: Vec<f32> = identity(1.0).chain(identity(1.0)).collect();
        let weights = bench.upload(bytemuck::cast_slice(&weights))?;
        let (a, b) = (weights.ptr().0, weights.ptr().0 + 256);
        let tables = [a as u32, (a >> 32) as u32, b as u32, (b >> 32) as u32, WIDTH, 1f32.to_bits(), 0, 0];
        let batch = [RowRef { slot: 0, scale: 1.0 }; 2];
        let fixed =
            [bench.upload(bytemuck::cast_slice(&batch))?, bench.upload(bytemuck::cast_slice(&tables))?, weights];
        let site =
            SiteParams { ranks: 4, scales: 5, span: 64, out_features: WIDTH, y_stride: WIDTH, ..SiteParams::default() };
        let params = Params {
            rows: 1,
            slots: 1,
            slot_count: 1,
            sites: 1,
            in_features: WIDTH,
            x_stride: WIDTH,
            a_stride: WIDTH,
            b_stride: WIDTH,
            z_stride: WIDTH,
            max_rank: WIDTH,
            max_out: WIDTH,
            site: [site, SiteParams::default(), SiteParams::default(), SiteParams::default()],
            ..Params::default()
        };
        let alloc = |label| bench.backend.alloc(BYTES, label);
        Ok(Self {
            shrink: bench.backend.load(Kernel::BgmvShrink, spec)?,
            expand: bench.backend.load(Kernel::BgmvExpand, spec)?,
            params,
            fixed,
            x: alloc("x")?,
            z: alloc("z")?,
            y: alloc("y")?,
        })
    }

    /// Records `y += x`.
    fn add(&self, encoder: &mut dyn Encoder) -> Result<()> {
        let operands = |vector: &Region, out: &Region| {
            let [batch, tables, weights] = self.fixed.clone();
            [batch, tables, weights, vector.clone(), out.clone()]
        };
        let shrink = operands(&self.x, &self.z);
        encoder.launch(&[Launch::new(&self.shrink, &shrink, self.params)?])?;
        let mut params = self.params;
        params.site[0].cells = 2;
        let expand = operands(&self.z, &self.y);
        encoder.launch(&[Launch::new(&self.expand, &expand, params)?])
    }
}

/// The bytes of a row whose elements are `value`, `value + 1`, ...
fn row(value: f32) -> Vec<u8> {
    let values: Vec<f32> = (0..WIDTH).map(|i| value + i as f32).collect();
    bytemuck::cast_slice(&values).to_vec()
}

/// The elements of the sum of `count` rows whose first elements add up to `first`.
fn sum(first: f32, count: u32) -> Vec<f32> {
    (0..WIDTH).map(|i| first + (count * i) as f32).collect()
}

fn code<T>(result: Result<T>) -> &'static str {
    result.map_or_else(|error| error.code(), |_| "no error")
}

fn memory_is_zeroed(bench: &Bench) -> Result<()> {
    for len in [1, 4, 255, 4099, 1 << 20] {
        for _ in 0..3 {
            let region = bench.backend.alloc(len, "zeroed")?;
            assert_eq!(region.len(), len);
            assert!(bench.backend.read(&region)?.iter().all(|b| *b == 0), "of {len} bytes");
            let dirt = vec![0xff; len as usize / 4 * 4];
            bench.backend.submit(&mut |encoder| encoder.write(&region, &dirt))?;
        }
    }
    Ok(())
}

fn addresses_are_apart(bench: &Bench) -> Result<()> {
    let regions = (1..50).map(|i| bench.backend.alloc(i * 13, "apart")).collect::<Result<Vec<_>>>()?;
    let mut ranges: Vec<_> = regions.iter().map(|r| (r.ptr().0, r.ptr().0 + r.len())).collect();
    ranges.sort();
    assert!(ranges.iter().all(|(start, _)| *start != 0 && start.is_multiple_of(16)), "{ranges:x?}");
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranges:x?}");
    Ok(())
}

fn allocation_past_the_limit(bench: &Bench) -> Result<()> {
    let limit = bench.backend.caps().max_alloc;
    for len in [limit.saturating_add(1), u64::MAX] {
        if len > limit {
            assert_eq!(code(bench.backend.alloc(len, "too much")), "E_LIMIT", "{len} bytes, limit {limit}");
        }
    }
    Ok(())
}

fn allocations_leave_nothing(bench: &Bench) -> Result<()> {
    let resident = || -> Option<u64> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    const LEN: usize = 1 << 20;
    let bytes = vec![1; LEN];
    let mut before = None;
    for i in 0..2000 {
        if i == 100 {
            before = resident();
        }
        let region = bench.backend.alloc(LEN as u64, "passing")?;
        bench.backend.submit(&mut |encoder| encoder.write(&region, &bytes))?;
        if i % 16 == 0 {
            assert_eq!(bench.backend.read(&region.slice(LEN as u64 - 4, 4)?)?, [1; 4]);
        }
    }
    if let (Some(before), Some(after)) = (before, resident()) {
        assert!(after < before + (256 << 10), "{before} KiB resident after 100, {after} KiB after 2,000");
    }
    Ok(())
}

fn any_range_can_be_read(bench: &Bench) -> Result<()> {
    let bytes: Vec<u8> = (0..1000u32).map(|i| (i * 7 % 251) as u8).collect();
    let region = bench.upload(&bytes)?;
    for offset in [0, 1, 2, 3, 5, 255, 256, 511, 993, 999, 1000] {
        for len in [0, 1, 2, 3, 4, 5, 7, 64, 255, 1000] {
            if offset + len <= bytes.len() {
                let found = bench.backend.read(&region.slice(offset as u64, len as u64)?)?;
                assert_eq!(found, bytes[offset..offset + len], "{len} bytes at {offset}");
            }
        }
    }
    // Nor need an allocation itself be whole words.
    let region = bench.backend.alloc(7, "odd")?;
    bench.backend.submit(&mut |encoder| encoder.write(&region, &[1, 2, 3, 4]))?;
    assert_eq!(bench.backend.read(&region)?, [1, 2, 3, 4, 0, 0, 0]);
    Ok(())
}

fn order_is_kept(bench: &Bench) -> Result<()> {
    let rig = Rig::new(bench)?;
    let before = bench.backend.alloc(BYTES, "before")?;
    let between = bench.backend.alloc(BYTES, "between")?;
    let spare = bench.backend.alloc(BYTES, "spare")?;
    bench.backend.submit(&mut |encoder| {
        encoder.write(&rig.y, &row(1000.0))?;
        encoder.copy(&before, &rig.y)?;
        encoder.write(&rig.x, &row(10.0))?;
        rig.add(encoder)?;
        encoder.copy(&between, &rig.y)?;
        encoder.write(&rig.x, &row(200.0))?;
        rig.add(encoder)?;
        rig.add(encoder)?;
        // A copy into an input between launches, and a write over what was copied.
        encoder.copy(&spare, &rig.x)?;
        encoder.copy(&rig.x, &before)?;
        encoder.write(&before, &row(0.5))?;
        rig.add(encoder)?;
        encoder.write(&spare.slice(4, 8)?, &[0xff; 8])
    })?;
    assert_eq!(bench.floats(&before)?, sum(0.5, 1));
    assert_eq!(bench.floats(&between)?, sum(1010.0, 2));
    assert_eq!(bench.floats(&rig.y)?, sum(2410.0, 5));
    let mut expected = row(200.0);
    expected[4..12].fill(0xff);
    assert_eq!(bench.backend.read(&spare)?, expected);
    Ok(())
}

fn bad_writes_are_refused(bench: &Bench) -> Result<()> {
    let region = bench.upload(&[7; 64])?;
    let tries: [(u64, usize, &str); 4] =
        [(2, 4, "E_SHAPE"), (0, 3, "E_SHAPE"), (1, 5, "E_SHAPE"), (60, 8, "E_OUT_OF_BOUNDS")];
    for (offset, len, expected) in tries {
        let rest = region.slice(offset, 64 - offset)?;
        let sent = bench.backend.submit(&mut |encoder| encoder.write(&rest, &vec![1; len]));
        assert_eq!(code(sent), expected, "{len} bytes at {offset}");
        let kept = bench.backend.capture(&mut |encoder| encoder.write(&rest, &vec![1; len]));
        assert_eq!(code(kept), expected, "{len} bytes at {offset}, captured");
    }
    assert_eq!(bench.backend.read(&region)?, [7; 64]);
    Ok(())
}

fn bad_copies_are_refused(bench: &Bench) -> Result<()> {
    let bytes: Vec<u8> = (0..64).collect();
    let (region, other) = (bench.upload(&bytes)?, bench.upload(&[9; 64])?);
    let slice = |from: &Region, at: u64, len: u64| from.slice(at, len);
    let tries = [
        (slice(&region, 0, 32)?, slice(&region, 28, 32)?, "overlapping"),
        (slice(&region, 0, 32)?, slice(&region, 0, 32)?, "the same"),
        (slice(&region, 2, 8)?, slice(&other, 0, 8)?, "misaligned to"),
        (slice(&region, 0, 8)?, slice(&other, 1, 8)?, "misaligned from"),
        (slice(&region, 0, 6)?, slice(&other, 0, 6)?, "no words"),
        (slice(&region, 0, 8)?, slice(&other, 0, 12)?, "unequal"),
    ];
    for (dst, src, what) in tries {
        assert_eq!(code(bench.backend.submit(&mut |encoder| encoder.copy(&dst, &src))), "E_SHAPE", "{what}");
    }
    assert_eq!(bench.backend.read(&region)?, bytes);
    let (dst, src) = (slice(&region, 32, 32)?, slice(&region, 0, 32)?);
    bench.backend.submit(&mut |encoder| encoder.copy(&dst, &src))?;
    assert_eq!(bench.backend.read(&dst)?, bytes[..32], "neighbours in one allocation");
    Ok(())
}

/// Memory of no backend.
#[derive(Debug)]
struct Foreign;

impl Allocation for Foreign {
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

fn foreign_things_are_refused(bench: &Bench) -> Result<()> {
    let foreign = Region::new(DevicePtr(1 << 32), 4096, Arc::new(Foreign)).slice(0, BYTES)?;
    let own = bench.upload(&row(1.0))?;
    assert!(bench.backend.read(&foreign).is_err());
    assert!(bench.backend.submit(&mut |encoder| encoder.write(&foreign, &row(1.0))).is_err());
    assert!(bench.backend.submit(&mut |encoder| encoder.copy(&foreign, &own)).is_err());
    assert!(bench.backend.submit(&mut |encoder| encoder.copy(&own, &foreign)).is_err());
    let mut rig = Rig::new(bench)?;
    let pipeline = Pipeline::new(rig.shrink.kernel(), rig.shrink.spec(), Arc::new(Foreign));
    let theirs = std::mem::replace(&mut rig.shrink, pipeline);
    assert!(bench.backend.submit(&mut |encoder| rig.add(encoder)).is_err());
    rig.shrink = theirs;
    rig.x = foreign;
    assert!(bench.backend.submit(&mut |encoder| rig.add(encoder)).is_err());
    assert_eq!(bench.floats(&own)?, sum(1.0, 1));
    Ok(())
}

fn failed_record_sends_nothing(bench: &Bench) -> Result<()> {
    let rig = Rig::new(bench)?;
    let mut fail = |encoder: &mut dyn Encoder| {
        encoder.write(&rig.x, &row(5.0))?;
        rig.add(encoder)?;
        encoder.copy(&rig.z, &rig.x)?;
        Err(Error::Input("on purpose".into()))
    };
    assert_eq!(bench.backend.submit(&mut fail).unwrap_err().to_string(), "on purpose");
    assert_eq!(bench.backend.capture(&mut fail).unwrap_err().to_string(), "on purpose");
    for region in [&rig.x, &rig.y, &rig.z] {
        assert_eq!(bench.floats(region)?, [0.0; WIDTH as usize]);
    }
    bench.backend.submit(&mut |encoder| {
        encoder.write(&rig.x, &row(5.0))?;
        rig.add(encoder)
    })?;
    assert_eq!(bench.floats(&rig.y)?, sum(5.0, 1));
    Ok(())
}

fn capture_runs_when_replayed(bench: &Bench) -> Result<()> {
    let rig = Rig::new(bench)?;
    bench.backend.submit(&mut |encoder| encoder.write(&rig.x, &row(3.0)))?;
    let graph = bench.backend.capture(&mut |encoder| rig.add(encoder))?;
    assert_eq!(bench.floats(&rig.y)?, [0.0; WIDTH as usize]);
    for times in 1..=5 {
        bench.backend.wait(graph.replay()?)?;
        assert_eq!(bench.floats(&rig.y)?, sum(3.0 * times as f32, times));
    }
    // Back to back, among other work, and from another thread.
    graph.replay()?;
    graph.replay()?;
    bench.backend.submit(&mut |encoder| encoder.write(&rig.x, &row(100.0)))?;
    let graph = std::thread::spawn(move || graph.replay().map(|_| graph)).join().unwrap()?;
    assert_eq!(bench.floats(&rig.y)?, sum(121.0, 8));
    drop(graph);
    assert_eq!(bench.floats(&rig.y)?, sum(121.0, 8));
    Ok(())
}

fn graph_keeps_bytes(bench: &Bench) -> Result<()> {
    let rig = Rig::new(bench)?;
    let out = bench.backend.alloc(BYTES, "out")?;
    let mut bytes = row(2.0);
    let graph = bench.backend.capture(&mut |encoder| {
        encoder.write(&rig.x, &bytes)?;
        rig.add(encoder)?;
        encoder.copy(&out, &rig.y)
    })?;
    bytes.fill(0xff);
    drop(bytes);
    bench.backend.submit(&mut |encoder| encoder.write(&rig.x, &row(77.0)))?;
    graph.replay()?;
    assert_eq!(bench.floats(&out)?, sum(2.0, 1));
    // What addresses hold is read anew: y here, and a row that now has no adapter.
    bench.backend.submit(&mut |encoder| encoder.write(&rig.y, &row(40.0)))?;
    graph.replay()?;
    assert_eq!(bench.floats(&out)?, sum(42.0, 2));
    let base = [RowRef { slot: -1, scale: 1.0 }];
    bench.backend.submit(&mut |encoder| encoder.write(&rig.fixed[0], bytemuck::cast_slice(&base)))?;
    graph.replay()?;
    assert_eq!(bench.floats(&out)?, sum(42.0, 2));
    Ok(())
}

fn graph_keeps_memory_alive(bench: &Bench) -> Result<()> {
    let rig = Rig::new(bench)?;
    let out = bench.backend.alloc(BYTES, "out")?;
    let graph = bench.backend.capture(&mut |encoder| {
        encoder.write(&rig.x, &row(6.0))?;
        rig.add(encoder)?;
        encoder.copy(&out, &rig.y)
    })?;
    drop(rig);
    let fill = |len: u64| bench.upload(&vec![0xee; len as usize]);
    let others = [16, 32, 32, 32, 64, 512, 4096].into_iter().cycle().take(70).map(fill).collect::<Result<Vec<_>>>()?;
    for times in 1..=3 {
        graph.replay()?;
        assert_eq!(bench.floats(&out)?, sum(6.0 * times as f32, times));
    }
    for other in &others {
        assert!(bench.backend.read(other)?.iter().all(|b| *b == 0xee), "a replay wrote into {other:?}");
    }
    Ok(())
}

fn memory_may_be_dropped(bench: &Bench) -> Result<()> {
    const LEN: usize = 4 << 20;
    let out = bench.backend.alloc(LEN as u64, "out")?;
    for round in 1..=8u8 {
        let source = bench.upload(&vec![round; LEN])?;
        bench.backend.submit(&mut |encoder| encoder.copy(&out, &source))?;
        drop(source);
        let next = bench.upload(&vec![0xaa; LEN])?;
        assert!(bench.backend.read(&out)?.iter().all(|b| *b == round), "round {round}");
        drop(next);
    }
    // The queue alone keeps these.
    let rig = Rig::new(bench)?;
    let y = rig.y.clone();
    bench.backend.submit(&mut |encoder| {
        encoder.write(&rig.x, &row(4.0))?;
        rig.add(encoder)
    })?;
    drop(rig);
    assert_eq!(bench.floats(&y)?, sum(4.0, 1));
    Ok(())
}

fn tickets_increase(bench: &Bench) -> Result<()> {
    let rig = Rig::new(bench)?;
    let graph = bench.backend.capture(&mut |encoder| rig.add(encoder))?;
    let mut tickets = Vec::new();
    for _ in 0..20 {
        tickets.push(bench.backend.submit(&mut |encoder| rig.add(encoder))?);
        tickets.push(graph.replay()?);
    }
    assert!(tickets.windows(2).all(|pair| pair[0] < pair[1]), "{tickets:?}");
    std::thread::scope(|scope| {
        for ticket in &tickets {
            scope.spawn(|| {
                bench.backend.wait(*ticket).unwrap();
                assert!(bench.backend.completed().unwrap() >= *ticket);
            });
        }
    });
    // Again, when all is long done, and before anything was ever asked for.
    bench.backend.wait(tickets[0])?;
    bench.backend.wait(backend::Ticket::default())
}

fn threads_may_submit(bench: &Bench) -> Result<()> {
    const THREADS: u32 = 8;
    const TIMES: u32 = 25;
    let shared = Rig::new(bench)?;
    bench.backend.submit(&mut |encoder| encoder.write(&shared.x, &row(1.0)))?;
    let work = |thread: u32| -> Result<()> {
        let own = Rig::new(bench)?;
        bench.backend.submit(&mut |encoder| encoder.write(&own.x, &row(thread as f32)))?;
        let graph = bench.backend.capture(&mut |encoder| own.add(encoder))?;
        for time in 1..=TIMES {
            bench.backend.submit(&mut |encoder| shared.add(encoder))?;
            let ticket =
                if time % 2 == 0 { graph.replay()? } else { bench.backend.submit(&mut |encoder| own.add(encoder))? };
            if time % 5 == 0 {
                bench.backend.wait(ticket)?;
                assert_eq!(bench.floats(&own.y)?, sum((thread * time) as f32, time));
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })?;
    assert_eq!(bench.floats(&shared.y)?, sum((THREADS * TIMES) as f32, THREADS * TIMES));
    Ok(())
}

fn nothing_is_work_too(bench: &Bench) -> Result<()> {
    let rig = Rig::new(bench)?;
    bench.backend.wait(bench.backend.submit(&mut |_| Ok(()))?)?;
    let graph = bench.backend.capture(&mut |_| Ok(()))?;
    bench.backend.wait(graph.replay()?)?;
    let idle = Rig { params: Params { rows: 0, ..rig.params }, ..rig };
    bench.backend.submit(&mut |encoder| {
        encoder.launch(&[])?;
        encoder.write(&idle.x, &[])?;
        idle.add(encoder)
    })?;
    assert_eq!(bench.floats(&idle.y)?, [0.0; WIDTH as usize]);
    Ok(())
}

fn transfers_beside_the_queue(bench: &Bench) -> Result<()> {
    // More than one piece, and no multiple of it.
    const LEN: usize = (9 << 20) + 20;
    let rig = Rig::new(bench)?;
    bench.backend.submit(&mut |encoder| encoder.write(&rig.x, &row(1.0)))?;
    let target = bench.backend.alloc(LEN as u64 + 32, "transfers")?;
    bench.backend.wait(bench.backend.submit(&mut |_| Ok(()))?)?;
    let mut sent = bench.backend.alloc_host(LEN)?;
    assert!(sent.iter().all(|b| *b == 0) && sent.len() == LEN);
    sent.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 7 + i / 251) as u8);
    let mut back = bench.backend.alloc_host(LEN)?;
    let graph = bench.backend.capture(&mut |encoder| rig.add(encoder))?;
    let replays = std::thread::scope(|scope| -> Result<u32> {
        let transfers = scope.spawn(|| -> Result<()> {
            for _ in 0..3 {
                bench.backend.upload(&target.slice(16, LEN as u64)?, &sent)?;
                back.fill(0);
                bench.backend.download(&target.slice(16, LEN as u64)?, &mut back)?;
                assert!(*back == *sent);
            }
            Ok(())
        });
        let mut replays = 0;
        while replays < 3 || !transfers.is_finished() {
            bench.backend.wait(graph.replay()?)?;
            replays += 1;
        }
        transfers.join().unwrap()?;
        Ok(replays)
    })?;
    let all = bench.backend.read(&target)?;
    assert!(all[..16].iter().chain(&all[16 + LEN..]).all(|b| *b == 0), "the neighbours keep their bits");
    assert!(all[16..16 + LEN] == *sent);
    assert_eq!(bench.floats(&rig.y)?, sum(replays as f32, replays));
    Ok(())
}

fn bad_transfers_are_refused(bench: &Bench) -> Result<()> {
    let region = bench.backend.alloc(16, "test")?;
    assert_eq!(bench.backend.upload(&region, &[1; 20]).unwrap_err().code(), "E_OUT_OF_BOUNDS");
    assert_eq!(bench.backend.upload(&region, &[1; 6]).unwrap_err().code(), "E_SHAPE");
    assert_eq!(bench.backend.download(&region, &mut [0; 17]).unwrap_err().code(), "E_OUT_OF_BOUNDS");
    let foreign = Region::new(DevicePtr(1 << 32), 16, Arc::new(Foreign));
    assert!(bench.backend.upload(&foreign, &[1; 4]).is_err());
    assert!(bench.backend.download(&foreign, &mut [1; 4]).is_err());
    assert_eq!(bench.backend.read(&region)?, [0; 16]);
    bench.backend.upload(&region, &[])?;
    bench.backend.download(&region, &mut [])?;
    Ok(())
}

fn every_kernel_loads(bench: &Bench) -> Result<()> {
    for kernel in Kernel::ALL {
        for act in DType::ALL {
            for weight in DType::ALL {
                let spec = Spec { act, weight };
                let pipeline = bench.backend.load(kernel, spec)?;
                assert_eq!((pipeline.kernel(), pipeline.spec()), (kernel, spec));
            }
        }
    }
    Ok(())
}

fn things_outlive_the_backend(bench: &Bench) -> Result<()> {
    let own = Bench { name: bench.name, backend: backend::open(bench.name, 0)? };
    let rig = Rig::new(&own)?;
    bench.backend.wait(bench.backend.submit(&mut |_| Ok(()))?)?;
    let graph = own.backend.capture(&mut |encoder| rig.add(encoder))?;
    own.backend.submit(&mut |encoder| rig.add(encoder))?;
    drop(own);
    graph.replay()?;
    drop(graph);
    drop(rig);
    Ok(())
}

/// A backend of this build, opened when its first trial runs.
struct Device {
    name: &'static str,
    required: bool,
    opened: OnceLock<Result<Arc<dyn GpuBackend>, String>>,
}

impl Device {
    fn keeps(&self, promise: fn(&Bench) -> Result<()>) -> Result<Completion, Failed> {
        match self.opened.get_or_init(|| backend::open(self.name, 0).map_err(|error| error.to_string())) {
            Ok(backend) => promise(&Bench { name: self.name, backend: backend.clone() })?,
            Err(reason) if self.required => return Err(format!("required, but {reason}").into()),
            Err(reason) => return Ok(Completion::ignored_with(reason)),
        }
        Ok(Completion::Completed)
    }
}

fn main() {
    let arguments = Arguments::from_args();
    let required = std::env::var("REQUIRE_BACKENDS").unwrap_or_default();
    let mut trials = Vec::new();
    for name in backend::names() {
        let required = required.split(',').any(|r| r.trim() == name);
        let device = Arc::new(Device { name, required, opened: OnceLock::new() });
        for (promise, run) in PROMISES {
            let device = device.clone();
            let alone = *promise == MEASURES;
            let trial = move || {
                let (_alone, _beside);
                match alone {
                    true => _alone = TURN.write().unwrap_or_else(PoisonError::into_inner),
                    false => _beside = TURN.read().unwrap_or_else(PoisonError::into_inner),
                }
                device.keeps(*run)
            };
            trials.push(Trial::ignorable_test(format!("{name}::{promise}"), trial));
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}
