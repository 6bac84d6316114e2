//! Promises about records: order, refusals, tickets, threads.

use std::sync::Arc;

use lorapool::backend::{self, Encoder, Pipeline};
use lorapool::contract::{Kernel, Params, Spec};
use lorapool::{DType, DevicePtr, Error, Region, Result};

use crate::rig::{BYTES, Bench, Foreign, Rig, WIDTH, code, row, sum};

pub fn order_is_kept(bench: &Bench) -> Result<()> {
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

pub fn bad_writes_are_refused(bench: &Bench) -> Result<()> {
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

pub fn bad_copies_are_refused(bench: &Bench) -> Result<()> {
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

pub fn foreign_things_are_refused(bench: &Bench) -> Result<()> {
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

pub fn failed_record_sends_nothing(bench: &Bench) -> Result<()> {
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

pub fn nothing_is_work_too(bench: &Bench) -> Result<()> {
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

pub fn tickets_increase(bench: &Bench) -> Result<()> {
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

pub fn threads_may_submit(bench: &Bench) -> Result<()> {
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

pub fn every_kernel_loads(bench: &Bench) -> Result<()> {
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
