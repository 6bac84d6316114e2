//! WebGPU through wgpu: on Vulkan, Metal or Direct3D 12, within WebGPU's default limits.
//!
//! What a step costs here is encoding: WebGPU has neither addresses nor reusable command buffers, so each
//! launch sets a bind group (cached) and an offset into a uniform buffer. Blocking waits are all in
//! `Inner::poll`, `Inner::read` and `block_on`, since a browser can't have them.

mod encoder;
mod graph;
mod memory;
mod module;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

pub use module::source;
/// The wgpu that this backend is built on: a host's device must be of the same version.
pub use wgpu;

use self::encoder::{Bindings, Recorder};
use self::graph::{Pages, WebGpuGraph, page_size};
use self::memory::{GRAIN, MAX_BUFFER, Numbers, Staging};
use self::module::{ENVELOPE, Modules};
use super::{Caps, DeviceClass, GpuBackend, Graph, Pipeline, Record, Ticket, WeightLayout};
use crate::contract::{Kernel, MAX_OPERANDS, Spec, THREADS};
use crate::error::{Error, Result};
use crate::memory::Region;

/// How a device is opened.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Exactly these limits; by default WebGPU's own, with the adapter's larger buffers and bindings and
    /// finer alignments.
    pub limits: Option<wgpu::Limits>,
    /// Features to ask for; none is needed.
    pub features: wgpu::Features,
}

/// Devices that this backend can open: wgpu's adapters, in its order, that can run the kernels.
///
/// # Errors
/// [`Error::Unavailable`] when there is none, with what was found instead.
pub fn devices() -> Result<Vec<Caps>> {
    let found = adapters()?;
    Ok(found.iter().map(|adapter| caps(&adapter.get_info(), &default_limits(adapter))).collect())
}

/// Opens device `index` of [`devices`].
///
/// # Errors
/// [`Error::Unavailable`] when there is no such device, or it can't be opened.
pub fn open(index: usize) -> Result<Arc<dyn GpuBackend>> {
    Ok(Arc::new(WebGpuBackend::open(index, &Options::default())?))
}

/// A device of wgpu's, our own or the host's.
#[derive(Clone, Debug)]
pub struct WebGpuBackend {
    inner: Arc<Inner>,
}

impl WebGpuBackend {
    /// Opens device `index` of [`devices`] with the limits and features that `options` says.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when there is no such device, it refuses the limits or features, or the
    /// limits are too low for the kernels.
    pub fn open(index: usize, options: &Options) -> Result<Self> {
        let adapters = adapters()?;
        let count = adapters.len();
        let adapter = adapters
            .into_iter()
            .nth(index)
            .ok_or_else(|| unavailable(format!("no device {index}; there are {count}, counted from 0")))?;
        let limits = options.limits.clone().unwrap_or_else(|| default_limits(&adapter));
        check_limits(&limits)?;
        let request = adapter.request_device(&wgpu::DeviceDescriptor {
            label: Some("lorapool"),
            required_features: options.features,
            required_limits: limits,
            // A pool is one large allocation: blocks kept for later would only take memory from the host.
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            ..Default::default()
        });
        let (device, queue) =
            block_on(request).map_err(|error| unavailable(format!("{}: {error}", adapter.get_info().name)))?;
        // Errors arrive in error scopes. What still gets here (a drop on a lost device, say) must not panic.
        device.on_uncaptured_error(Arc::new(|error| tracing::error!(%error, "wgpu")));
        let lost = Arc::new(OnceLock::new());
        let reason = lost.clone();
        device.set_device_lost_callback(move |why, message| {
            // Only the first reason counts; destroying the device on drop is none.
            if why != wgpu::DeviceLostReason::Destroyed {
                let _ = reason.set(format!("{why:?}: {message}"));
            }
        });
        Self::new(device, queue, lost)
    }

    /// A backend on the host's device and queue. The host keeps both, with its own handlers for errors and
    /// for the loss of the device; this backend catches its own errors in error scopes.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the device's limits are too low for the kernels.
    pub fn adopt(device: wgpu::Device, queue: wgpu::Queue) -> Result<Self> {
        check_limits(&device.limits())?;
        Self::new(device, queue, Arc::default())
    }

    fn new(device: wgpu::Device, queue: wgpu::Queue, lost: Arc<OnceLock<String>>) -> Result<Self> {
        Ok(Self { inner: Arc::new(Inner::new(device, queue, lost)?) })
    }

    /// The host's buffer as a region, of the same bytes. Its usage must have `STORAGE`, and `COPY_SRC` and
    /// `COPY_DST` where it is read, written or copied through this backend. The region keeps it alive.
    ///
    /// # Errors
    /// [`Error::Shape`] when the usage lacks `STORAGE`, or the size is no multiple of 16 bytes or 4 GiB and more.
    pub fn import(&self, buffer: &wgpu::Buffer) -> Result<Region> {
        self.inner.import(buffer)
    }

    /// Records into the host's encoder, between the host's own commands, to run when the host submits it.
    /// No ticket names that work: [`GpuBackend::wait`] doesn't wait for it. Error scopes that the host has
    /// open see errors of the recorded commands.
    ///
    /// # Errors
    /// Those of `record`; nothing is recorded then.
    pub fn encode(&self, encoder: &mut wgpu::CommandEncoder, record: Record<'_>) -> Result<()> {
        let (plan, pages) = self.inner.keep(record)?;
        plan.encode(encoder, &pages);
        Ok(())
    }

    /// The device.
    pub fn device(&self) -> &wgpu::Device {
        &self.inner.device
    }

    /// The queue that [`GpuBackend::submit`] sends to.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.inner.queue
    }

    /// Bytes of host-visible memory that writes pass through; it is reused, and doesn't grow with the
    /// number of submissions.
    pub fn staging_bytes(&self) -> u64 {
        self.inner.staging.total()
    }
}

impl GpuBackend for WebGpuBackend {
    fn caps(&self) -> &Caps {
        &self.inner.caps
    }

    fn alloc(&self, len: u64, label: &str) -> Result<Region> {
        self.inner.alloc(len, label)
    }

    fn load(&self, kernel: Kernel, spec: Spec) -> Result<Pipeline> {
        self.inner.load(kernel, spec)
    }

    fn submit(&self, record: Record<'_>) -> Result<Ticket> {
        self.inner.submit(record)
    }

    fn capture(&self, record: Record<'_>) -> Result<Box<dyn Graph>> {
        let (plan, pages) = self.inner.keep(record)?;
        Ok(Box::new(WebGpuGraph { inner: self.inner.clone(), plan, pages }))
    }

    fn completed(&self) -> Result<Ticket> {
        self.inner.poll(wgpu::PollType::Poll)?;
        Ok(Ticket(self.inner.done.load(Ordering::Acquire)))
    }

    fn wait(&self, ticket: Ticket) -> Result<()> {
        self.inner.wait(ticket)
    }

    fn read(&self, src: &Region) -> Result<Vec<u8>> {
        self.inner.read(src)
    }
}

/// Bytes of the buffer by way of which copies inside one buffer go.
const BOUNCE: u64 = 4 << 20;

/// Everything of one device.
#[derive(Debug)]
struct Inner {
    device: wgpu::Device,
    queue: wgpu::Queue,
    caps: Caps,
    modules: Modules,
    bindings: Arc<Bindings>,
    numbers: Numbers,
    staging: Staging,
    /// Bytes between envelopes, a multiple of the alignment of dynamic offsets.
    envelope_stride: u64,
    /// Envelopes of the submission being sent: written in the queue's order, so that all share them.
    arena: Mutex<Vec<(wgpu::Buffer, wgpu::BindGroup)>>,
    /// Stands in for absent y operands, in ranges of their own.
    absent: wgpu::Buffer,
    absent_stride: u64,
    bounce: OnceLock<wgpu::Buffer>,
    /// The last ticket whose work has finished.
    done: Arc<AtomicU64>,
    sent: Mutex<Sent>,
    /// Why the device was lost, where it was and is our own.
    lost: Arc<OnceLock<String>>,
}

/// Submissions.
#[derive(Debug, Default)]
struct Sent {
    last: u64,
    in_flight: VecDeque<(u64, wgpu::SubmissionIndex)>,
}

impl Inner {
    fn new(device: wgpu::Device, queue: wgpu::Queue, lost: Arc<OnceLock<String>>) -> Result<Self> {
        let limits = device.limits();
        let caps = caps(&device.adapter_info(), &limits);
        let modules = Modules::new(&device)?;
        let absent_stride = caps.binding_align;
        let absent = scoped(&device, "create_buffer", || {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("lorapool absent operands"),
                size: MAX_OPERANDS as u64 * absent_stride,
                usage: wgpu::BufferUsages::STORAGE,
                mapped_at_creation: false,
            })
        })?;
        let envelope_stride = ENVELOPE.next_multiple_of(u64::from(limits.min_uniform_buffer_offset_alignment).max(16));
        Ok(Self {
            device,
            queue,
            caps,
            modules,
            bindings: Arc::default(),
            numbers: Numbers::default(),
            staging: Staging::default(),
            envelope_stride,
            arena: Mutex::default(),
            absent,
            absent_stride,
            bounce: OnceLock::new(),
            done: Arc::default(),
            sent: Mutex::default(),
            lost,
        })
    }

    fn sent(&self) -> MutexGuard<'_, Sent> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn submit(&self, record: Record<'_>) -> Result<Ticket> {
        let mut recorder = Recorder::new(self, false);
        record(&mut recorder)?;
        let Recorder { plan, mut stage, .. } = recorder;
        // Envelopes go ahead of the commands, in the same submission.
        let pages = self.arena_pages(plan.pages().len())?;
        let mut ahead = Vec::new();
        for (bytes, (page, _)) in plan.pages().zip(&pages) {
            let mut at = 0;
            stage.put(bytes, |piece| {
                let len = piece.len;
                ahead.push((piece, page, at));
                at += len;
            })?;
        }
        let sealed = stage.seal();
        let commands = scoped(&self.device, "submit", || {
            let mut encoder = self.device.create_command_encoder(&Default::default());
            for (piece, page, at) in &ahead {
                encoder.copy_buffer_to_buffer(&piece.buffer, piece.offset, page, *at, piece.len);
            }
            let groups = Pages(pages.iter().map(|(_, group)| group.clone()).collect());
            plan.encode(&mut encoder, &groups);
            encoder.finish()
        })?;
        let ticket = self.send(commands)?;
        // Chunks come back when the work just sent is done: not before it was sent.
        drop(sealed);
        Ok(ticket)
    }

    /// Records, and gives the plan everything it needs to be encoded at any time.
    fn keep(&self, record: Record<'_>) -> Result<(graph::Plan, Pages)> {
        let mut recorder = Recorder::new(self, true);
        record(&mut recorder)?;
        let Recorder { plan, stage, .. } = recorder;
        drop(stage.seal());
        let pages = plan.own_pages(self)?;
        Ok((plan, pages))
    }

    /// The first `count` pages of the arena.
    fn arena_pages(&self, count: usize) -> Result<Vec<(wgpu::Buffer, wgpu::BindGroup)>> {
        let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        while arena.len() < count {
            let usage = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST;
            let buffer = self.buffer(page_size(self.envelope_stride), usage, false, "lorapool envelopes")?;
            let group = self.envelope_group(&buffer)?;
            arena.push((buffer, group));
        }
        Ok(arena[..count].to_vec())
    }

    fn bounce(&self) -> Result<&wgpu::Buffer> {
        if let Some(buffer) = self.bounce.get() {
            return Ok(buffer);
        }
        let usage = wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let buffer = self.buffer(BOUNCE, usage, false, "lorapool bounce")?;
        Ok(self.bounce.get_or_init(|| buffer))
    }

    /// Sends commands to the queue.
    fn send(&self, commands: wgpu::CommandBuffer) -> Result<Ticket> {
        // Held while submitting: tickets are in the queue's order.
        let mut sent = self.sent();
        let index = scoped(&self.device, "submit", || self.queue.submit([commands]))?;
        self.check_lost()?;
        sent.last += 1;
        let ticket = sent.last;
        sent.in_flight.push_back((ticket, index));
        let done = self.done.clone();
        self.queue.on_submitted_work_done(move || {
            done.fetch_max(ticket, Ordering::AcqRel);
        });
        let finished = self.done.load(Ordering::Acquire);
        while sent.in_flight.front().is_some_and(|(ticket, _)| *ticket <= finished) {
            sent.in_flight.pop_front();
        }
        Ok(Ticket(ticket))
    }

    fn wait(&self, ticket: Ticket) -> Result<()> {
        let index = {
            let sent = self.sent();
            if ticket.0 > sent.last {
                return Err(Error::shape("ticket", ticket.0, format!("up to {}", sent.last)));
            }
            if ticket.0 <= self.done.load(Ordering::Acquire) {
                return Ok(());
            }
            sent.in_flight.iter().find(|(t, _)| *t == ticket.0).map(|(_, index)| index.clone())
        };
        self.poll(wgpu::PollType::Wait { submission_index: index, timeout: None })?;
        // The callback may be another thread's to run, which polled at the same time.
        self.done.fetch_max(ticket.0, Ordering::AcqRel);
        Ok(())
    }

    /// Waits for the oldest work in flight; `false` when there is none.
    fn wait_oldest(&self) -> Result<bool> {
        let finished = self.done.load(Ordering::Acquire);
        let oldest = self.sent().in_flight.iter().map(|(ticket, _)| *ticket).find(|ticket| *ticket > finished);
        match oldest {
            Some(ticket) => self.wait(Ticket(ticket)).map(|()| true),
            None => Ok(false),
        }
    }

    fn poll(&self, how: wgpu::PollType) -> Result<()> {
        let driver = |message: String| Error::Driver { call: "poll", message };
        // wgpu panics here when the driver reports an error of its own, such as a reset.
        match catch_unwind(AssertUnwindSafe(|| self.device.poll(how))) {
            Ok(Ok(_)) => self.check_lost(),
            Ok(Err(error)) => Err(driver(error.to_string())),
            Err(_) => Err(driver("the driver failed while waiting".to_owned())),
        }
    }

    fn check_lost(&self) -> Result<()> {
        match self.lost.get() {
            Some(reason) => Err(Error::Driver { call: "device", message: format!("lost, {reason}") }),
            None => Ok(()),
        }
    }
}

/// Runs `f`, with every error of wgpu's that it causes on this thread as a `Result`.
fn scoped<T>(device: &wgpu::Device, call: &'static str, f: impl FnOnce() -> T) -> Result<T> {
    use wgpu::ErrorFilter::{Internal, OutOfMemory, Validation};
    let scopes = [OutOfMemory, Internal, Validation].map(|filter| device.push_error_scope(filter));
    let value = f();
    let mut found = None;
    for scope in scopes.into_iter().rev() {
        found = found.or(block_on(scope.pop()));
    }
    match found {
        None => Ok(value),
        Some(wgpu::Error::OutOfMemory { .. }) => Err(Error::OutOfMemory { requested: 0, label: call.to_owned() }),
        Some(error) => Err(Error::Driver { call, message: error.to_string() }),
    }
}

/// Waits for a future of wgpu's. On native devices they are ready, or progress on their own.
fn block_on<F: Future>(future: F) -> F::Output {
    pollster::block_on(future)
}

fn unavailable(reason: String) -> Error {
    Error::Unavailable { backend: "webgpu", reason }
}

/// Adapters that can run the kernels.
fn adapters() -> Result<Vec<wgpu::Adapter>> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::PRIMARY;
    // No validation layer by default, in debug builds neither; WGPU_VALIDATION=1 asks for it.
    descriptor.flags = wgpu::InstanceFlags::empty().with_env();
    let instance = wgpu::Instance::new(descriptor);
    let all = block_on(instance.enumerate_adapters(wgpu::Backends::PRIMARY));
    if all.is_empty() {
        let apis = wgpu::Instance::enabled_backend_features() & wgpu::Backends::PRIMARY;
        return Err(unavailable(format!("no driver found for any of {apis:?}")));
    }
    let mut refused = Vec::new();
    let usable = |adapter: &wgpu::Adapter| match check_adapter(adapter) {
        Ok(()) => true,
        Err(error) => {
            refused.push(format!("{}: {error}", adapter.get_info().name));
            false
        }
    };
    let found: Vec<_> = all.into_iter().filter(usable).collect();
    if found.is_empty() { Err(unavailable(refused.join("; "))) } else { Ok(found) }
}

fn check_adapter(adapter: &wgpu::Adapter) -> Result<()> {
    if !adapter.get_downlevel_capabilities().flags.contains(wgpu::DownlevelFlags::COMPUTE_SHADERS) {
        return Err(unavailable("no compute shaders".to_owned()));
    }
    check_limits(&adapter.limits())
}

/// WebGPU's default limits, or what less the adapter has, with its own buffers, bindings and alignments.
fn default_limits(adapter: &wgpu::Adapter) -> wgpu::Limits {
    let has = adapter.limits();
    wgpu::Limits {
        max_buffer_size: has.max_buffer_size,
        max_storage_buffer_binding_size: has.max_storage_buffer_binding_size,
        min_storage_buffer_offset_alignment: has.min_storage_buffer_offset_alignment,
        min_uniform_buffer_offset_alignment: has.min_uniform_buffer_offset_alignment,
        ..wgpu::Limits::defaults().or_worse_values_from(&has)
    }
}

/// Workgroup memory of the largest kernel, in bytes; a test compares it with the kernels.
pub const WORKGROUP_BYTES: u32 = 6336;

/// What the kernels need, all of it within WebGPU's defaults.
fn check_limits(limits: &wgpu::Limits) -> Result<()> {
    let needs = [
        ("max_storage_buffers_per_shader_stage", limits.max_storage_buffers_per_shader_stage, MAX_OPERANDS as u32),
        ("max_dynamic_uniform_buffers_per_pipeline_layout", limits.max_dynamic_uniform_buffers_per_pipeline_layout, 1),
        ("max_bind_groups", limits.max_bind_groups, 2),
        ("max_compute_invocations_per_workgroup", limits.max_compute_invocations_per_workgroup, THREADS),
        ("max_compute_workgroup_size_x", limits.max_compute_workgroup_size_x, THREADS),
        ("max_compute_workgroup_storage_size", limits.max_compute_workgroup_storage_size, WORKGROUP_BYTES),
        ("max_compute_workgroups_per_dimension", limits.max_compute_workgroups_per_dimension, 256),
    ];
    match needs.iter().find(|(_, has, needed)| has < needed) {
        Some((name, has, needed)) => Err(unavailable(format!("{name} is {has}, {needed} are needed"))),
        None => Ok(()),
    }
}

fn caps(info: &wgpu::AdapterInfo, limits: &wgpu::Limits) -> Caps {
    let groups = limits.max_compute_workgroups_per_dimension;
    Caps {
        backend: "webgpu",
        device: info.name.clone(),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        api: format!("wgpu on {:?}", info.backend),
        class: match info.device_type {
            wgpu::DeviceType::DiscreteGpu => DeviceClass::Discrete,
            wgpu::DeviceType::IntegratedGpu => DeviceClass::Integrated,
            wgpu::DeviceType::Cpu => DeviceClass::Software,
            wgpu::DeviceType::VirtualGpu | wgpu::DeviceType::Other => DeviceClass::Other,
        },
        memory: 0,
        layout: WeightLayout::SiteMajor,
        max_alloc: limits.max_buffer_size.min(MAX_BUFFER) & !(GRAIN - 1),
        max_binding: limits.max_storage_buffer_binding_size.min(MAX_BUFFER) & !(GRAIN - 1),
        binding_align: u64::from(limits.min_storage_buffer_offset_alignment).max(GRAIN),
        max_groups: [groups, groups],
        subgroup: [info.subgroup_min_size, info.subgroup_max_size],
        z_parts: 0,
    }
}
