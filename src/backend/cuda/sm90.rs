//! Launches of the kernels for compute capability 9.0 (`kernels-cuda/sm90.cuh`): their grids, and their start before
//! the end of the launch before.
//!
//! Such a kernel reads batch, tables and weights at once, and waits for the launch before only then. So its launch
//! may be told to start early where it directly follows another launch of ours, unless one of those that may still
//! run writes what it reads early.

use crate::backend::Launch;
use crate::contract::{Access, Kernel, Pack, Params, THREADS, Z_PARTS};
use crate::memory::Region;

/// Blocks of a cluster of the prefill shrink, which split the columns of A.
const CLUSTER: u32 = 8;
/// Ranks that one product takes.
const RANKS: u32 = 16;
/// Outputs by ranks that a warp of the prefill expand takes at a time: 128 by 16, 64 by 32, or 32 by 64.
const OUTPUTS: u32 = 128;
/// Tiles that a block of a prefill kernel takes.
const TILES: u32 = 4;

/// Warps of a block of the decode kernels, which work each by itself.
const SHRINK_WARPS: u32 = 4;
const EXPAND_WARPS: u32 = 8;
/// Columns that a stage of the decode shrink holds, and the fewest stages of a part.
const STAGE_COLUMNS: u32 = 256;
const PART_STAGES: u32 = 2;
/// Outputs of a tile of the decode expand.
const TILE_OUTPUTS: u32 = 64;
/// Bytes of shared memory of a warp's ring: 2 stages of 16 ranks and 8 rows, 4 of 64 outputs and 8 rows of y.
const SHRINK_RING: u32 = 2 * (RANKS + 8) * (STAGE_COLUMNS * 2 + 16);
const EXPAND_RING: u32 = 4 * (TILE_OUTPUTS * RANKS * 2 + 8 * (TILE_OUTPUTS * 2 + 16));
/// Bytes of a chunk of z that a warp keeps, and most chunks.
const KEPT: u32 = 32 * 24;
const KEPT_CHUNKS: u32 = 4;

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

/// Threads of a block, and bytes of shared memory that it asks for. Where there is room, a shrink's and an expand's are
/// together less than a multiprocessor has, so that one fetches weights while the other ends.
pub(super) fn block(kernel: Kernel, max_rank: u32, room: Room) -> (u32, u32) {
    let (warps, each) = match kernel {
        Kernel::BgmvShrink => (SHRINK_WARPS, SHRINK_RING),
        Kernel::BgmvExpand => (EXPAND_WARPS, EXPAND_RING + max_rank.div_ceil(RANKS).min(KEPT_CHUNKS) * KEPT),
        _ => return (THREADS, 0),
    };
    let warps = warps.min(room.shared / each);
    (warps * 32, warps * each)
}

/// Parts that the decode shrink leaves a sum over so many columns in.
fn parts(in_features: u32) -> u32 {
    let stages = in_features.div_ceil(STAGE_COLUMNS);
    stages.div_ceil(stages.div_ceil(Z_PARTS).max(PART_STAGES))
}

/// How `launch` is made on a device of `max_groups` and `room`.
pub(super) fn shape(launch: &Launch<'_>, max_groups: [u32; 2], room: Room) -> Shape {
    let mut params = *launch.params();
    let kernel = launch.pipeline().kernel();
    let blocks = params.max_rank.div_ceil(RANKS);
    let quads = params.tiles.div_ceil(TILES);
    if matches!(kernel, Kernel::BgmvShrink | Kernel::BgmvExpand) {
        let words = launch.operands()[0].len() / 4;
        let packs = words.saturating_sub(params.packs_at.into()) * 4 / size_of::<Pack>() as u64;
        // The tiles' place is free in these kernels: the number of packs.
        params.tiles = packs.min(u32::MAX.into()) as u32;
    }
    // A block for each multiprocessor, or for each item of work where there are fewer.
    let each = |items: u64| [(u64::from(params.tiles) * items).min(room.multiprocessors.into()) as u32, 1, 1];
    let groups = match kernel {
        Kernel::BgmvShrink => each(u64::from(parts(params.in_features)) * u64::from(blocks) * u64::from(params.sites)),
        Kernel::BgmvExpand => {
            let sites = &params.site[..params.sites as usize];
            each(sites.iter().map(|site| u64::from(site.out_features.div_ceil(TILE_OUTPUTS))).sum())
        }
        // Up to rank 16 a cluster takes 16 ranks, else 32.
        Kernel::SgmvShrink => {
            let clusters = quads.min(max_groups[0] / CLUSTER) * CLUSTER;
            [clusters, blocks.div_ceil(blocks.clamp(1, 2)), params.sites]
        }
        Kernel::SgmvExpand => {
            let outputs = OUTPUTS >> blocks.saturating_sub(1).min(2);
            let parts = params.max_out.div_ceil(outputs).div_ceil(THREADS / 32);
            [parts, quads.min(max_groups[1]), params.sites]
        }
        Kernel::EmbedShrink | Kernel::OverlayEmbed | Kernel::OverlayLogits | Kernel::ExpertRows => {
            unreachable!("kernels without this variant")
        }
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

impl Chain {
    /// Another command than a launch: the launch after it waits for all before.
    pub(super) fn cut(&mut self) {
        self.written.clear();
        self.open = false;
    }

    /// Takes a launch in, and tells whether it may start early. `able`: its kernel waits for itself.
    pub(super) fn link(&mut self, launch: &Launch<'_>, able: bool) -> bool {
        let (operands, kernel) = (launch.operands(), launch.pipeline().kernel());
        let early = &operands[..3];
        let safe = |written: &Region| early.iter().all(|read| !read.same_allocation(written));
        let starts = able && self.open && self.written.iter().all(safe);
        if !starts {
            self.written.clear();
        }
        for (operand, region) in kernel.operands().iter().zip(operands) {
            if operand.access == Access::Write && !self.written.iter().any(|known| known.same_allocation(region)) {
                self.written.push(region.clone());
            }
        }
        self.open = true;
        starts
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

    #[derive(Debug)]
    struct Memory;

    impl Allocation for Memory {
        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    fn memory(at: u64) -> Region {
        Region::new(DevicePtr(at << 32), 1 << 20, Arc::new(Memory))
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
    fn groups(kernel: Kernel, params: Params, packs: u64) -> [u32; 3] {
        let mut operands: Vec<Region> = (1..6).map(memory).collect();
        operands[0] = operands[0].slice(0, 160 + packs * size_of::<Pack>() as u64).unwrap();
        let pipeline = pipeline(kernel);
        let launch = Launch::new(&pipeline, &operands, Params { packs_at: 40, z_parts: Z_PARTS, ..params }).unwrap();
        let shape = shape(&launch, [1 << 31, 65_535], H200);
        assert_eq!(u64::from(shape.params.tiles), packs);
        shape.groups
    }

    #[test]
    fn a_decode_shrink_has_parts_by_its_columns_alone_and_no_more_blocks_than_items_or_multiprocessors() {
        for (columns, wanted) in
            [(1, 1), (512, 1), (513, 2), (4096, 8), (8192, 16), (8193, 11), (14336, 14), (65536, 16)]
        {
            assert_eq!(parts(columns), wanted, "{columns} columns");
            assert!(parts(columns) <= Z_PARTS);
        }
        assert_eq!(groups(Kernel::BgmvShrink, params(4096, 8, 33), 3), [8 * 3 * 3, 1, 1]);
        assert_eq!(groups(Kernel::BgmvShrink, params(4096, 8, 33), 300), [132, 1, 1]);
    }

    #[test]
    fn a_decode_expand_has_an_item_for_each_64_outputs_and_keeps_z_by_the_largest_rank() {
        assert_eq!(groups(Kernel::BgmvExpand, params(8, 4097, 16), 1), [65, 1, 1]);
        assert_eq!(groups(Kernel::BgmvExpand, params(8, 4097, 16), 5), [132, 1, 1]);
        let kept = |max_rank| block(Kernel::BgmvExpand, max_rank, H200).1 - EXPAND_WARPS * EXPAND_RING;
        assert_eq!([1, 16, 17, 64, 512].map(kept), [1, 1, 2, 4, 4].map(|chunks| EXPAND_WARPS * chunks * KEPT));
    }

    #[test]
    fn a_shrink_and_an_expand_fit_beside_each_other_and_into_less_with_fewer_warps() {
        let shared = |kernel, room| block(kernel, 512, room).1;
        // 228 KiB a multiprocessor, of which each block takes one for itself.
        let both = shared(Kernel::BgmvShrink, H200) + shared(Kernel::BgmvExpand, H200);
        assert!(both + 2 * 1024 <= 228 * 1024, "{both}");
        for limit in [48 << 10, 99 << 10] {
            let room = Room { shared: limit, ..H200 };
            for kernel in [Kernel::BgmvShrink, Kernel::BgmvExpand] {
                let (threads, shared) = block(kernel, 512, room);
                assert!(threads >= 32 && shared <= limit, "{threads} threads, {shared} bytes");
            }
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
        let mut chain = Chain::default();
        assert!(!chain.link(&shrinks(&a), true), "nothing before it in the list");
        assert!(chain.link(&Launch::new(&expand, &b, params).unwrap(), true));
        assert!(chain.link(&shrinks(&a), true));
        assert!(!chain.link(&shrinks(&odd), true), "its weights are an output of a launch that may still run");
        assert!(chain.link(&shrinks(&odd), true), "that launch has been waited for");
        assert!(!chain.link(&shrinks(&a), false), "a kernel that doesn't wait by itself");
        chain.cut();
        assert!(!chain.link(&shrinks(&a), true), "after a write or copy");
    }
}
