//! Recording into a command buffer, with the memory that its launches and writes need.

#![allow(unsafe_code)]

use std::sync::Arc;

use ash::vk;
use bytemuck::{Pod, Zeroable};

use super::device::Device;
use super::driver;
use super::memory::{Arena, Buffer};
use super::module::Loaded;
use super::queue::Shared;
use crate::backend::{Encoder, Launch, check_copy, check_write};
use crate::contract::{MAX_OPERANDS, Params, STRIDE_ALIGN};
use crate::error::{Error, Result};
use crate::memory::{Allocation, Region};

/// Bytes of a write that one piece of staging memory takes.
const STAGED: usize = 16 << 20;
/// Transfers without a barrier between them, at most: their ranges are compared one by one.
const UNORDERED: usize = 32;

/// What a launch's push constant points at: `Envelope` of `contract.glsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Envelope {
    operand: [u64; MAX_OPERANDS],
    params: Params,
}

const _: () = assert!(std::mem::offset_of!(Envelope, params) == 8 * MAX_OPERANDS);

/// A command buffer with a pool of its own, so that threads record at once, and its arena.
#[derive(Debug)]
pub(super) struct Frame {
    pool: vk::CommandPool,
    pub(super) commands: vk::CommandBuffer,
    pub(super) arena: Arena,
    hazards: Hazards,
}

impl Frame {
    pub(super) fn new(device: &Device) -> Result<Self> {
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(device.queue_family);
        // SAFETY: `info` is complete; the device has a queue of this family.
        let pool = unsafe { device.raw.create_command_pool(&info, None) }.map_err(driver("vkCreateCommandPool"))?;
        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(pool)
            .level(vk::CommandBufferLevel::PRIMARY)
            .command_buffer_count(1);
        // SAFETY: `pool` was just made on this device and is used by no one else.
        match unsafe { device.raw.allocate_command_buffers(&info) } {
            Ok(commands) => {
                Ok(Self { pool, commands: commands[0], arena: Arena::default(), hazards: Hazards::default() })
            }
            Err(error) => {
                // SAFETY: nothing was made from it.
                unsafe { device.raw.destroy_command_pool(pool, None) };
                Err(driver("vkAllocateCommandBuffers")(error))
            }
        }
    }

    /// Begins the command buffer and gives an encoder for it; `keep` collects what the work touches.
    pub(super) fn encode<'a>(
        &'a mut self,
        shared: &'a Arc<Shared>,
        usage: vk::CommandBufferUsageFlags,
        keep: Option<&'a mut Owners>,
    ) -> Result<VulkanEncoder<'a>> {
        let info = vk::CommandBufferBeginInfo::default().flags(usage);
        // SAFETY: the command buffer is new or was reset.
        unsafe { shared.device.raw.begin_command_buffer(self.commands, &info) }
            .map_err(driver("vkBeginCommandBuffer"))?;
        Ok(VulkanEncoder::new(shared, self.commands, &mut self.arena, &mut self.hazards, keep))
    }

    pub(super) fn end(&mut self, device: &Device) -> Result<()> {
        // SAFETY: the command buffer was begun by `encode`.
        unsafe { device.raw.end_command_buffer(self.commands) }.map_err(driver("vkEndCommandBuffer"))
    }

    /// Makes it ready to be recorded again.
    ///
    /// # Safety
    /// - No submission of it may still run.
    pub(super) unsafe fn reset(&mut self, shared: &Shared) -> Result<()> {
        // SAFETY: by the contract of this function.
        unsafe {
            self.arena.rewind(shared);
            shared.device.raw.reset_command_pool(self.pool, vk::CommandPoolResetFlags::empty())
        }
        .map_err(driver("vkResetCommandPool"))
    }

    /// # Safety
    /// - No submission of it may still run.
    pub(super) unsafe fn destroy(self, shared: &Shared) {
        // SAFETY: by the contract of this function; the pool frees its command buffer.
        unsafe {
            shared.device.raw.destroy_command_pool(self.pool, None);
            self.arena.destroy(shared);
        }
    }
}

/// Allocations that recorded work touches, each once.
pub(super) type Owners = std::collections::HashMap<usize, Arc<dyn Allocation>>;

/// Which memory the commands since the last barrier touch.
#[derive(Debug, Default)]
pub(super) struct Hazards {
    /// A launch: it may touch anything.
    everything: bool,
    written: Vec<(vk::Buffer, u64, u64)>,
    read: Vec<(vk::Buffer, u64, u64)>,
}

impl Hazards {
    fn clear(&mut self, everything: bool) {
        self.everything = everything;
        self.written.clear();
        self.read.clear();
    }

    fn meet(list: &[(vk::Buffer, u64, u64)], range: (vk::Buffer, u64, u64)) -> bool {
        list.iter().any(|other| other.0 == range.0 && other.1 < range.2 && range.1 < other.2)
    }

    /// Whether a launch needs a barrier before it.
    fn before_launch(&self) -> bool {
        self.everything || !self.written.is_empty() || !self.read.is_empty()
    }

    /// Whether a transfer needs a barrier before it.
    fn before_transfer(&self, dst: (vk::Buffer, u64, u64), src: Option<(vk::Buffer, u64, u64)>) -> bool {
        self.everything
            || self.written.len() >= UNORDERED
            || Self::meet(&self.written, dst)
            || Self::meet(&self.read, dst)
            || src.is_some_and(|src| Self::meet(&self.written, src))
    }
}

/// Records into one command buffer.
pub(super) struct VulkanEncoder<'a> {
    shared: &'a Arc<Shared>,
    commands: vk::CommandBuffer,
    arena: &'a mut Arena,
    hazards: &'a mut Hazards,
    keep: Option<&'a mut Owners>,
    bound: vk::Pipeline,
}

impl<'a> VulkanEncoder<'a> {
    /// `commands` must be in the recording state, outside a render pass.
    pub(super) fn new(
        shared: &'a Arc<Shared>,
        commands: vk::CommandBuffer,
        arena: &'a mut Arena,
        hazards: &'a mut Hazards,
        keep: Option<&'a mut Owners>,
    ) -> Self {
        // The first call waits for everything that was submitted earlier.
        hazards.clear(true);
        Self { shared, commands, arena, hazards, keep, bound: vk::Pipeline::null() }
    }

    /// Orders all that came before in front of all that follows.
    fn barrier(&mut self) {
        let source = vk::PipelineStageFlags::ALL_COMMANDS;
        let work = vk::PipelineStageFlags::COMPUTE_SHADER | vk::PipelineStageFlags::TRANSFER;
        let barrier = vk::MemoryBarrier::default().src_access_mask(vk::AccessFlags::MEMORY_WRITE).dst_access_mask(
            vk::AccessFlags::SHADER_READ
                | vk::AccessFlags::SHADER_WRITE
                | vk::AccessFlags::TRANSFER_READ
                | vk::AccessFlags::TRANSFER_WRITE,
        );
        self.raw_barrier(source, work, barrier);
        self.hazards.clear(false);
    }

    /// Makes the results visible to whatever the host's command buffer does next.
    pub(super) fn release(&mut self) {
        let work = vk::PipelineStageFlags::COMPUTE_SHADER | vk::PipelineStageFlags::TRANSFER;
        let barrier = vk::MemoryBarrier::default()
            .src_access_mask(vk::AccessFlags::SHADER_WRITE | vk::AccessFlags::TRANSFER_WRITE)
            .dst_access_mask(vk::AccessFlags::MEMORY_READ | vk::AccessFlags::MEMORY_WRITE);
        self.raw_barrier(work, vk::PipelineStageFlags::ALL_COMMANDS, barrier);
    }

    /// Makes what a transfer wrote visible to the host, once the work is done.
    pub(super) fn release_to_host(&mut self) {
        let barrier = vk::MemoryBarrier::default()
            .src_access_mask(vk::AccessFlags::TRANSFER_WRITE)
            .dst_access_mask(vk::AccessFlags::HOST_READ);
        self.raw_barrier(vk::PipelineStageFlags::TRANSFER, vk::PipelineStageFlags::HOST, barrier);
    }

    fn raw_barrier(
        &mut self,
        before: vk::PipelineStageFlags,
        after: vk::PipelineStageFlags,
        barrier: vk::MemoryBarrier<'_>,
    ) {
        let none = vk::DependencyFlags::empty();
        // SAFETY: `commands` is recording, outside a render pass.
        unsafe {
            self.shared.device.raw.cmd_pipeline_barrier(self.commands, before, after, none, &[barrier], &[], &[]);
        }
    }

    /// Copies between buffers; both must hold the ranges.
    pub(super) fn transfer(&mut self, dst: (vk::Buffer, u64), src: (vk::Buffer, u64), size: u64) {
        let written = (dst.0, dst.1, dst.1 + size);
        let read = (src.0, src.1, src.1 + size);
        if self.hazards.before_transfer(written, Some(read)) {
            self.barrier();
        }
        self.hazards.written.push(written);
        self.hazards.read.push(read);
        let copy = vk::BufferCopy { src_offset: src.1, dst_offset: dst.1, size };
        // SAFETY: `commands` is recording; regions are bounds-checked, so both ranges are inside their buffers,
        // which outlive the work: the queue frees nothing that an open recording or unfinished work may name.
        unsafe { self.shared.device.raw.cmd_copy_buffer(self.commands, src.0, dst.0, &[copy]) };
    }

    /// Sets `len` bytes of a buffer to zero; `len` is a multiple of 4.
    pub(super) fn clear(&mut self, buffer: vk::Buffer, len: u64) {
        let written = (buffer, 0, len);
        if self.hazards.before_transfer(written, None) {
            self.barrier();
        }
        self.hazards.written.push(written);
        // SAFETY: `commands` is recording; the caller's buffer holds `len` bytes.
        unsafe { self.shared.device.raw.cmd_fill_buffer(self.commands, buffer, 0, len, 0) };
    }

    fn touch(&mut self, region: &Region) {
        if let Some(keep) = &mut self.keep {
            let owner = region.owner();
            keep.entry(Arc::as_ptr(owner).addr()).or_insert_with(|| owner.clone());
        }
    }

    fn dispatch(&mut self, launch: &Launch<'_>, pipeline: vk::Pipeline, groups: [u32; 3]) -> Result<()> {
        let mut envelope = Envelope { operand: [0; MAX_OPERANDS], params: *launch.params() };
        for (address, region) in envelope.operand.iter_mut().zip(launch.operands()) {
            *address = region.ptr().0;
        }
        let piece = self.arena.push(self.shared, bytemuck::bytes_of(&envelope))?;
        let device = &self.shared.device.raw;
        // SAFETY: `commands` is recording; pipeline and layout belong to this device and live as long as it;
        // the push constant is the layout's one range. The kernel keeps to the contract, so `Launch::new` has
        // shown that it stays inside the operands, which outlive the work (see `transfer`); `groups` are within
        // the device's limits.
        unsafe {
            if self.bound != pipeline {
                device.cmd_bind_pipeline(self.commands, vk::PipelineBindPoint::COMPUTE, pipeline);
                self.bound = pipeline;
            }
            let push = piece.address.to_ne_bytes();
            device.cmd_push_constants(self.commands, self.shared.layout, vk::ShaderStageFlags::COMPUTE, 0, &push);
            device.cmd_dispatch(self.commands, groups[0], groups[1], groups[2]);
        }
        Ok(())
    }
}

/// What the kernels rely on beyond [`Launch::new`]: weights come 16 bytes at a time.
fn check_stride(launch: &Launch<'_>) -> Result<()> {
    let params = launch.params();
    let (name, stride) = match launch.pipeline().kernel() {
        kernel if kernel.is_shrink() => ("a_stride", params.a_stride),
        kernel if kernel.is_expand() => ("b_stride", params.b_stride),
        _ => return Ok(()),
    };
    if !stride.is_multiple_of(STRIDE_ALIGN) {
        return Err(Error::shape(name, stride, format!("a multiple of {STRIDE_ALIGN}")));
    }
    Ok(())
}

impl Encoder for VulkanEncoder<'_> {
    fn launch(&mut self, batch: &[Launch<'_>]) -> Result<()> {
        let mut ordered = false;
        for launch in batch {
            let groups = launch.groups(self.shared.caps.max_groups)?;
            let pipeline = Loaded::of(launch.pipeline(), self.shared)?;
            check_stride(launch)?;
            for region in launch.operands() {
                Buffer::of(region, self.shared)?;
                self.touch(region);
            }
            if groups.contains(&0) {
                continue;
            }
            if !ordered && self.hazards.before_launch() {
                self.barrier();
            }
            ordered = true;
            self.dispatch(launch, pipeline, groups)?;
        }
        if ordered {
            self.hazards.everything = true;
        }
        Ok(())
    }

    fn write(&mut self, dst: &Region, bytes: &[u8]) -> Result<()> {
        check_write(dst, bytes)?;
        let buffer = Buffer::of(dst, self.shared)?;
        self.touch(dst);
        let mut at = dst.offset();
        for part in bytes.chunks(STAGED) {
            let piece = self.arena.push(self.shared, part)?;
            self.transfer((buffer.buffer, at), (piece.buffer, piece.offset), part.len() as u64);
            at += part.len() as u64;
        }
        Ok(())
    }

    fn copy(&mut self, dst: &Region, src: &Region) -> Result<()> {
        check_copy(dst, src)?;
        let (to, from) = (Buffer::of(dst, self.shared)?, Buffer::of(src, self.shared)?);
        self.touch(dst);
        self.touch(src);
        if !dst.is_empty() {
            self.transfer((to.buffer, dst.offset()), (from.buffer, src.offset()), dst.len());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use vk::Handle;

    use super::*;

    fn range(buffer: u64, start: u64, end: u64) -> (vk::Buffer, u64, u64) {
        (vk::Buffer::from_raw(buffer), start, end)
    }

    #[test]
    fn transfers_wait_only_for_what_touches_their_bytes() {
        let mut hazards = Hazards::default();
        assert!(!hazards.before_transfer(range(1, 0, 8), None));
        hazards.written.push(range(1, 0, 8));
        hazards.read.push(range(2, 0, 8));
        assert!(!hazards.before_transfer(range(1, 8, 16), Some(range(2, 0, 8))), "reads don't wait for reads");
        assert!(hazards.before_transfer(range(1, 4, 12), None), "write after write");
        assert!(hazards.before_transfer(range(2, 7, 9), None), "write after read");
        assert!(hazards.before_transfer(range(3, 0, 8), Some(range(1, 7, 15))), "read after write");
        assert!(hazards.before_launch(), "a launch may touch anything");
        hazards.clear(true);
        assert!(hazards.before_transfer(range(9, 0, 1), None), "after a launch everything waits");
        hazards.clear(false);
        assert!(!hazards.before_launch());
    }
}
