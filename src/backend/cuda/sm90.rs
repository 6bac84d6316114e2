//! Launches of the kernels for compute capability 9.0 (`kernels-cuda/sm90.cuh`): their grids, and their start before
//! the end of the launch before.
//!
//! Such a kernel reads batch, tables and weights at once, and waits for the launch before only then. So its launch
//! may be told to start early where it directly follows another launch of ours, unless one of those that may still
//! run writes what it reads early.

use crate::backend::Launch;
use crate::contract::{Access, Kernel, Pack, Params, THREADS, Z_PARTS};
use crate::memory::Region;

/// Ranks that one product takes.
const RANKS: u32 = 16;

/// Blocks of a cluster of the prefill shrink, which split the columns of A, and most tiles that it takes at a time.
const CLUSTER: u32 = 8;
/// Threads and bytes of shared memory of its blocks, and how many fit on a multiprocessor.
const PREFILL_SHRINK: (u32, u32) = (256, 109_696);
const SHRINKS_RESIDENT: u32 = 2;
/// Warps of a block of the prefill expand that work, beside one that fetches; blocks that fit on a multiprocessor.
const PREFILL_WARPS: u32 = 7;
const EXPANDS_RESIDENT: u32 = 2;
/// Bytes that such a block needs beside its rings and its places for B.
const PREFILL_OWN: u32 = 3_840;

/// Warps of a block of the decode shrink, and of the decode expand.
const SHRINK_WARPS: u32 = 8;
const EXPAND_WARPS: u32 = 4;
/// Columns that a block of the decode shrink takes at a time.
const STEP_COLUMNS: u32 = 1024;
/// Items of the decode shrink that come on a multiprocessor before a second block works there. Fewer end sooner in one, with
/// room for the next launch beside it. The kernels count again, by the packs in use.
const BUSY_ITEMS: u64 = 6;
/// Outputs of a tile of the decode expand, and tiles that come on a multiprocessor before a second block works there.
const TILE_OUTPUTS: u32 = 64;
const BUSY_TILES: u64 = 31;
/// Bytes of shared memory of a warp's ring in the decode expand: 4 places of 2 KB of B and of 8 rows of a tile's y.
const RING: u32 = 4 * (2048 + 8 * TILE_OUTPUTS * 2);
/// Bytes of 16 ranks of z that a warp keeps there.
const KEPT: u32 = 32 * 24;
/// Percentage of a multiprocessor's memory that the decode kernels have shared. One for both: a change between two launches would
/// keep the second from starting beside the first. The rest is first-level cache, through which the shrink's weights come.
const CARVEOUT: i32 = 44;

/// A launch's blocks, threads of each, bytes of shared memory, and parameters.
pub(super) struct Shape {
    pub(super) groups: [u32; 3],
    pub(super) threads: u32,
    pub(super) shared: u32,
    pub(super) params: Params,
}

/// What a device has room for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) multiprocessors: u32,
    /// Most bytes of shared memory of a block.
    pub(super) shared: u32,
}

/// Threads of a block, and bytes of shared memory that it asks for.
pub(super) fn block(kernel: Kernel, max_rank: u32, room: Room) -> (u32, u32) {
    match kernel {
        Kernel::BgmvShrink => (SHRINK_WARPS * 32, 0),
        Kernel::BgmvExpand => {
            let each = RING + max_rank.div_ceil(RANKS) * KEPT;
            let warps = EXPAND_WARPS.min(room.shared / each);
            (warps * 32, warps * each)
        }
        Kernel::SgmvShrink => PREFILL_SHRINK,
        Kernel::SgmvExpand => {
            let (outputs, chunks) = prefill_block(max_rank);
            // A warp's ring holds a tile of y, and of z where that is kept.
            let ring = outputs * 32 + if max_rank <= 64 { chunks * 1024 } else { 0 };
            let places = if max_rank <= 32 { 4 } else { 2 } * outputs * chunks * RANKS * 2;
            ((PREFILL_WARPS + 1) * 32, PREFILL_OWN + places + PREFILL_WARPS * ring)
        }
        _ => (THREADS, 0),
    }
}

/// Percentage of a multiprocessor's memory that blocks of `kernel` are to share, if it matters.
pub(super) fn carveout(kernel: Kernel) -> Option<i32> {
    match kernel {
        Kernel::BgmvShrink | Kernel::BgmvExpand => Some(CARVEOUT),
        Kernel::SgmvShrink | Kernel::SgmvExpand => Some(100),
        _ => None,
    }
}

/// Outputs that a warp of the prefill expand takes of a tile, and chunks of ranks that B has room for.
fn prefill_block(max_rank: u32) -> (u32, u32) {
    match max_rank {
        0..=16 => (256, 1),
        17..=32 => (128, 2),
        33..=64 => (128, 4),
        65..=256 => (64, max_rank.div_ceil(RANKS)),
        _ => (32, max_rank.div_ceil(RANKS)),
    }
}

/// Parts that the decode shrink leaves a sum over so many columns in.
fn parts(in_features: u32) -> u32 {
    let steps = in_features.div_ceil(STEP_COLUMNS);
    steps.div_ceil(steps.div_ceil(Z_PARTS).max(1))
}

/// Pieces of so many outputs that all sites have together.
pub(super) fn pieces(params: &Params, outputs: u32) -> u64 {
    params.site[..params.sites as usize].iter().map(|site| u64::from(site.out_features.div_ceil(outputs))).sum()
}

/// Works of so many tiles that the runs of one slot can be cut into at most.
pub(super) fn works(params: &Params, tiles: u32) -> u32 {
    params.tiles.min(params.tiles.div_ceil(tiles).saturating_add(params.slot_count))
}

impl Shape {
    /// Tells the prefill kernels whether x and y may be read before the launch before has ended ([`Start::ahead`]).
    pub(super) fn read_ahead(&mut self, kernel: Kernel, ahead: bool) {
        if matches!(kernel, Kernel::SgmvShrink | Kernel::SgmvExpand) {
            // The parts' place is free in these kernels.
            self.params.z_parts = ahead.into();
        }
    }
}

/// How `launch` is made on a device of `room`.
pub(super) fn shape(launch: &Launch<'_>, room: Room) -> Shape {
    let mut params = *launch.params();
    let kernel = launch.pipeline().kernel();
    let blocks = params.max_rank.div_ceil(RANKS);
    if matches!(kernel, Kernel::BgmvShrink | Kernel::BgmvExpand) {
        // Two places are free in these kernels. The parts': blocks that work while packs in use are few. The tiles': the number of
        // packs. Without packs each row is one.
        params.z_parts = room.multiprocessors;
        params.tiles = match params.packs_at {
            0 => params.rows,
            // The launch's check was that the batch reaches there.
            at => ((launch.operands()[0].len() - 4 * u64::from(at)) / size_of::<Pack>() as u64) as u32,
        };
    }
    let multiprocessors = u64::from(room.multiprocessors);
    // Of the packs that there is room for, no more are in use than the pool's slots make of the rows.
    let packs = match params.packs_at {
        0 => params.tiles.into(),
        _ => u64::from(params.tiles.min(Pack::most(params.rows, params.slots))),
    };
    // One block a multiprocessor until so many items come on each, then two.
    let blocks_of = |items: u64, busy: u64| {
        let beside = if items > busy * multiprocessors { 2 } else { 1 };
        [items.min(beside * multiprocessors) as u32, 1, 1]
    };
    let groups = match kernel {
        Kernel::BgmvShrink => {
            let of_pack = u64::from(parts(params.in_features)) * u64::from(blocks) * u64::from(params.sites);
            blocks_of(packs * of_pack, BUSY_ITEMS)
        }
        Kernel::BgmvExpand => blocks_of(packs * pieces(&params, TILE_OUTPUTS), BUSY_TILES),
        // As many clusters as fit at once, or as there can be works.
        Kernel::SgmvShrink => {
            let resident = (room.multiprocessors * SHRINKS_RESIDENT / CLUSTER).max(1);
            [works(&params, CLUSTER).min(resident) * CLUSTER, 1, 1]
        }
        Kernel::SgmvExpand => {
            let items = u64::from(params.tiles) * pieces(&params, prefill_block(params.max_rank).0);
            [items.min((room.multiprocessors * EXPANDS_RESIDENT).into()) as u32, 1, 1]
        }
        _ => unreachable!("kernels without this variant"),
    };
    let (threads, shared) = block(kernel, params.max_rank, room);
    Shape { groups, threads, shared, params }
}

/// What the launches that may still run write: those since the last one that waited for all before it.
#[derive(Debug, Default)]
pub(super) struct Chain {
    written: Vec<Region>,
    /// Whether the last command is a launch.
    open: bool,
}

/// How a launch follows the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Start {
    /// Whether it may start before that has ended.
    pub(super) early: bool,
    /// Whether no launch that may still run then writes activations that it reads (x, or y before it is added to).
    pub(super) ahead: bool,
}

impl Chain {
    /// Another command than a launch: the launch after it waits for all before.
    pub(super) fn cut(&mut self) {
        self.written.clear();
        self.open = false;
    }

    /// Takes a launch in, and tells how it may start. `able`: its kernel waits for itself.
    pub(super) fn link(&mut self, launch: &Launch<'_>, able: bool) -> Start {
        let (operands, kernel) = (launch.operands(), launch.pipeline().kernel());
        let unwritten =
            |read: &[Region]| !self.written.iter().any(|w| read.iter().any(|region| region.same_allocation(w)));
        // A kernel that applies no pairs waits before it reads anything.
        let early = able && self.open && (!kernel.is_pair() || unwritten(&operands[..3]));
        // x, or what lies behind z.
        let activations = if kernel.is_expand() { operands.get(4..) } else { operands.get(3..4) };
        let ahead = !early || unwritten(activations.unwrap_or_default());
        // Prefill kernels, and those without pairs, let the next launch start only when the one before them has ended, but for a
        // shrink that reads x at once: that waits only before it writes z.
        let ended = kernel == Kernel::SgmvExpand || (kernel == Kernel::SgmvShrink && !ahead) || !kernel.is_pair();
        if !early || ended {
            self.written.clear();
        }
        for (operand, region) in kernel.operands().iter().zip(operands) {
            if operand.access == Access::Write && !self.written.iter().any(|known| known.same_allocation(region)) {
                self.written.push(region.clone());
            }
        }
        self.open = true;
        Start { early, ahead }
    }
}

#[cfg(test)]
mod tests {
    use std::any::Any;
    use std::sync::Arc;

    use super::*;
    use crate::backend::Pipeline;
    use crate::contract::{SiteParams, Spec};
    use crate::dtype::DType;
    use crate::memory::{Allocation, DevicePtr};
    use crate::pool::Capacity;

    #[derive(Debug)]
    struct Memory;

    impl Allocation for Memory {
        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    fn memory(at: u64) -> Region {
        Region::new(DevicePtr(at << 32), 1 << 24, Arc::new(Memory))
    }

    fn pipeline(kernel: Kernel) -> Pipeline {
        Pipeline::new(kernel, Spec { act: DType::Bf16, weight: DType::Bf16 }, Arc::new(()))
    }

    fn params(in_features: u32, out_features: u32, max_rank: u32) -> Params {
        let mut params = Params {
            rows: 5,
            slots: 1,
            slot_count: 1,
            sites: 1,
            in_features,
            x_stride: in_features,
            a_stride: in_features.next_multiple_of(8),
            b_stride: max_rank.next_multiple_of(8),
            z_stride: max_rank,
            max_rank,
            max_out: out_features,
            ..Params::default()
        };
        params.site[0] = SiteParams { out_features, y_stride: out_features, span: u32::MAX, ..SiteParams::default() };
        params
    }

    const H200: Room = Room { multiprocessors: 132, shared: 227 << 10 };

    /// Blocks of a launch with `packs` packs.
    fn groups(kernel: Kernel, params: Params, packs: u32) -> [u32; 3] {
        let capacity = Capacity { rows: 999, tiles: 7, packs };
        let mut operands: Vec<Region> = (1..6).map(memory).collect();
        operands[0] = operands[0].slice(0, capacity.bytes()).unwrap();
        let pipeline = pipeline(kernel);
        let (rows, packs_at) = (capacity.rows, capacity.packs_at());
        let params = Params { rows, slots: 999, packs_at, z_parts: Z_PARTS, ..params };
        let shape = shape(&Launch::new(&pipeline, &operands, params).unwrap(), H200);
        assert_eq!(shape.params.tiles, packs);
        shape.groups
    }

    #[test]
    fn a_decode_shrink_has_parts_by_its_columns_alone_and_no_more_blocks_than_items_or_its_share_of_the_device() {
        for (columns, wanted) in [(1, 1), (1024, 1), (1025, 2), (4096, 4), (8192, 8), (8193, 5), (14336, 7), (65536, 8)]
        {
            assert_eq!(parts(columns), wanted, "{columns} columns");
            assert!(parts(columns) <= Z_PARTS);
        }
        assert_eq!(groups(Kernel::BgmvShrink, params(4096, 8, 33), 3), [4 * 3 * 3, 1, 1]);
        assert_eq!(groups(Kernel::BgmvShrink, params(4096, 8, 16), 198), [132, 1, 1]);
        assert_eq!(groups(Kernel::BgmvShrink, params(4096, 8, 16), 199), [264, 1, 1]);
    }

    #[test]
    fn a_decode_expand_has_no_more_blocks_than_tiles_or_its_share_of_the_device_and_keeps_z_by_the_largest_rank() {
        assert_eq!(groups(Kernel::BgmvExpand, params(8, 4097, 16), 1), [65, 1, 1]);
        assert_eq!(groups(Kernel::BgmvExpand, params(8, 4097, 16), 62), [132, 1, 1]);
        assert_eq!(groups(Kernel::BgmvExpand, params(8, 4097, 16), 63), [264, 1, 1]);
        let kept = |max_rank| block(Kernel::BgmvExpand, max_rank, H200).1 - EXPAND_WARPS * RING;
        assert_eq!([1, 16, 17, 64].map(kept), [1, 1, 2, 4].map(|groups| EXPAND_WARPS * groups * KEPT));
    }

    #[test]
    fn a_decode_launch_has_no_blocks_for_packs_that_its_rows_and_slots_cannot_make() {
        let mut operands: Vec<Region> = (1..6).map(memory).collect();
        operands[0] = operands[0].slice(0, 160 + 256 * size_of::<Pack>() as u64).unwrap();
        let pipeline = pipeline(Kernel::BgmvShrink);
        let of = |rows, slots| {
            let params = Params { rows, slots, packs_at: 40, z_parts: Z_PARTS, ..params(4096, 8, 16) };
            shape(&Launch::new(&pipeline, &operands, params).unwrap(), H200).groups
        };
        assert_eq!(of(17, 3), [(3 + 14 / 8) * 4, 1, 1]);
        assert_eq!(of(17, 999), [17 * 4, 1, 1]);
    }

    #[test]
    fn without_packs_each_row_of_a_decode_launch_is_one() {
        let operands: Vec<Region> = (1..6).map(memory).collect();
        let pipeline = pipeline(Kernel::BgmvShrink);
        let launch = Launch::new(&pipeline, &operands, Params { z_parts: Z_PARTS, ..params(4096, 8, 16) }).unwrap();
        let shape = shape(&launch, H200);
        assert_eq!((shape.params.tiles, shape.groups), (5, [5 * 4, 1, 1]));
    }

    #[test]
    fn a_decode_expand_of_many_ranks_fits_with_fewer_warps() {
        for (limit, max_rank) in [(227 << 10, 512), (99 << 10, 512), (48 << 10, 512), (48 << 10, 16)] {
            let (threads, shared) = block(Kernel::BgmvExpand, max_rank, Room { shared: limit, ..H200 });
            assert!(threads >= 32 && shared <= limit, "{threads} threads, {shared} bytes");
        }
    }

    #[test]
    fn a_launch_starts_early_only_after_a_launch_and_when_no_running_one_writes_what_it_reads_early() {
        let regions: Vec<Region> = (1..8).map(memory).collect();
        let (shrink, expand) = (pipeline(Kernel::BgmvShrink), pipeline(Kernel::BgmvExpand));
        let [batch, tables, weights, x, z, y, other] = &regions[..] else { unreachable!() };
        let a = [batch, tables, weights, x, z].map(Clone::clone);
        let b = [batch, tables, weights, z, y].map(Clone::clone);
        let odd = [batch, tables, y, x, other].map(Clone::clone);
        let params = params(64, 64, 16);
        let shrinks = |operands| Launch::new(&shrink, operands, params).unwrap();
        let early = |chain: &mut Chain, launch: &Launch<'_>, able| chain.link(launch, able).early;
        let mut chain = Chain::default();
        assert!(!early(&mut chain, &shrinks(&a), true), "nothing before it in the list");
        assert!(early(&mut chain, &Launch::new(&expand, &b, params).unwrap(), true));
        assert!(early(&mut chain, &shrinks(&a), true));
        assert!(!early(&mut chain, &shrinks(&odd), true), "its weights are an output of a launch that may still run");
        assert!(early(&mut chain, &shrinks(&odd), true), "that launch has been waited for");
        assert!(!early(&mut chain, &shrinks(&a), false), "a kernel that doesn't wait by itself");
        chain.cut();
        assert!(!early(&mut chain, &shrinks(&a), true), "after a write or copy");
    }

    #[test]
    fn a_kernel_without_pairs_starts_early_whatever_is_written_and_what_reads_its_batch_waits_for_it() {
        let regions: Vec<Region> = (1..8).map(memory).collect();
        let [batch, experts, rows, tables, weights, x, z] = &regions[..] else { unreachable!() };
        let make = pipeline(Kernel::ExpertRows);
        let routing = Params { rows: 4, experts: 1, top_k: 1, slot_stride: 1, ..Params::default() };
        let made = [batch, experts, rows].map(Clone::clone);
        let shrink = pipeline(Kernel::BgmvShrink);
        let a = [rows, tables, weights, x, z].map(Clone::clone);
        let mut chain = Chain::default();
        let early = |chain: &mut Chain, launch: &Launch<'_>| chain.link(launch, true).early;
        let shrinks = Launch::new(&shrink, &a, params(64, 64, 16)).unwrap();
        let makes = Launch::new(&make, &made, routing).unwrap();
        assert!(!early(&mut chain, &shrinks), "nothing before it in the list");
        assert!(early(&mut chain, &makes));
        assert!(!early(&mut chain, &shrinks), "its batch may still be being made");
        assert!(early(&mut chain, &makes));
        assert!(early(&mut chain, &makes));
    }

    /// Memory that prefill launches name.
    const WEIGHTS: usize = 2;
    const X: usize = 3;
    const Z: usize = 4;
    const Y: usize = 5;
    const W: usize = 6;
    const V: usize = 7;

    /// Links prefill launches one after the other: a kernel, and the memory of its weights, of what it reads and of what it writes.
    fn prefill_chain() -> impl FnMut(Kernel, [usize; 3]) -> Start {
        let regions: Vec<Region> = (1..9).map(memory).collect();
        let mut chain = Chain::default();
        move |kernel, of| {
            let operands = [0, 1, of[0], of[1], of[2]].map(|at| regions[at].clone());
            chain.link(&Launch::new(&pipeline(kernel), &operands, params(64, 64, 16)).unwrap(), true)
        }
    }

    #[test]
    fn activations_are_read_ahead_when_no_running_launch_writes_them_and_prefill_launches_run_two_at_a_time() {
        let (shrink, expand) = (Kernel::SgmvShrink, Kernel::SgmvExpand);
        let mut link = prefill_chain();
        assert_eq!(link(shrink, [WEIGHTS, X, Z]), Start { early: false, ahead: true });
        assert_eq!(link(expand, [WEIGHTS, Z, Y]), Start { early: true, ahead: true });
        assert_eq!(link(shrink, [WEIGHTS, Y, W]), Start { early: true, ahead: false });
        assert_eq!(link(expand, [WEIGHTS, W, V]), Start { early: true, ahead: true });
        // The launch before has waited for the one that writes y.
        assert_eq!(link(expand, [WEIGHTS, Z, Y]), Start { early: true, ahead: true });
        assert_eq!(link(expand, [WEIGHTS, Z, Y]), Start { early: true, ahead: false });
    }

    #[test]
    fn launches_before_a_prefill_shrink_that_reads_x_at_once_may_still_run_after_its_start() {
        let (shrink, expand) = (Kernel::SgmvShrink, Kernel::SgmvExpand);
        let mut link = prefill_chain();
        link(shrink, [WEIGHTS, X, Z]);
        link(expand, [WEIGHTS, Z, Y]);
        assert_eq!(link(shrink, [WEIGHTS, X, Z]), Start { early: true, ahead: true });
        // The expand may still write y, which the shrink after it hasn't waited for.
        assert_eq!(link(shrink, [WEIGHTS, Y, W]), Start { early: true, ahead: false });
        // That one has.
        assert_eq!(link(shrink, [WEIGHTS, Y, W]), Start { early: true, ahead: true });
        link(expand, [WEIGHTS, Z, Y]);
        link(shrink, [WEIGHTS, X, Z]);
        assert_eq!(link(shrink, [Y, X, V]), Start { early: false, ahead: true });
    }

    #[test]
    fn prefill_blocks_fit_on_a_multiprocessor_and_no_more_than_do_are_launched() {
        let kib = 228 * 1024;
        for (kernel, resident) in [(Kernel::SgmvShrink, SHRINKS_RESIDENT), (Kernel::SgmvExpand, EXPANDS_RESIDENT)] {
            for max_rank in 1..=512 {
                let (threads, shared) = block(kernel, max_rank, H200);
                assert!(
                    threads == 256 && resident * (shared + 1024) <= kib,
                    "{kernel:?} of rank {max_rank}: {shared} bytes"
                );
                assert!(shared <= H200.shared);
            }
        }
        let operands: Vec<Region> = (1..6).map(memory).collect();
        let groups = |kernel, tiles| {
            let params = Params { tiles, ..params(4096, 1000, 16) };
            let pipeline = pipeline(kernel);
            shape(&Launch::new(&pipeline, &operands, params).unwrap(), H200).groups
        };
        assert_eq!([0, 1, 9, 4096].map(|tiles| groups(Kernel::SgmvShrink, tiles)[0]), [0, 8, 24, 264]);
        assert_eq!([0, 1, 9, 4096].map(|tiles| groups(Kernel::SgmvExpand, tiles)[0]), [0, 4, 36, 264]);
    }
}
