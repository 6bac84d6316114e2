//! Launches of the prefill shrink for routed layers (`kernels-cuda/sgmv_shrink_routed.cu`): thousands of slots in a launch, a few
//! tens of rows for each.

use super::sm90::{Room, Shape};
use crate::backend::Launch;
use crate::contract::{Kernel, Params};

/// Ranks that a block takes at a time, and how often x may be read again for more, or for more sites.
const RANKS: u32 = 16;
const PASSES: u32 = 4;
/// Threads and bytes of shared memory of its blocks, and how many fit on a multiprocessor.
const BLOCK: (u32, u32) = (256, 115_456);
const RESIDENT: u32 = 2;

/// Whether a launch is faster here: of experts, few ranks. Sums have the bits of those of [`sm90`](super::sm90).
pub(super) fn serves(kernel: Kernel, params: &Params) -> bool {
    let passes = params.sites * params.max_rank.div_ceil(RANKS);
    kernel == Kernel::SgmvShrink && params.experts != 0 && passes <= PASSES
}

/// Threads of a block, and bytes of shared memory that it asks for.
pub(super) fn block() -> (u32, u32) {
    BLOCK
}

/// How `launch` is made on a device of `room`: as many blocks as fit at once, or as there can be tiles.
pub(super) fn shape(launch: &Launch<'_>, room: Room) -> Shape {
    let params = *launch.params();
    let (threads, shared) = BLOCK;
    Shape { groups: [params.tiles.min(room.multiprocessors * RESIDENT), 1, 1], threads, shared, params }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_serves_shrinks_of_routed_layers_with_few_ranks_and_no_others() {
        let of = |kernel, experts, sites, max_rank| {
            serves(kernel, &Params { experts, sites, max_rank, ..Params::default() })
        };
        assert!(of(Kernel::SgmvShrink, 40, 1, 64) && of(Kernel::SgmvShrink, 40, 2, 32));
        assert!(!of(Kernel::SgmvShrink, 40, 2, 33) && !of(Kernel::SgmvShrink, 0, 1, 16));
        assert!(!of(Kernel::SgmvExpand, 40, 1, 16) && !of(Kernel::BgmvShrink, 40, 1, 16));
    }
}
