//! Recording: operations kept as data until the record closure has succeeded.

use super::memory::{Want, borrow, owner};
use super::module::CpuKernel;
use crate::backend::{Encoder, Launch, check_copy, check_write};
use crate::contract::{Access, Params};
use crate::error::{Error, Result};
use crate::memory::Region;

/// Recorded work. It keeps the regions that it touches alive.
#[derive(Debug, Default)]
pub(super) struct Recording {
    ops: Vec<Op>,
}

#[derive(Debug)]
enum Op {
    Launch { kernel: CpuKernel, operands: Vec<Region>, params: Box<Params> },
    Write { dst: Region, bytes: Box<[u8]> },
    Copy { dst: Region, src: Region },
}

impl Recording {
    /// Multiply-adds that the launches may take at most: what decides whether threads pay.
    pub(super) fn work(&self) -> u64 {
        let work = |op: &Op| match op {
            Op::Launch { kernel, params, .. } => kernel.work(params),
            Op::Write { .. } | Op::Copy { .. } => 0,
        };
        self.ops.iter().map(work).fold(0, u64::saturating_add)
    }

    /// Does the work, in order, in pieces of about `grain` multiply-adds; `u64::MAX` keeps it on this thread.
    pub(super) fn run(&self, grain: u64) -> Result<()> {
        self.ops.iter().try_for_each(|op| match op {
            Op::Launch { kernel, operands, params } => {
                let wants: Vec<Want<'_>> = operands
                    .iter()
                    .zip(kernel.kernel.operands())
                    .map(|(region, operand)| Want { region, write: operand.access == Access::Write })
                    .collect();
                borrow(&wants, |bytes| kernel.run(params, bytes, grain))
            }
            Op::Write { dst, bytes } => {
                let dst = dst.slice(0, bytes.len() as u64)?;
                borrow(&[Want { region: &dst, write: true }], |to| to[0].get_mut().copy_from_slice(bytes))
            }
            Op::Copy { dst, src } => {
                borrow(&[Want { region: dst, write: true }, Want { region: src, write: false }], |both| {
                    let [dst, src] = both else { unreachable!("two operands were asked for") };
                    dst.get_mut().copy_from_slice(src.get());
                })
            }
        })
    }
}

impl Encoder for Recording {
    fn launch(&mut self, batch: &[Launch<'_>]) -> Result<()> {
        for launch in batch {
            let pipeline = launch.pipeline();
            let Some(kernel) = pipeline.inner::<CpuKernel>() else {
                return Err(Error::shape("pipeline", format!("{pipeline:?}"), "a pipeline of the cpu backend"));
            };
            for (region, operand) in launch.operands().iter().zip(kernel.kernel.operands()) {
                owner(region, operand.name)?;
            }
            self.ops.push(Op::Launch {
                kernel: *kernel,
                operands: launch.operands().to_vec(),
                params: Box::new(*launch.params()),
            });
        }
        Ok(())
    }

    fn write(&mut self, dst: &Region, bytes: &[u8]) -> Result<()> {
        check_write(dst, bytes)?;
        owner(dst, "write")?;
        self.ops.push(Op::Write { dst: dst.clone(), bytes: bytes.into() });
        Ok(())
    }

    fn copy(&mut self, dst: &Region, src: &Region) -> Result<()> {
        check_copy(dst, src)?;
        owner(dst, "copy to")?;
        owner(src, "copy from")?;
        self.ops.push(Op::Copy { dst: dst.clone(), src: src.clone() });
        Ok(())
    }
}
