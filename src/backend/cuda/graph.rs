//! Work kept for replay: a CUDA graph, captured from a stream of its own.

#![allow(unsafe_code)]

use std::fmt;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraph, CUgraphExec_st, CUstream, CUstream_flags, CUstreamCaptureMode};

use super::driver::{Handle, check};
use super::encoder::Commands;
use super::memory::Chunk;
use super::queue::{Remains, Shared};
use crate::backend::{Graph, Ticket};
use crate::error::Result;
use crate::memory::Allocation;

/// An executable graph and what its nodes read.
pub(super) struct CudaGraph {
    shared: Arc<Shared>,
    exec: Handle<CUgraphExec_st>,
    /// Bytes of the captured writes.
    chunks: Vec<Chunk>,
    /// Every allocation that a node touches.
    owners: Vec<Arc<dyn Allocation>>,
}

impl fmt::Debug for CudaGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaGraph on {} allocations", self.owners.len())
    }
}

/// Keeps `commands` as a graph.
pub(super) fn capture(shared: &Arc<Shared>, commands: &mut Commands) -> Result<CudaGraph> {
    let owners = std::mem::take(&mut commands.list.owners);
    let mut graph = capture_with(shared, owners, |stream| commands.list.enqueue(stream))?;
    graph.chunks = std::mem::take(&mut commands.chunks);
    Ok(graph)
}

/// Keeps what `send` sends to a stream as a graph, and with it `owners`: every allocation that it touches.
pub(super) fn capture_with(
    shared: &Arc<Shared>,
    mut owners: Vec<Arc<dyn Allocation>>,
    send: impl FnOnce(CUstream) -> Result<()>,
) -> Result<CudaGraph> {
    let exec = {
        let _bound = shared.device.bind()?;
        instantiate(send)?
    };
    owners.sort_by_key(|owner| Arc::as_ptr(owner).cast::<()>());
    owners.dedup_by(|a, b| Arc::ptr_eq(a, b));
    Ok(CudaGraph { shared: shared.clone(), exec, chunks: Vec::new(), owners })
}

impl CudaGraph {
    /// The same graph, which keeps `owner` too.
    pub(super) fn keeping(mut self, owner: Arc<dyn Allocation>) -> Self {
        self.owners.push(owner);
        self
    }
}

/// Captures what `send` sends, on a stream made for it. The context is current.
fn instantiate(send: impl FnOnce(CUstream) -> Result<()>) -> Result<Handle<CUgraphExec_st>> {
    let mut stream: CUstream = ptr::null_mut();
    // SAFETY: writes one handle; a context is current.
    check("cuStreamCreate", unsafe {
        sys::cuStreamCreate(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32)
    })?;
    let graph = record(send, stream);
    // SAFETY: made above; the capture has ended, and the stream has no work.
    let _ = unsafe { sys::cuStreamDestroy_v2(stream) };
    let graph = graph?;
    let mut exec = ptr::null_mut();
    // SAFETY: `graph` is a valid graph; writes one handle.
    let made = check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) });
    // SAFETY: destroyed once; an executable graph doesn't need the graph that it was made from.
    let _ = unsafe { sys::cuGraphDestroy(graph) };
    made.map(|()| Handle(exec))
}

fn record(send: impl FnOnce(CUstream) -> Result<()>, stream: CUstream) -> Result<CUgraph> {
    // Only this thread's own calls could disturb the capture, and until its end it makes none but these.
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: a stream of the current context, with no work.
    check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream, mode) })?;
    let sent = send(stream);
    let mut graph: CUgraph = ptr::null_mut();
    // SAFETY: the capture began above, on this thread; writes one handle, null where the capture failed.
    let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream, &mut graph) });
    // The error of the command that broke the capture says more than that of the end.
    match sent.and(ended) {
        Ok(()) => Ok(graph),
        Err(error) => {
            if !graph.is_null() {
                // SAFETY: made by the end of the capture, destroyed once.
                let _ = unsafe { sys::cuGraphDestroy(graph) };
            }
            Err(error)
        }
    }
}

impl Graph for CudaGraph {
    fn replay(&self) -> Result<Ticket> {
        self.shared.send(&mut Vec::new(), |stream| {
            // SAFETY: instantiated in this context; its nodes' memory is kept by `owners` and `chunks`, which
            // are freed only after this work. `send` holds the lock, so no other thread launches it now.
            check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec.0, stream) })
        })
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        // Before the allocations in `owners`, which go the same way.
        self.shared.inter(Remains::Graph(self.exec));
        self.chunks.drain(..).for_each(|chunk| self.shared.inter(Remains::Chunk(chunk)));
    }
}
