//! The kernels: what a launch says, resolved, and handed to the loops.

use fearless_simd::Level;

use super::expand::Expand;
use super::job::{self, Job, Rows};
use super::memory::Bytes;
use super::shrink::Shrink;
use super::{bgmv, expert_rows, sgmv, simd, tokens};
use crate::contract::{Kernel, Params, RowRef, SGMV_TILE_ROWS, Spec, Tile};

/// A kernel with its element types: all that there is to compile.
#[derive(Clone, Copy, Debug)]
pub(super) struct CpuKernel {
    pub(super) kernel: Kernel,
    pub(super) spec: Spec,
}

/// A launch with its read operands at hand.
#[derive(Clone, Copy)]
pub(super) struct Launched<'a> {
    pub(super) level: Level,
    pub(super) kernel: CpuKernel,
    pub(super) params: &'a Params,
    pub(super) batch: &'a [u32],
    pub(super) tables: &'a [u32],
    pub(super) weights: &'a [u8],
    pub(super) weights_address: u64,
}

impl Launched<'_> {
    /// The batch's entry of a row of this launch.
    pub(super) fn row(&self, row: usize) -> RowRef {
        let at = 2 * (self.params.row_first as usize + row);
        RowRef { slot: self.batch[at] as i32, scale: f32::from_bits(self.batch[at + 1]) }
    }

    /// The row of x that a row of this launch reads; `None`: zeros.
    pub(super) fn x_row(&self, row: usize) -> Option<usize> {
        if self.params.x_rows_at == 0 {
            return Some(row);
        }
        let at = self.params.x_rows_at as usize + self.params.row_first as usize + row;
        Some(self.batch[at]).filter(|x_row| *x_row < self.params.x_rows).map(|x_row| x_row as usize)
    }

    /// The batch's tiles.
    pub(super) fn tiles(&self) -> impl Iterator<Item = Tile> {
        let words = self.batch[self.params.tiles_at as usize..].as_chunks::<4>().0;
        words[..self.params.tiles as usize].iter().map(|w| bytemuck::cast(*w))
    }

    /// `slot` as an index, if it is in the launch's window.
    pub(super) fn slot(&self, slot: i32) -> Option<usize> {
        let slot = u32::try_from(slot).ok()?;
        let (first, count) = (self.params.slot_first, self.params.slot_count);
        (slot >= first && slot - first < count).then_some(slot as usize)
    }
}

impl CpuKernel {
    /// Multiply-adds that a launch takes at most.
    pub(super) fn work(self, params: &Params) -> u64 {
        let rows = match self.kernel {
            Kernel::EmbedShrink | Kernel::OverlayEmbed => return params.rows.into(),
            Kernel::BgmvShrink | Kernel::BgmvExpand | Kernel::OverlayLogits => params.rows,
            Kernel::SgmvShrink | Kernel::SgmvExpand => params.rows.min(params.tiles.saturating_mul(SGMV_TILE_ROWS)),
            // A few operations a row.
            Kernel::ExpertRows | Kernel::ExpertTiles => return params.rows.into(),
        };
        let sites = &params.site[..params.sites as usize];
        let widths =
            sites.iter().map(|site| if self.kernel.is_expand() { site.out_features } else { params.in_features });
        let columns: u64 = widths.map(u64::from).sum();
        u64::from(rows).saturating_mul(params.max_rank.into()).saturating_mul(columns)
    }

    /// Does a launch that [`Launch::new`](crate::backend::Launch::new) has checked.
    pub(super) fn run(self, params: &Params, operands: &mut [Bytes<'_>], grain: u64) {
        match self.kernel {
            Kernel::ExpertRows => return expert_rows::rows(params, operands),
            Kernel::ExpertTiles => return expert_rows::tiles(params, operands),
            _ => {}
        }
        let extents = self.kernel.extents(self.spec, params);
        let (inputs, outputs) = operands.split_at_mut(4);
        let input = |i: usize| &inputs[i].get()[..extents[i] as usize];
        let launched = Launched {
            level: simd::level(),
            kernel: self,
            params,
            batch: bytemuck::cast_slice(input(0)),
            tables: bytemuck::cast_slice(input(1)),
            weights: inputs[2].get(),
            weights_address: u64::from(params.weights_lo) | u64::from(params.weights_hi) << 32,
        };
        let runs = match self.kernel {
            Kernel::BgmvShrink | Kernel::BgmvExpand => bgmv::runs(&launched),
            Kernel::EmbedShrink | Kernel::OverlayEmbed | Kernel::OverlayLogits => {
                return tokens::run(&launched, input(3), &mut outputs[0], extents[4] as usize, grain);
            }
            _ => sgmv::runs(&launched),
        };
        for site in &params.site[..params.sites as usize] {
            let jobs: Vec<Job<'_>> = runs.iter().filter_map(|run| Job::resolve(&launched, site, *run)).collect();
            if jobs.is_empty() {
                continue;
            }
            if self.kernel.is_expand() {
                let element = self.spec.act.size() as usize;
                let y = site.y_operand as usize;
                let bytes = &mut outputs[y].get_mut()[..extents[4 + y] as usize];
                let bytes = &mut bytes[site.y_offset as usize * element..];
                let out = Rows { bytes, stride: site.y_stride as usize * element, element };
                let expand = Expand { launched: &launched, site, z: bytemuck::cast_slice(input(3)) };
                job::run(&expand, &jobs, out, grain);
            } else {
                let bytes = &mut outputs[0].get_mut()[..extents[4] as usize];
                let bytes = &mut bytes[site.z_offset as usize * 4..];
                let out = Rows { bytes, stride: params.z_stride as usize * 4, element: 4 };
                job::run(&Shrink { launched: &launched, x: input(3) }, &jobs, out, grain);
            }
        }
    }
}
