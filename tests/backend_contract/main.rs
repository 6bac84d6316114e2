//! What every backend promises by `GpuBackend`, `Encoder` and `Graph`, tried on each that opens.
//!
//! A backend without driver or device is ignored with the reason, unless `REQUIRE_BACKENDS` (names,
//! separated by commas) asks for it: then its trials fail.

mod graphs;
mod memory;
mod records;
mod rig;

use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use lorapool::Result;
use lorapool::backend::{self, GpuBackend};

use rig::Bench;

/// A promise: its name and how it is tried.
type Promise = (&'static str, fn(&Bench) -> Result<()>);

/// The promise whose trials measure the process's memory, which no other trial may use meanwhile.
const MEASURES: &str = "two_thousand_allocations_leave_nothing_behind";
static TURN: RwLock<()> = RwLock::new(());

const PROMISES: &[Promise] = &[
    ("memory_is_zeroed_even_where_it_was_used_before", memory::memory_is_zeroed),
    ("addresses_are_aligned_and_apart", memory::addresses_are_apart),
    ("an_allocation_past_the_limit_is_refused", memory::allocation_past_the_limit),
    (MEASURES, memory::allocations_leave_nothing),
    ("any_range_can_be_read", memory::any_range_can_be_read),
    ("writes_copies_and_launches_keep_their_order", records::order_is_kept),
    ("misaligned_and_overlong_writes_are_refused", records::bad_writes_are_refused),
    ("misaligned_and_overlapping_copies_are_refused", records::bad_copies_are_refused),
    ("memory_and_pipelines_of_others_are_refused", records::foreign_things_are_refused),
    ("a_failed_record_sends_nothing", records::failed_record_sends_nothing),
    ("a_capture_runs_only_when_replayed", graphs::capture_runs_when_replayed),
    ("a_graph_keeps_bytes_and_addresses_but_not_contents", graphs::graph_keeps_bytes),
    ("a_graph_keeps_its_memory_alive", graphs::graph_keeps_memory_alive),
    ("memory_may_be_dropped_while_work_uses_it", memory::memory_may_be_dropped),
    ("tickets_increase_and_can_be_waited_for", records::tickets_increase),
    ("threads_may_submit_at_once", records::threads_may_submit),
    ("nothing_is_work_too", records::nothing_is_work_too),
    ("transfers_bring_every_byte_while_the_queue_works_on", memory::transfers_beside_the_queue),
    ("overlong_and_foreign_transfers_are_refused", memory::bad_transfers_are_refused),
    ("every_kernel_loads_for_every_type", records::every_kernel_loads),
    ("memory_and_graphs_may_outlive_the_backend", graphs::things_outlive_the_backend),
];

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
