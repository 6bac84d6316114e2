//! Launches of the kernels for compute capability 9.0 alone (`kernels-cuda/wgmma.cuh`): prefill of many ranks, one block a
//! multiprocessor. Sums have the bits of those of [`sm90`](super::sm90), so a launch may take either.

use super::sm90::{Shape, pieces, works};
use crate::backend::Launch;
use crate::contract::{Kernel, Params};

/// Blocks of 8 ranks, of all sites, that the shrink of [`sm90`](super::sm90) takes in one pass over x, and ranks from which on
/// this one is faster for fewer, too, between expands of this kind.
const ONE_PASS: u32 = 12;
const SHRINK_RANKS: u32 = 33;
/// Blocks of a cluster of the shrink, which split the columns of A, and most tiles that it takes at a time.
const CLUSTER: u32 = 8;
const TILES: u32 = 12;
/// Threads and bytes of shared memory of its blocks.
const SHRINK: (u32, u32) = (TILES * 32, 199_808);
/// Ranks whose products limit the expand of [`sm90`](super::sm90), and which this one has room for.
const EXPAND_RANKS: std::ops::RangeInclusive<u32> = 33..=256;
/// Threads of the expand's blocks.
const EXPAND_THREADS: u32 = 288;

/// Whether a launch of `kernel` is faster here.
pub(super) fn serves(kernel: Kernel, params: &Params) -> bool {
    match kernel {
        Kernel::SgmvShrink => params.max_rank >= SHRINK_RANKS || params.sites * params.max_rank.div_ceil(8) > ONE_PASS,
        Kernel::SgmvExpand => EXPAND_RANKS.contains(&params.max_rank),
        _ => false,
    }
}

/// Threads of a block, and bytes of shared memory that it asks for.
pub(super) fn block(kernel: Kernel, max_rank: u32) -> (u32, u32) {
    if kernel == Kernel::SgmvShrink { SHRINK } else { (EXPAND_THREADS, expand(max_rank).1) }
}

/// Outputs that a warp of the expand takes of a tile, and bytes of shared memory of a block: B and z of all ranks have room there.
fn expand(max_rank: u32) -> (u32, u32) {
    match max_rank {
        0..=64 => (256, 167_936),
        65..=128 => (64, 118_784),
        _ => (64, 217_088),
    }
}

/// Blocks of a cluster.
pub(super) fn cluster(kernel: Kernel) -> u32 {
    if kernel == Kernel::SgmvShrink { CLUSTER } else { 1 }
}

/// How `launch` is made on a device where so many clusters of its kernel fit at once.
pub(super) fn shape(launch: &Launch<'_>, clusters: u32) -> Shape {
    let params = *launch.params();
    let kernel = launch.pipeline().kernel();
    let items = match kernel {
        Kernel::SgmvShrink => works(&params, TILES).into(),
        _ => u64::from(params.tiles) * pieces(&params, expand(params.max_rank).0),
    };
    let (threads, shared) = block(kernel, params.max_rank);
    let groups = [items.min(clusters.into()) as u32 * cluster(kernel), 1, 1];
    Shape { groups, threads, shared, params }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shrink_of_one_pass_and_an_expand_of_few_or_many_ranks_are_left_to_the_other_kernels() {
        let of = |kernel, sites, max_rank| serves(kernel, &Params { sites, max_rank, ..Params::default() });
        assert_eq!([(1, 32), (3, 32), (4, 24)].map(|(sites, rank)| of(Kernel::SgmvShrink, sites, rank)), [false; 3]);
        assert_eq!([(1, 33), (4, 25), (4, 512)].map(|(sites, rank)| of(Kernel::SgmvShrink, sites, rank)), [true; 3]);
        assert_eq!([32, 33, 256, 257].map(|rank| of(Kernel::SgmvExpand, 2, rank)), [false, true, true, false]);
        assert!(!of(Kernel::BgmvShrink, 4, 512) && !of(Kernel::BgmvExpand, 1, 64));
    }
}
