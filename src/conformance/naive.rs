//! A backend of plain loops that can be told to be wrong: shows that the suite finds what it is for.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::loops::{Fault, kernel};
use super::*;
use crate::backend::{
    Caps, DeviceClass, Encoder, Graph, Launch, Pipeline, Record, Ticket, WeightLayout, check_copy, check_write,
};
use crate::contract::{Kernel, Params, Spec};
use crate::memory::{Allocation, DevicePtr, Region};

#[derive(Debug)]
struct Memory(Mutex<Vec<u8>>);

impl Allocation for Memory {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[derive(Debug)]
struct Naive {
    caps: Caps,
    fault: Fault,
    next: AtomicU64,
}

impl Naive {
    fn new(fault: Fault) -> Self {
        let caps = Caps {
            backend: "naive",
            device: format!("loops, {fault:?}"),
            driver: String::new(),
            api: String::new(),
            class: DeviceClass::Software,
            memory: 0,
            layout: WeightLayout::SlotMajor,
            max_alloc: 1 << 30,
            max_binding: 1 << 30,
            binding_align: 4,
            max_groups: [65_535; 2],
            subgroup: [1, 1],
            z_parts: 0,
        };
        Self { caps, fault, next: AtomicU64::new(1) }
    }
}

impl GpuBackend for Naive {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&self, len: u64, _label: &str) -> Result<Region> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Ok(Region::new(DevicePtr(number << 32), len, Arc::new(Memory(Mutex::new(vec![0; len as usize])))))
    }

    fn load(&self, kernel: Kernel, spec: Spec) -> Result<Pipeline> {
        Ok(Pipeline::new(kernel, spec, Arc::new(())))
    }

    fn submit(&self, record: Record<'_>) -> Result<Ticket> {
        record(&mut Loops(self.fault)).map(|()| Ticket(1))
    }

    fn capture(&self, record: Record<'_>) -> Result<Box<dyn Graph>> {
        let mut list = Recorded { fault: self.fault, launches: Vec::new() };
        record(&mut list)?;
        Ok(Box::new(list))
    }

    fn completed(&self) -> Result<Ticket> {
        Ok(Ticket(1))
    }

    fn wait(&self, _ticket: Ticket) -> Result<()> {
        Ok(())
    }

    fn read(&self, src: &Region) -> Result<Vec<u8>> {
        Ok(bytes(src, |b| b.to_vec()))
    }
}

pub(super) fn bytes<R>(region: &Region, f: impl FnOnce(&mut [u8]) -> R) -> R {
    let memory: &Memory = region.owner().as_any().downcast_ref().unwrap();
    let (at, len) = (region.offset() as usize, region.len() as usize);
    f(&mut memory.0.lock().unwrap()[at..at + len])
}

/// Runs what it is given, at once.
struct Loops(Fault);

impl Encoder for Loops {
    fn launch(&mut self, batch: &[Launch<'_>]) -> Result<()> {
        batch.iter().for_each(|l| kernel(self.0, l.pipeline(), l.operands(), l.params()));
        Ok(())
    }

    fn write(&mut self, dst: &Region, data: &[u8]) -> Result<()> {
        check_write(dst, data)?;
        bytes(dst, |b| b[..data.len()].copy_from_slice(data));
        Ok(())
    }

    fn copy(&mut self, dst: &Region, src: &Region) -> Result<()> {
        check_copy(dst, src)?;
        let data = bytes(src, |b| b.to_vec());
        self.write(dst, &data)
    }
}

type Kept = (Pipeline, Vec<Region>, Params);

#[derive(Debug)]
struct Recorded {
    fault: Fault,
    launches: Vec<Kept>,
}

impl Encoder for Recorded {
    fn launch(&mut self, batch: &[Launch<'_>]) -> Result<()> {
        self.launches.extend(batch.iter().map(|l| (l.pipeline().clone(), l.operands().to_vec(), *l.params())));
        Ok(())
    }

    fn write(&mut self, _dst: &Region, _bytes: &[u8]) -> Result<()> {
        unreachable!("the suite captures launches only")
    }

    fn copy(&mut self, _dst: &Region, _src: &Region) -> Result<()> {
        unreachable!("the suite captures launches only")
    }
}

impl Graph for Recorded {
    fn replay(&self) -> Result<Ticket> {
        self.launches.iter().for_each(|(pipeline, operands, params)| kernel(self.fault, pipeline, operands, params));
        Ok(Ticket(1))
    }
}

#[test]
fn loops_that_keep_to_the_contract_pass() {
    let report = smoke(&Naive::new(Fault::None));
    assert!(report.passed(), "{report}");
    assert!(report.elements_checked > 10_000 && report.ignored.is_empty());
    assert!(report.worst_error_over_bound > 0.0 && report.worst_error_over_bound <= 1.0);
}

#[test]
fn the_smoke_cases_find_each_way_of_computing_wrong() {
    for fault in [
        Fault::RankRoundedUp,
        Fault::LastInputDropped,
        Fault::ScaleOfSlotZero,
        Fault::RowScaleIgnored,
        Fault::SkippedRowAddsZero,
        Fault::RoundedTwice,
        Fault::Truncated,
        Fault::WritesPadding,
        Fault::SiteOffsetIgnored,
        Fault::NeighbourLost,
        Fault::VectorsIgnored,
        Fault::OffsetNotByRow,
        Fault::GainOfYAlone,
    ] {
        let report = smoke(&Naive::new(fault));
        assert!(!report.passed(), "{fault:?} went unnoticed");
    }
}

#[test]
fn the_whole_suite_passes_on_loops_and_finds_what_the_smoke_cases_can_not() {
    let all = trials();
    let naive = Naive::new(Fault::None);
    // The naive backend is slow: the large cases are for real ones.
    let large = ["70000", "tokens=35000", "tokens=1050000", "151937", "12288", "4864", "3696", "896"];
    let small = |t: &&Trial| !large.iter().any(|n| t.name().contains(n));
    for trial in all.iter().filter(small) {
        let mut report = Report::new(naive.caps());
        report.add(trial.name(), trial.run(&naive));
        assert!(report.passed(), "{report}");
    }
    for (fault, part) in [
        (Fault::LargeWindow, "window="),
        (Fault::TablesTrusted, "hostile"),
        (Fault::VectorsPastSpan, "short_span"),
        (Fault::GainMinusOneOfInfinity, "gain of 1"),
        (Fault::XRowsIgnored, "gather="),
        (Fault::XRowsTrusted, "gather="),
        (Fault::XRowsFromTheLaunch, "gather="),
        (Fault::ExpertsTrusted, "expert_rows[in order,tokens=33"),
        (Fault::SlotsTrusted, "expert_rows[by tokens,tokens=33"),
        (Fault::TilesAcrossGroups, "one slot"),
        (Fault::OldTilesStay, "expert_rows[sorted,tokens=33"),
        (Fault::LastExpertLost, "expert_rows[in order,tokens=33"),
        (Fault::SumDependsOnSlot, "any slot"),
        (Fault::SumDependsOnRows, "row alone"),
        (Fault::OverlayOfSlotZero, "overlay_embed["),
        (Fault::OverlayOfSlotZero, "overlay_logits["),
        (Fault::OverlayOfSlotZero, "embed_shrink["),
        (Fault::LastIdMissed, "overlay_embed["),
        (Fault::CountIgnored, "overlay_embed["),
        (Fault::CountIgnored, "overlay_logits["),
        (Fault::IdWraps, "embed_shrink["),
        (Fault::LogitsAdded, "overlay_logits["),
        (Fault::ReplacedRowsScaled, "overlay_embed["),
    ] {
        let found = |trial: &Trial| match trial.run(&Naive::new(fault)) {
            Ok(Outcome::Checked(check)) => !check.passed(),
            _ => false,
        };
        assert!(all.iter().filter(|t| t.name().contains(part)).any(found), "{fault:?} went unnoticed");
    }
}
