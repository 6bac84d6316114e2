//! Launches of the kernels for compute capability 9.0 (`kernels-cuda/sm90.cuh`): their grids, and their start before
//! the end of the launch before.
//!
//! Such a kernel reads batch, tables and weights at once, and waits for the launch before only then. So its launch
//! may be told to start early where it directly follows another launch of ours, unless one of those that may still
//! run writes what it reads early.

use crate::backend::Launch;
use crate::contract::{Access, Kernel, Pack, Params, THREADS};
use crate::memory::Region;

/// Blocks of a cluster, which split the columns of A.
const CLUSTER: u32 = 8;
/// Most warps of a block of the decode shrink.
pub(super) const SHRINK_WARPS: u32 = 16;
/// Columns that a warp of the decode shrink takes at a time: 4 chunks of 32.
const CHUNK: u32 = 32;
const CHUNKS: u32 = 4;
/// Ranks that one product takes.
const RANKS: u32 = 16;
/// Outputs by ranks that a warp of an expand takes at a time: 128 by 16, 64 by 32, or 32 by 64.
const OUTPUTS: u32 = 128;
/// Most packs that have blocks of their own.
const PACKS: u32 = 64;
/// Tiles that a block of a prefill kernel takes.
const TILES: u32 = 4;

/// A launch's blocks, threads of each, and parameters.
pub(super) struct Shape {
    pub(super) groups: [u32; 3],
    pub(super) threads: u32,
    pub(super) params: Params,
}

/// How `launch` is made on a device of `max_groups`.
pub(super) fn shape(launch: &Launch<'_>, max_groups: [u32; 2]) -> Shape {
    let mut params = *launch.params();
    let kernel = launch.pipeline().kernel();
    let blocks = params.max_rank.div_ceil(RANKS);
    let outputs = OUTPUTS >> blocks.saturating_sub(1).min(2);
    let parts = params.max_out.div_ceil(outputs).div_ceil(THREADS / 32);
    let quads = params.tiles.div_ceil(TILES);
    let clusters = |wanted: u32| wanted.min(max_groups[0] / CLUSTER) * CLUSTER;
    if matches!(kernel, Kernel::BgmvShrink | Kernel::BgmvExpand) {
        let words = launch.operands()[0].len() / 4;
        // The tiles' place is free in these kernels: the number of packs.
        params.tiles = match params.packs_at {
            0 => params.rows,
            at => (words.saturating_sub(at.into()) * 4 / size_of::<Pack>() as u64).min(u32::MAX.into()) as u32,
        };
    }
    // A batch of many rows seldom has as many packs: blocks take several where it does.
    let turns = params.tiles.min(PACKS);
    let (groups, threads) = match kernel {
        Kernel::BgmvShrink => {
            // By the columns alone: the order of a sum must not depend on anything else.
            let chunks = params.in_features.div_ceil(CHUNK);
            let warps = chunks.div_ceil(CLUSTER * CHUNKS).clamp(1, SHRINK_WARPS);
            ([clusters(turns), blocks, params.sites], warps * 32)
        }
        Kernel::BgmvExpand => ([parts, turns, params.sites], THREADS),
        // Up to rank 16 a cluster takes 16 ranks, else 32.
        Kernel::SgmvShrink => ([clusters(quads), blocks.div_ceil(blocks.clamp(1, 2)), params.sites], THREADS),
        Kernel::SgmvExpand => ([parts, quads.min(max_groups[1]), params.sites], THREADS),
        Kernel::EmbedShrink | Kernel::OverlayEmbed | Kernel::OverlayLogits | Kernel::ExpertRows => {
            unreachable!("kernels without this variant")
        }
    };
    Shape { groups, threads, params }
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

    #[test]
    fn a_shrink_has_warps_by_its_columns_alone_and_a_cluster_for_each_row_or_pack() {
        let operands: Vec<Region> = (1..6).map(memory).collect();
        let shrink = pipeline(Kernel::BgmvShrink);
        for (columns, warps) in [(1, 1), (1024, 1), (1025, 2), (4096, 4), (14336, 14), (65536, 16)] {
            for rows in [1, 5] {
                let params = Params { rows, ..params(columns, 8, 33) };
                let shape = shape(&Launch::new(&shrink, &operands, params).unwrap(), [1 << 31, 65_535]);
                assert_eq!((shape.threads, shape.groups), (warps * 32, [8 * rows, 3, 1]), "{columns} columns");
            }
        }
        let packed = Params { packs_at: 40, ..params(64, 8, 16) };
        let mut operands = operands;
        operands[0] = operands[0].slice(0, 160 + 3 * 48).unwrap();
        let shape = shape(&Launch::new(&shrink, &operands, packed).unwrap(), [1 << 31, 65_535]);
        assert_eq!((shape.params.tiles, shape.groups[0]), (3, 24));
    }

    #[test]
    fn an_expand_s_warps_cover_all_outputs_whatever_the_rank() {
        let operands: Vec<Region> = (1..6).map(memory).collect();
        let expand = pipeline(Kernel::BgmvExpand);
        for (max_rank, blocks) in [(1, 8), (16, 8), (17, 16), (32, 16), (33, 32), (512, 32)] {
            let launch = Launch::new(&expand, &operands, params(8, 4096, max_rank)).unwrap();
            assert_eq!(shape(&launch, [1 << 31, 65_535]).groups, [blocks, 5, 1], "rank {max_rank}");
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
