//! Recording: launches become bind groups and envelopes, writes become staged copies.
//!
//! A record is a list first ([`Plan`]), and goes into a command encoder as a whole: into our own and at
//! once, into a graph's again and again, or into the host's. So nothing is sent when a record fails.
//!
//! Within a compute pass every dispatch is a usage scope of its own: WebGPU orders it after the
//! dispatches before it and makes their writes visible. Consecutive launches share a pass therefore.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::graph::{Op, Plan};
use super::memory::{GRAIN, Memory, Stage};
use super::module::{ENVELOPE, Module};
use super::{Inner, scoped};
use crate::backend::{Encoder, Launch, check_copy, check_write};
use crate::contract::{Access, MAX_OPERANDS, Operand};
use crate::error::{Error, Result};
use crate::memory::Region;

/// Bind groups of operands that were made before. Keyed by buffer and range, not by launch: parameters
/// are in the envelope, so that a site's launches share one group whatever the batch.
#[derive(Debug, Default)]
pub(super) struct Bindings(Mutex<HashMap<Key, wgpu::BindGroup>>);

/// Entries before the cache starts over; a step has about 10^3 launches.
const BINDINGS_MAX: usize = 1 << 14;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    operands: &'static [Operand],
    /// Buffer number, first byte, bytes. Absent operands are zeros.
    ranges: [(u32, u32, u32); MAX_OPERANDS],
}

impl Bindings {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, wgpu::BindGroup>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the groups that keep buffer `number` alive.
    pub(super) fn forget(&self, number: u32) {
        self.lock().retain(|key, _| key.ranges.iter().all(|(n, ..)| *n != number));
    }
}

/// An operand as the device sees it.
#[derive(Clone, Copy)]
struct Binding<'a> {
    memory: &'a Memory,
    start: u64,
    size: u64,
    /// Bytes from `start` to the operand's first.
    origin: u32,
}

impl Binding<'_> {
    fn end(&self) -> u64 {
        self.start + self.size
    }
}

/// An [`Encoder`] that fills a [`Plan`].
pub(super) struct Recorder<'a> {
    inner: &'a Inner,
    pub(super) plan: Plan,
    pub(super) stage: Stage<'a>,
}

impl<'a> Recorder<'a> {
    /// `keep`: written bytes stay with the plan, instead of passing through the staging ring.
    pub(super) fn new(inner: &'a Inner, keep: bool) -> Self {
        Self { inner, plan: Plan::new(inner.envelope_stride), stage: Stage::new(inner, !keep) }
    }

    fn launch_one(&mut self, launch: &Launch<'_>) -> Result<()> {
        let inner = self.inner;
        let groups = launch.groups(inner.caps.max_groups)?;
        if groups.contains(&0) {
            return Ok(());
        }
        let pipeline = match launch.pipeline().inner::<Module>() {
            Some(module) if std::sync::Arc::ptr_eq(&module.home, &inner.bindings) => &module.pipeline,
            _ => {
                let found = format!("{:?} of another device", launch.pipeline());
                return Err(Error::shape("pipeline", found, format!("one of {}", inner.caps.device)));
            }
        };
        let bindings = inner.resolve(launch)?;
        let mut origins = [0u32; MAX_OPERANDS];
        bindings.iter().zip(&mut origins).for_each(|(binding, origin)| *origin = binding.origin);
        let operands = inner.bind_group(launch, &bindings)?;
        self.plan.launch(pipeline.clone(), operands, groups, launch.params(), &origins);
        Ok(())
    }
}

impl Encoder for Recorder<'_> {
    fn launch(&mut self, batch: &[Launch<'_>]) -> Result<()> {
        batch.iter().try_for_each(|launch| self.launch_one(launch))
    }

    fn write(&mut self, dst: &Region, bytes: &[u8]) -> Result<()> {
        check_write(dst, bytes)?;
        let buffer = &self.inner.memory(dst)?.buffer;
        let mut at = dst.offset();
        let ops = &mut self.plan.ops;
        self.stage.put(bytes, |piece| {
            ops.push(Op::Copy {
                src: piece.buffer,
                src_offset: piece.offset,
                dst: buffer.clone(),
                dst_offset: at,
                len: piece.len,
            });
            at += piece.len;
        })
    }

    fn copy(&mut self, dst: &Region, src: &Region) -> Result<()> {
        check_copy(dst, src)?;
        let (to, from) = (&self.inner.memory(dst)?.buffer, &self.inner.memory(src)?.buffer);
        let mut copy = |src: &wgpu::Buffer, src_offset, dst: &wgpu::Buffer, dst_offset, len| {
            self.plan.ops.push(Op::Copy { src: src.clone(), src_offset, dst: dst.clone(), dst_offset, len });
        };
        if dst.is_empty() {
            return Ok(());
        }
        if to != from {
            copy(from, src.offset(), to, dst.offset(), dst.len());
            return Ok(());
        }
        // WebGPU refuses a copy inside one buffer: by way of another.
        let (bounce, room) = (self.inner.bounce()?, super::BOUNCE);
        for at in (0..dst.len()).step_by(room as usize) {
            let len = room.min(dst.len() - at);
            copy(from, src.offset() + at, bounce, 0, len);
            copy(bounce, 0, to, dst.offset() + at, len);
        }
        Ok(())
    }
}

impl Inner {
    /// The bindings of a launch's operands, checked against what WebGPU allows in one dispatch.
    fn resolve<'l>(&self, launch: &Launch<'l>) -> Result<Vec<Binding<'l>>> {
        let kernel = launch.pipeline().kernel();
        let list = kernel.operands();
        let mut bindings = Vec::with_capacity(MAX_OPERANDS);
        for (index, region) in launch.operands().iter().enumerate() {
            bindings.push(self.bind(launch, index, region)?);
        }
        for (i, written) in bindings.iter().enumerate().filter(|(i, _)| list[*i].access == Access::Write) {
            for (j, other) in bindings.iter().enumerate().filter(|(j, _)| *j != i) {
                if written.memory.buffer != other.memory.buffer {
                    continue;
                }
                let what = format!("operands {} and {} of {}", list[i].name, list[j].name, kernel.name());
                if list[j].access == Access::Read {
                    return Err(Error::shape(
                        what,
                        "one allocation",
                        "separate allocations: WebGPU can't read and write one buffer in one dispatch",
                    ));
                }
                if written.start < other.end() && other.start < written.end() {
                    return Err(Error::shape(
                        what,
                        format!(
                            "bindings {}..{} and {}..{} of one allocation, which overlap",
                            written.start,
                            written.end(),
                            other.start,
                            other.end()
                        ),
                        format!("separate bindings, which begin at multiples of {} bytes", self.caps.binding_align),
                    ));
                }
            }
        }
        Ok(bindings)
    }

    /// One operand: bindings begin at the device's alignment, and the rest is the operand's origin.
    fn bind<'l>(&self, launch: &Launch<'l>, index: usize, region: &'l Region) -> Result<Binding<'l>> {
        let (kernel, spec) = (launch.pipeline().kernel(), launch.pipeline().spec());
        let operand = kernel.operands()[index];
        let memory = self.memory(region)?;
        // An empty region may lie at the buffer's very end; a binding holds something.
        let start = region.offset().min(memory.buffer.size() - GRAIN) & !(self.caps.binding_align - 1);
        let size = |len: u64| (region.offset() + len - start).max(1).next_multiple_of(GRAIN);
        let mut bytes = size(region.len());
        if bytes > self.caps.max_binding && operand.name != "weights" {
            // The launch may need only the beginning of a large region.
            bytes = size(kernel.extents(spec, launch.params())[index]);
        }
        if bytes > self.caps.max_binding {
            let hint = " (a WebGPU device's max_storage_buffer_binding_size)";
            return Err(Error::Limit { what: binding_of(operand), found: bytes, limit: self.caps.max_binding, hint });
        }
        // Buffers are multiples of GRAIN, so the rounded end is inside.
        Ok(Binding { memory, start, size: bytes, origin: (region.offset() - start) as u32 })
    }

    /// The bind group of `bindings`, from the cache where it was made before.
    fn bind_group(&self, launch: &Launch<'_>, bindings: &[Binding<'_>]) -> Result<wgpu::BindGroup> {
        let kernel = launch.pipeline().kernel();
        let mut key = Key { operands: kernel.operands(), ranges: Default::default() };
        for (binding, range) in bindings.iter().zip(&mut key.ranges) {
            *range = (binding.memory.number, binding.start as u32, binding.size as u32);
        }
        if let Some(found) = self.bindings.lock().get(&key) {
            return Ok(found.clone());
        }
        let operands = kernel.operands().len();
        let entries: Vec<_> = (0..operands)
            .map(|index| {
                let (buffer, offset, size) = match bindings.get(index) {
                    Some(binding) => (&binding.memory.buffer, binding.start, binding.size),
                    // No two writable bindings may overlap, absent ones included.
                    None => (&self.absent, index as u64 * self.absent_stride, GRAIN),
                };
                let size = wgpu::BufferSize::new(size);
                wgpu::BindGroupEntry {
                    binding: index as u32,
                    resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer, offset, size }),
                }
            })
            .collect();
        let group = scoped(&self.device, "create_bind_group", || {
            self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(kernel.name()),
                layout: self.modules.operands(kernel),
                entries: &entries,
            })
        })?;
        let mut cache = self.bindings.lock();
        if cache.len() >= BINDINGS_MAX {
            cache.clear();
        }
        cache.insert(key, group.clone());
        Ok(group)
    }

    /// The bind group of envelopes in `buffer`, at dynamic offsets.
    pub(super) fn envelope_group(&self, buffer: &wgpu::Buffer) -> Result<wgpu::BindGroup> {
        scoped(&self.device, "create_bind_group", || {
            self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some("lorapool envelopes"),
                layout: &self.modules.envelope,
                entries: &[wgpu::BindGroupEntry {
                    binding: 0,
                    resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                        buffer,
                        offset: 0,
                        size: wgpu::BufferSize::new(ENVELOPE),
                    }),
                }],
            })
        })
    }
}

/// What [`Error::Limit`] calls the size of an operand's binding.
fn binding_of(operand: Operand) -> &'static str {
    match operand.name {
        "batch" => "size of operand batch",
        "tables" => "size of operand tables",
        "weights" => "size of operand weights",
        "x" => "size of operand x",
        "z" => "size of operand z",
        "y0" => "size of operand y0",
        "y1" => "size of operand y1",
        "y2" => "size of operand y2",
        "y3" => "size of operand y3",
        "experts" => "size of operand experts",
        "tokens" => "size of operand tokens",
        "rows" => "size of operand rows",
        _ => "size of an operand",
    }
}
