//! Recorded work as a list, and lists kept for replay.
//!
//! WebGPU has no reusable command buffer. A graph is the list with everything in it that takes time to
//! make: pipelines, bind groups, envelopes in a uniform buffer of its own, written bytes in buffers of
//! their own. A replay encodes the list anew and allocates nothing else.

use std::sync::Arc;

use super::module::ENVELOPE;
use super::{Inner, scoped};
use crate::backend::{Graph, Ticket};
use crate::contract::{MAX_OPERANDS, Params};
use crate::error::{Error, Result};

/// One recorded command.
#[derive(Debug)]
pub(super) enum Op {
    /// A dispatch, with the number of its envelope.
    Launch { pipeline: wgpu::ComputePipeline, operands: wgpu::BindGroup, envelope: usize, groups: [u32; 3] },
    /// A copy between two different buffers.
    Copy { src: wgpu::Buffer, src_offset: u64, dst: wgpu::Buffer, dst_offset: u64, len: u64 },
}

/// Recorded commands in order, and the envelopes of the launches among them.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) ops: Vec<Op>,
    /// Envelope after envelope, at multiples of `stride`.
    pub(super) envelopes: Vec<u8>,
    stride: u64,
}

/// Launches whose envelopes share a buffer.
pub(super) const PAGE: usize = 256;

/// Where a plan's envelopes lie on the device: bind groups of [`PAGE`] envelopes each.
#[derive(Debug, Default)]
pub(super) struct Pages(pub(super) Vec<wgpu::BindGroup>);

impl Plan {
    pub(super) fn new(stride: u64) -> Self {
        Self { ops: Vec::new(), envelopes: Vec::new(), stride }
    }

    pub(super) fn launch(
        &mut self,
        pipeline: wgpu::ComputePipeline,
        operands: wgpu::BindGroup,
        groups: [u32; 3],
        params: &Params,
        origins: &[u32; MAX_OPERANDS],
    ) {
        let envelope = self.envelopes.len() / self.stride as usize;
        self.envelopes.extend_from_slice(bytemuck::bytes_of(params));
        self.envelopes.extend_from_slice(bytemuck::bytes_of(origins));
        self.envelopes.resize((envelope + 1) * self.stride as usize, 0);
        self.ops.push(Op::Launch { pipeline, operands, envelope, groups });
    }

    /// The envelopes, a page at a time.
    pub(super) fn pages(&self) -> std::slice::Chunks<'_, u8> {
        self.envelopes.chunks(PAGE * self.stride as usize)
    }

    /// Appends the commands to `encoder`. Consecutive launches share a compute pass.
    pub(super) fn encode(&self, encoder: &mut wgpu::CommandEncoder, pages: &Pages) {
        let mut ops = self.ops.iter().peekable();
        while let Some(op) = ops.next() {
            match op {
                Op::Copy { src, src_offset, dst, dst_offset, len } => {
                    encoder.copy_buffer_to_buffer(src, *src_offset, dst, *dst_offset, *len);
                }
                first => {
                    let mut pass = encoder.begin_compute_pass(&Default::default());
                    let mut next = Some(first);
                    while let Some(Op::Launch { pipeline, operands, envelope, groups }) = next {
                        let offset = (envelope % PAGE) as u64 * self.stride;
                        pass.set_pipeline(pipeline);
                        pass.set_bind_group(0, operands, &[]);
                        pass.set_bind_group(1, &pages.0[envelope / PAGE], &[offset as u32]);
                        pass.dispatch_workgroups(groups[0], groups[1], groups[2]);
                        next = ops.next_if(|op| matches!(op, Op::Launch { .. }));
                    }
                }
            }
        }
    }

    /// Puts the envelopes into uniform buffers of the plan's own.
    pub(super) fn own_pages(&self, inner: &Inner) -> Result<Pages> {
        let mut pages = Pages::default();
        for bytes in self.pages() {
            let usage = wgpu::BufferUsages::UNIFORM;
            let buffer = inner.buffer(bytes.len() as u64, usage, true, "lorapool kept envelopes")?;
            buffer
                .get_mapped_range_mut(..)
                .map_err(|error| Error::Driver { call: "get_mapped_range_mut", message: error.to_string() })?
                .copy_from_slice(bytes);
            buffer.unmap();
            pages.0.push(inner.envelope_group(&buffer)?);
        }
        Ok(pages)
    }
}

/// Bytes that one page of envelopes takes on the device.
pub(super) const fn page_size(stride: u64) -> u64 {
    debug_assert!(stride >= ENVELOPE);
    PAGE as u64 * stride
}

/// A plan kept for replay.
#[derive(Debug)]
pub(super) struct WebGpuGraph {
    pub(super) inner: Arc<Inner>,
    pub(super) plan: Plan,
    pub(super) pages: Pages,
}

impl Graph for WebGpuGraph {
    fn replay(&self) -> Result<Ticket> {
        let commands = scoped(&self.inner.device, "replay", || {
            let mut encoder = self.inner.device.create_command_encoder(&Default::default());
            self.plan.encode(&mut encoder, &self.pages);
            encoder.finish()
        })?;
        self.inner.send(commands)
    }
}
