//! Promises about memory: what is in it, where it lies, how long it lasts, and how bytes get there and back.

use std::sync::Arc;

use lorapool::{DevicePtr, Region, Result};

use crate::rig::{Bench, Foreign, Rig, code, row, sum};

pub fn memory_is_zeroed(bench: &Bench) -> Result<()> {
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

pub fn addresses_are_apart(bench: &Bench) -> Result<()> {
    let regions = (1..50).map(|i| bench.backend.alloc(i * 13, "apart")).collect::<Result<Vec<_>>>()?;
    let mut ranges: Vec<_> = regions.iter().map(|r| (r.ptr().0, r.ptr().0 + r.len())).collect();
    ranges.sort();
    assert!(ranges.iter().all(|(start, _)| *start != 0 && start.is_multiple_of(16)), "{ranges:x?}");
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranges:x?}");
    Ok(())
}

pub fn allocation_past_the_limit(bench: &Bench) -> Result<()> {
    let limit = bench.backend.caps().max_alloc;
    for len in [limit.saturating_add(1), u64::MAX] {
        if len > limit {
            assert_eq!(code(bench.backend.alloc(len, "too much")), "E_LIMIT", "{len} bytes, limit {limit}");
        }
    }
    Ok(())
}

pub fn allocations_leave_nothing(bench: &Bench) -> Result<()> {
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

pub fn any_range_can_be_read(bench: &Bench) -> Result<()> {
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

pub fn memory_may_be_dropped(bench: &Bench) -> Result<()> {
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

pub fn transfers_beside_the_queue(bench: &Bench) -> Result<()> {
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

pub fn bad_transfers_are_refused(bench: &Bench) -> Result<()> {
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
