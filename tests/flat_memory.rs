//! Memory over thousands of loads: alone in its process, since it is the process's memory that is measured.

mod common;

use std::sync::Arc;

use common::{Rig, adapter, sites};
use lorapool::manager::{Options, SlotRef, Source};

#[test]
fn ten_thousand_loads_and_unloads_leave_host_memory_flat() {
    let rig = Rig::new(2, Options::default());
    let resident = || memory_stats::memory_stats().unwrap().physical_mem;
    let versions: Vec<_> = (0..4).map(|seed| Arc::new(adapter(&sites(), 4, seed))).collect();
    let mut after_warm_up = 0;
    for cycle in 0..10_000 {
        rig.manager.load("p", Source::Memory(versions[cycle % 4].clone())).unwrap();
        rig.manager.unload("p").unwrap();
        if cycle == 1000 {
            after_warm_up = resident();
        }
    }
    let grown = resident().saturating_sub(after_warm_up);
    assert!(grown < 4 << 20, "{grown} bytes more after 9,000 cycles");
    assert!(rig.manager.status().residents.is_empty());
    rig.manager.load("p", Source::Memory(versions[1].clone())).unwrap();
    assert_eq!(rig.row(SlotRef::Slot(rig.manager.acquire("p").unwrap().slot())), rig.alone(1));
}
