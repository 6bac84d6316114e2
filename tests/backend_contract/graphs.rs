//! Promises about graphs: what they keep, and what they read anew.

use lorapool::Result;
use lorapool::backend;
use lorapool::contract::RowRef;

use crate::rig::{BYTES, Bench, Rig, WIDTH, row, sum};

pub fn capture_runs_when_replayed(bench: &Bench) -> Result<()> {
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

pub fn graph_keeps_bytes(bench: &Bench) -> Result<()> {
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

pub fn graph_keeps_memory_alive(bench: &Bench) -> Result<()> {
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

pub fn things_outlive_the_backend(bench: &Bench) -> Result<()> {
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
