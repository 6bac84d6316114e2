//! Recording: a list of checked commands, sent to a stream when the recording has succeeded.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUfunc_st, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig, CUstream,
};

use super::driver::{Handle, check};
use super::memory::{Chunk, Memory};
use super::module::Function;
use super::variant::Variant;

use super::queue::Shared;
use super::sm90::{self, Chain, Shape, Start};
use super::{routed, sm90a};
use crate::backend::{Encoder, Launch, check_copy, check_write};
use crate::contract::{MAX_OPERANDS, Params, THREADS};
use crate::error::{Error, Result};
use crate::memory::{Allocation, Region};

/// What a stream is to do.
#[derive(Debug, Default)]
pub(super) struct Commands {
    pub(super) list: List,
    /// Staging memory that the list's writes read.
    pub(super) chunks: Vec<Chunk>,
}

impl Commands {
    /// Forgets the list; the staging memory stays.
    pub(super) fn clear(&mut self) {
        self.list.commands.clear();
        self.list.launches.clear();
        self.list.owners.clear();
    }
}

/// Commands in order.
#[derive(Debug, Default)]
pub(super) struct List {
    commands: Vec<Command>,
    launches: Vec<Resolved>,
    /// Every allocation that a command touches.
    pub(super) owners: Vec<Arc<dyn Allocation>>,
}

#[derive(Debug)]
enum Command {
    /// The launch of that number.
    Launch(usize),
    Write {
        to: u64,
        from: Handle<u8>,
        len: usize,
    },
    Copy {
        to: u64,
        from: u64,
        len: usize,
    },
}

/// A launch as the driver takes it.
#[derive(Debug)]
struct Resolved {
    function: Handle<CUfunc_st>,
    groups: [u32; 3],
    threads: u32,
    /// Bytes of shared memory.
    shared: u32,
    /// Whether it may start before the launch before it has ended.
    early: bool,
    /// Addresses of the operands; absent ones are 0.
    operands: [u64; MAX_OPERANDS],
    /// Operands that the kernel declares.
    declared: usize,
    params: Params,
}

impl List {
    /// Sends the commands to `stream`, whose context is current. Allocates nothing and waits for nothing.
    pub(super) fn enqueue(&self, stream: CUstream) -> Result<()> {
        for command in &self.commands {
            match command {
                Command::Launch(launch) => self.launches[*launch].enqueue(stream)?,
                // SAFETY: `check_write` found room at `to`; `from` points at `len` bytes of a chunk that stays as
                // it is until the work is done. `owners` keeps the memory until all is sent, and what is
                // dropped after that is freed after the work.
                Command::Write { to, from, len } => check("cuMemcpyHtoDAsync", unsafe {
                    sys::cuMemcpyHtoDAsync_v2(*to, from.0.cast_const().cast(), *len, stream)
                })?,
                Command::Copy { to, from, len } => check(
                    "cuMemcpyDtoDAsync",
                    // SAFETY: `check_copy` found both regions as long as that and apart; they are kept as above.
                    unsafe { sys::cuMemcpyDtoDAsync_v2(*to, *from, *len, stream) },
                )?,
            }
        }
        Ok(())
    }
}

impl Resolved {
    fn enqueue(&self, stream: CUstream) -> Result<()> {
        let mut arguments = [std::ptr::null_mut::<c_void>(); MAX_OPERANDS + 1];
        for (argument, operand) in arguments.iter_mut().zip(&self.operands[..self.declared]) {
            *argument = std::ptr::from_ref(operand).cast_mut().cast();
        }
        arguments[self.declared] = std::ptr::from_ref(&self.params).cast_mut().cast();
        let [x, y, z] = self.groups;
        // A kernel that was made for it, after another launch: `Chain`.
        let mut attribute = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            hStream: stream,
            attrs: &mut attribute,
            numAttrs: self.early.into(),
        };
        // SAFETY: the kernel takes `declared` addresses and then Params, as `arguments` points at; the driver
        // copies them before it returns and writes none. Launch::new found every operand as large as a kernel
        // that keeps to the contract needs, and aligned; the encoder found them of this backend. They are
        // kept as in `List::enqueue`.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&config, self.function.0, arguments.as_mut_ptr(), std::ptr::null_mut())
        })
    }
}

/// Records into a command list. Dropping it without [`CudaEncoder::finish`] sends nothing.
#[derive(Debug)]
pub(super) struct CudaEncoder<'a> {
    shared: &'a Shared,
    commands: Option<Commands>,
    chain: Chain,
    /// Why writes can't be recorded, if so.
    no_writes: Option<&'static str>,
}

impl<'a> CudaEncoder<'a> {
    /// Nothing recorded yet.
    pub(super) fn new(shared: &'a Shared, no_writes: Option<&'static str>) -> Self {
        Self { shared, commands: Some(shared.commands()), chain: Chain::default(), no_writes }
    }

    /// What was recorded; to be given to [`Shared::recycle`] afterwards.
    pub(super) fn finish(mut self) -> Commands {
        self.commands.take().unwrap_or_default()
    }

    fn commands(&mut self) -> &mut Commands {
        self.commands.get_or_insert_default()
    }

    /// Copies bytes to staging memory and gives their address there.
    fn stage(&mut self, bytes: &[u8]) -> Result<*const u8> {
        let shared = self.shared;
        let chunks = &mut self.commands().chunks;
        if let Some(at) = chunks.last_mut().and_then(|chunk| chunk.push(bytes)) {
            return Ok(at);
        }
        let mut chunk = shared.chunk(bytes.len())?;
        let at = chunk.push(bytes);
        chunks.push(chunk);
        at.ok_or(Error::OutOfBounds { offset: 0, len: bytes.len() as u64, available: 0 })
    }
}

impl Drop for CudaEncoder<'_> {
    fn drop(&mut self) {
        if let Some(commands) = self.commands.take() {
            self.shared.recycle(commands);
        }
    }
}

impl Encoder for CudaEncoder<'_> {
    fn launch(&mut self, batch: &[Launch<'_>]) -> Result<()> {
        for launch in batch {
            let (pipeline, operands) = (launch.pipeline(), launch.operands());
            let function = match pipeline.inner::<Function>() {
                Some(function) if function.backend == self.shared.id => function,
                _ => return Err(Error::shape("pipeline", "a kernel of another backend", "a kernel of this one")),
            };
            let mut addresses = [0; MAX_OPERANDS];
            for (i, region) in operands.iter().enumerate() {
                Memory::check(region, self.shared)?;
                addresses[i] = region.ptr().0;
            }
            let max_groups = self.shared.device.caps.max_groups;
            let (variant, entry) = function.serves(pipeline.kernel(), launch.params());
            let mut shape = match variant {
                Variant::Sm90 if pipeline.kernel().is_pair() => sm90::shape(launch, self.shared.device.room),
                Variant::Sm90a => sm90a::shape(launch, function.clusters),
                Variant::Routed => routed::shape(launch, self.shared.device.room),
                // Kernels that apply no pairs have the contract's workgroups in any variant.
                Variant::Plain | Variant::Sm90 => {
                    Shape { groups: launch.groups(max_groups)?, threads: THREADS, shared: 0, params: *launch.params() }
                }
            };
            if shape.groups.contains(&0) {
                continue;
            }
            let able = variant != Variant::Plain && self.shared.device.early_launches;
            let Start { early, ahead } = self.chain.link(launch, able);
            if variant != Variant::Plain {
                shape.read_ahead(pipeline.kernel(), ahead);
            }
            let Shape { groups, threads, shared, params } = shape;
            let declared = pipeline.kernel().operands().len();
            let list = &mut self.commands().list;
            list.commands.push(Command::Launch(list.launches.len()));
            list.launches.push(Resolved {
                function: entry,
                groups,
                threads,
                shared,
                early,
                operands: addresses,
                declared,
                params,
            });
            list.owners.extend(operands.iter().map(|region| region.owner().clone()));
        }
        Ok(())
    }

    fn write(&mut self, dst: &Region, bytes: &[u8]) -> Result<()> {
        check_write(dst, bytes)?;
        Memory::check(dst, self.shared)?;
        if let Some(why) = self.no_writes {
            return Err(Error::Input(why.into()));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let from = Handle(self.stage(bytes)?.cast_mut());
        self.chain.cut();
        let list = &mut self.commands().list;
        list.commands.push(Command::Write { to: dst.ptr().0, from, len: bytes.len() });
        list.owners.push(dst.owner().clone());
        Ok(())
    }

    fn copy(&mut self, dst: &Region, src: &Region) -> Result<()> {
        check_copy(dst, src)?;
        Memory::check(dst, self.shared)?;
        Memory::check(src, self.shared)?;
        if dst.is_empty() {
            return Ok(());
        }
        self.chain.cut();
        let list = &mut self.commands().list;
        list.commands.push(Command::Copy { to: dst.ptr().0, from: src.ptr().0, len: dst.len() as usize });
        list.owners.extend([dst.owner().clone(), src.owner().clone()]);
        Ok(())
    }
}
