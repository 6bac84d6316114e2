//! Launches to be, their kernels, and how many rows one of them can take.

use super::{Matrix, Op};
use crate::backend::{Caps, Encoder, GpuBackend, Launch, Pipeline};
use crate::contract::{Kernel, Params, Spec};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::pool::Part;

/// Operands and parameters of a launch to be.
pub(super) type Draft = (Vec<Region>, Params);

/// Records `drafts`, which may run at once.
pub(super) fn launch(encoder: &mut dyn Encoder, pipeline: &Pipeline, drafts: &[Draft]) -> Result<()> {
    let launches: Vec<Launch<'_>> =
        drafts.iter().map(|(operands, params)| Launch::new(pipeline, operands, *params)).collect::<Result<_>>()?;
    encoder.launch(&launches)
}

/// Shrink and expand of both ops.
#[derive(Debug)]
pub(super) struct PairPipelines {
    shrink: [Pipeline; 2],
    expand: [Pipeline; 2],
}

impl PairPipelines {
    /// Compiles them.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(backend: &dyn GpuBackend, spec: Spec) -> Result<Self> {
        let load = |kernel| backend.load(kernel, spec);
        Ok(Self {
            shrink: [load(Kernel::BgmvShrink)?, load(Kernel::SgmvShrink)?],
            expand: [load(Kernel::BgmvExpand)?, load(Kernel::SgmvExpand)?],
        })
    }

    /// The kernel of `op` that reads `part` of a pair.
    pub fn of(&self, part: Part, op: Op) -> &Pipeline {
        let pipelines = if part == Part::A { &self.shrink } else { &self.expand };
        &pipelines[op as usize]
    }
}

/// What a device lets one launch bind.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bindings {
    /// Bytes of an operand beside what lies before it in its binding.
    room: u64,
    /// Bytes that a binding begins at multiples of.
    pub align: u64,
}

impl Bindings {
    pub fn of(caps: &Caps) -> Self {
        // A binding begins at a multiple of the alignment: what lies before the operand counts too.
        let align = caps.binding_align.max(1);
        let room = match caps.max_binding {
            u64::MAX => u64::MAX,
            limited => limited.saturating_sub(align),
        };
        Self { room, align }
    }

    /// Rows, `most` at most, that a launch can have of matrices of elements of `act` and these widths.
    ///
    /// # Errors
    /// [`Error::Limit`] when not even one row fits.
    pub fn rows<'m>(self, matrices: impl Iterator<Item = (&'m Matrix, u32)>, act: DType, most: u64) -> Result<u64> {
        let mut rows = most;
        for (matrix, width) in matrices {
            let first = u64::from(width) * act.size();
            if first > self.room {
                let hint = " (the device's largest binding)";
                return Err(Error::Limit { what: "one row in bytes", found: first, limit: self.room, hint });
            }
            let step = u64::from(matrix.stride()).max(1) * act.size();
            rows = rows.min((self.room - first) / step + 1);
        }
        Ok(rows)
    }
}
