//! One stream, what its unfinished work still needs, and what is freed once that is done.
//!
//! A ticket is an event recorded after the work. Events, staging memory and command lists are reused, so a
//! steady stream of submissions allocates nothing. Memory whose last [`Region`](crate::Region) is gone waits
//! for the ticket after it.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use cudarc::driver::sys::{
    self, CUevent_flags, CUevent_st, CUgraphExec_st, CUresult, CUstream, CUstream_flags, CUstream_st,
    CUstreamCaptureStatus,
};

use super::device::Device;
use super::driver::{Handle, check};
use super::encoder::Commands;
use super::memory::{Chunk, Staging};
use super::module::Modules;
use crate::backend::Ticket;
use crate::error::{Error, Result};

/// What a backend shares with its regions and graphs.
#[derive(Debug)]
pub(super) struct Shared {
    /// Tells this backend's memory and kernels from another's.
    pub(super) id: u64,
    stream: Handle<CUstream_st>,
    /// Whether the stream is ours to destroy.
    owned: bool,
    /// A stream for transfers beside the queue, made by the first one.
    side: Mutex<Option<Handle<CUstream_st>>>,
    state: Mutex<State>,
    graves: Mutex<Vec<Grave>>,
    pub(super) modules: Modules,
    /// Last, so that its context outlives everything above.
    pub(super) device: Device,
}

/// What changes with each submission.
#[derive(Debug, Default)]
struct State {
    submitted: u64,
    completed: u64,
    /// Tickets whose event has not been seen done, in order.
    pending: VecDeque<(u64, Handle<CUevent_st>)>,
    /// Events to use again.
    events: Vec<Handle<CUevent_st>>,
    /// Staging memory that the work of a ticket reads, in the order of tickets.
    staged: VecDeque<(u64, Chunk)>,
    staging: Staging,
    /// Command lists to use again.
    commands: Vec<Commands>,
}

/// Something to free when the work submitted before it has finished.
#[derive(Debug)]
struct Grave {
    /// The ticket to wait for, once there is one.
    after: Option<u64>,
    remains: Remains,
}

/// What lies in a [`Grave`].
#[derive(Debug)]
pub(super) enum Remains {
    /// Device memory, by its address.
    Memory(u64),
    /// A graph.
    Graph(Handle<CUgraphExec_st>),
    /// Staging memory of a graph.
    Chunk(Chunk),
}

/// A panic while a lock was held left nothing half done: every state behind our locks is valid at each step.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poison| poison.into_inner())
}

/// Command lists kept for reuse; more only appear when that many threads record at once.
const SPARE_COMMANDS: usize = 8;

impl Shared {
    /// With a stream of its own, which waits for no other.
    pub(super) fn new(device: Device) -> Result<Self> {
        let bound = device.bind()?;
        let stream = new_stream()?;
        drop(bound);
        Ok(Self::with(device, stream, true))
    }

    /// On a host's stream.
    ///
    /// # Safety
    /// `stream` belongs to the device's context and outlives what is returned.
    pub(super) unsafe fn adopt(device: Device, stream: CUstream) -> Self {
        Self::with(device, stream, false)
    }

    fn with(device: Device, stream: CUstream, owned: bool) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            stream: Handle(stream),
            owned,
            side: Mutex::default(),
            state: Mutex::default(),
            graves: Mutex::default(),
            modules: Modules::default(),
            device,
        }
    }

    /// An empty command list.
    pub(super) fn commands(&self) -> Commands {
        lock(&self.state).commands.pop().unwrap_or_default()
    }

    /// Takes a command list back, with the staging memory that was not sent.
    pub(super) fn recycle(&self, mut commands: Commands) {
        // Before the lock: the last owner of an allocation sends it to its grave.
        commands.clear();
        let mut state = lock(&self.state);
        commands.chunks.drain(..).for_each(|chunk| state.staging.put(chunk));
        if state.commands.len() < SPARE_COMMANDS {
            state.commands.push(commands);
        }
    }

    /// Staging memory of at least `len` bytes.
    pub(super) fn chunk(&self, len: usize) -> Result<Chunk> {
        if let Some(chunk) = lock(&self.state).staging.take(len) {
            return Ok(chunk);
        }
        let _bound = self.device.bind()?;
        Chunk::new(len)
    }

    /// Takes staging memory back that no work uses.
    pub(super) fn put_back(&self, chunk: Chunk) {
        lock(&self.state).staging.put(chunk);
    }

    /// The stream for transfers beside the queue. A context must be current.
    pub(super) fn side_stream(&self) -> Result<CUstream> {
        let mut side = lock(&self.side);
        match *side {
            Some(stream) => Ok(stream.0),
            None => Ok(side.insert(Handle(new_stream()?)).0),
        }
    }

    /// Whether the host is capturing the stream.
    pub(super) fn capturing(&self) -> Result<bool> {
        if self.owned {
            return Ok(false);
        }
        let _bound = self.device.bind()?;
        self.stream_captures()
    }

    /// As [`Shared::capturing`], with the context current.
    fn stream_captures(&self) -> Result<bool> {
        if self.owned {
            return Ok(false);
        }
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: writes one enum value; the stream outlives `self`.
        check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(self.stream.0, &mut status) })?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Runs `send` on the stream and gives a ticket for it. Staging memory in `chunks` stays as it is until the
    /// ticket is done, also when `send` fails half way.
    pub(super) fn send(&self, chunks: &mut Vec<Chunk>, send: impl FnOnce(CUstream) -> Result<()>) -> Result<Ticket> {
        let _bound = self.device.bind()?;
        let mut state = lock(&self.state);
        self.refuse_capture()?;
        let sent = send(self.stream.0);
        let ticket = self.stamp(&mut state);
        // Without a ticket nobody can tell when they are free: then they are never used again.
        let after = ticket.as_ref().map_or(u64::MAX, |t| t.0);
        chunks.drain(..).for_each(|chunk| state.staged.push_back((after, chunk)));
        sent?;
        let ticket = ticket?;
        self.poll(&mut state)?;
        self.bury(&mut state, false)?;
        Ok(ticket)
    }

    /// Runs `send` on the stream while the host captures it: no ticket, no event, nothing is freed.
    pub(super) fn send_to_capture(&self, send: impl FnOnce(CUstream) -> Result<()>) -> Result<()> {
        let _bound = self.device.bind()?;
        let _state = lock(&self.state);
        send(self.stream.0)
    }

    /// Runs `call` with the context current and no submission from elsewhere in between.
    pub(super) fn with_stream<T>(&self, call: impl FnOnce(CUstream) -> Result<T>) -> Result<T> {
        let _bound = self.device.bind()?;
        let mut state = lock(&self.state);
        self.refuse_capture()?;
        self.bury(&mut state, true)?;
        call(self.stream.0)
    }

    /// The last ticket that is done.
    pub(super) fn completed(&self) -> Result<Ticket> {
        let _bound = self.device.bind()?;
        let mut state = lock(&self.state);
        self.poll(&mut state)?;
        Ok(Ticket(state.completed))
    }

    /// Blocks until `ticket` is done.
    pub(super) fn wait(&self, ticket: Ticket) -> Result<()> {
        let _bound = self.device.bind()?;
        let event = {
            let mut state = lock(&self.state);
            if ticket.0 > state.submitted {
                let last = format!("at most {}, the last one given out", state.submitted);
                return Err(Error::shape("ticket", ticket.0, last));
            }
            self.poll(&mut state)?;
            match state.pending.iter().find(|(pending, _)| *pending >= ticket.0) {
                Some((_, event)) if state.completed < ticket.0 => *event,
                _ => return Ok(()),
            }
        };
        // Should another thread see the event done and record it again, this waits a little longer than needed.
        // SAFETY: events are destroyed with `self` only.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(event.0) })?;
        let mut state = lock(&self.state);
        self.poll(&mut state)?;
        if self.stream_captures()? { Ok(()) } else { self.bury(&mut state, true) }
    }

    /// Waits for all work, then frees all that can be freed. For an allocation that found no room.
    pub(super) fn drain(&self) -> Result<()> {
        self.with_stream(|stream| {
            // SAFETY: the stream outlives `self`.
            check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })
        })?;
        let _bound = self.device.bind()?;
        let mut state = lock(&self.state);
        self.poll(&mut state)?;
        self.bury(&mut state, true)
    }

    /// Hands over what is to be freed when the work submitted so far is done. Calls nothing of the driver's, so
    /// it may be called at any time, on any thread, during any capture.
    pub(super) fn inter(&self, remains: Remains) {
        lock(&self.graves).push(Grave { after: None, remains });
    }

    fn refuse_capture(&self) -> Result<()> {
        if self.stream_captures()? {
            return Err(Error::Input(
                "the host is capturing its stream: only CudaBackend::encode works until the capture has ended".into(),
            ));
        }
        Ok(())
    }

    /// Records an event after all work so far.
    fn stamp(&self, state: &mut State) -> Result<Ticket> {
        let event = match state.events.pop() {
            Some(event) => event,
            None => {
                let mut event = ptr::null_mut();
                // SAFETY: writes one handle; a context is current.
                check("cuEventCreate", unsafe {
                    sys::cuEventCreate(&mut event, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
                })?;
                Handle(event)
            }
        };
        // SAFETY: event and stream are of the current context.
        if let Err(error) = check("cuEventRecord", unsafe { sys::cuEventRecord(event.0, self.stream.0) }) {
            state.events.push(event);
            return Err(error);
        }
        state.submitted += 1;
        state.pending.push_back((state.submitted, event));
        Ok(Ticket(state.submitted))
    }

    /// Looks which tickets are done, and takes back what their work read.
    fn poll(&self, state: &mut State) -> Result<()> {
        while let Some((ticket, event)) = state.pending.front().copied() {
            // SAFETY: the event was recorded by `stamp`, outside of any capture.
            match unsafe { sys::cuEventQuery(event.0) } {
                CUresult::CUDA_ERROR_NOT_READY => break,
                code => check("cuEventQuery", code)?,
            }
            state.pending.pop_front();
            state.events.push(event);
            state.completed = ticket;
        }
        while let Some((_, chunk)) = state.staged.pop_front_if(|(ticket, _)| *ticket <= state.completed) {
            state.staging.put(chunk);
        }
        state.staging.trim();
        Ok(())
    }

    /// Frees what waits for no work any more. What has no ticket to wait for gets one: with `stamp` a new one,
    /// otherwise the last, which must have been made since the lock was taken and with no work after it.
    fn bury(&self, state: &mut State, stamp: bool) -> Result<()> {
        let mut graves = lock(&self.graves);
        if graves.is_empty() {
            return Ok(());
        }
        if graves.iter().any(|grave| grave.after.is_none()) {
            if stamp {
                self.stamp(state)?;
            }
            let last = state.submitted;
            graves.iter_mut().filter(|grave| grave.after.is_none()).for_each(|grave| grave.after = Some(last));
        }
        self.poll(state)?;
        let completed = state.completed;
        for grave in graves.extract_if(.., |grave| grave.after.is_some_and(|after| after <= completed)) {
            free(grave.remains, &mut state.staging);
        }
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else { return };
        if self.stream_captures().unwrap_or(true) {
            // Waiting for it would break the host's capture, and without waiting nothing may be freed.
            tracing::warn!("a CUDA backend was dropped while its host captured the stream: its memory is lost");
            return;
        }
        // SAFETY: nobody else has `self`, and after the synchronisation no work uses what it holds. Every handle
        // here was made by it and is destroyed once. Errors can only mean that the context is broken.
        unsafe {
            let _ = sys::cuStreamSynchronize(self.stream.0);
            let state = self.state.get_mut().unwrap_or_else(|poison| poison.into_inner());
            for grave in lock(&self.graves).drain(..) {
                free(grave.remains, &mut state.staging);
            }
            state.staged.drain(..).for_each(|(_, chunk)| state.staging.put(chunk));
            state.staging.clear();
            for event in state.pending.drain(..).map(|(_, event)| event).chain(state.events.drain(..)) {
                let _ = sys::cuEventDestroy_v2(event.0);
            }
            self.modules.unload();
            if self.owned {
                let _ = sys::cuStreamDestroy_v2(self.stream.0);
            }
            if let Some(side) = lock(&self.side).take() {
                let _ = sys::cuStreamDestroy_v2(side.0);
            }
        }
    }
}

/// A stream that waits for no other. A context must be current.
fn new_stream() -> Result<CUstream> {
    let mut stream: CUstream = ptr::null_mut();
    // SAFETY: writes one handle; a context is current.
    check("cuStreamCreate", unsafe {
        sys::cuStreamCreate(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32)
    })?;
    Ok(stream)
}

/// Frees what no work uses any more. An error can only mean that the context is broken, which every later call
/// will say.
fn free(remains: Remains, staging: &mut Staging) {
    match remains {
        // SAFETY: allocated by cuMemAlloc, and interred by its last owner.
        Remains::Memory(address) => drop(unsafe { sys::cuMemFree_v2(address) }),
        // SAFETY: instantiated by `graph::capture`, and interred by its owner.
        Remains::Graph(exec) => drop(unsafe { sys::cuGraphExecDestroy(exec.0) }),
        Remains::Chunk(chunk) => staging.put(chunk),
    }
}
