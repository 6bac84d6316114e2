//! The CUDA backend on a host's own context and stream, and what only it promises: work in a host's capture, memory
//! freed after the work that uses it. Passed over without a driver and device, unless REQUIRE_BACKENDS names cuda.
#![cfg(feature = "cuda")]
#![allow(unsafe_code)]

use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::driver::sys::{
    self, CUcontext, CUdeviceptr, CUgraph, CUgraphExec, CUresult, CUstream, CUstream_flags, CUstreamCaptureMode,
};
use lorapool::backend::cuda::{CudaBackend, devices};
use lorapool::backend::{GpuBackend, Ticket};

/// One test at a time: what a host does by itself may break the capture that another one has begun.
static ALONE: Mutex<()> = Mutex::new(());

/// A host: the primary context, current on this thread, and a stream.
struct Host {
    _alone: MutexGuard<'static, ()>,
    context: CUcontext,
    stream: CUstream,
}

fn ok(code: CUresult) {
    assert_eq!(code as u32, 0, "the driver's error code");
}

impl Host {
    /// `None`, and said so, where there's no device.
    fn new() -> Option<Self> {
        if let Err(error) = devices() {
            let required = std::env::var("REQUIRE_BACKENDS").unwrap_or_default();
            assert!(!required.split(',').any(|name| name.trim() == "cuda"), "required, but {error}");
            eprintln!("skipped: {error}");
            return None;
        }
        let alone = ALONE.lock().unwrap_or_else(|poison| poison.into_inner());
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: `devices` has initialised the driver and found a device; each call writes one handle.
        unsafe {
            ok(sys::cuDevicePrimaryCtxRetain(&mut context, 0));
            ok(sys::cuCtxPushCurrent_v2(context));
            ok(sys::cuStreamCreate(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32));
        }
        Some(Self { _alone: alone, context, stream })
    }

    fn backend(&self) -> CudaBackend {
        // SAFETY: context and stream live until the end of the test, longer than the backend.
        unsafe { CudaBackend::adopt(self.context.cast(), self.stream.cast()) }.expect("an adopted backend")
    }

    /// Captures what `work` puts on the stream, as a host does with its whole step.
    fn capture(&self, work: impl FnOnce()) -> CUgraphExec {
        let (mut graph, mut exec): (CUgraph, CUgraphExec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the stream is valid and not being captured; each call writes one handle.
        unsafe {
            // The strictest mode: no thread of the process may do what a capture can't hold.
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
            ok(sys::cuStreamBeginCapture_v2(self.stream, mode));
            work();
            ok(sys::cuStreamEndCapture(self.stream, &mut graph));
            ok(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            ok(sys::cuGraphDestroy(graph));
        }
        exec
    }
}

#[test]
fn work_is_encoded_into_a_host_s_capture_and_runs_with_its_graph() {
    let Some(host) = Host::new() else { return };
    let backend = host.backend();
    let from = backend.alloc(1 << 10, "from").expect("memory");
    let to = backend.alloc(1 << 10, "to").expect("memory");
    let other = backend.alloc(1 << 10, "dropped in the capture").expect("memory");
    let exec = host.capture(|| {
        backend.encode(&mut |encoder| encoder.copy(&to, &from)).expect("a copy in a capture");
        // None of these may touch the capture.
        drop(other);
        let write = backend.encode(&mut |encoder| encoder.write(&to, &[1; 4]));
        assert_eq!(write.expect_err("a write in a capture").code(), "E_INPUT");
        assert_eq!(backend.submit(&mut |_| Ok(())).expect_err("a ticket in a capture").code(), "E_INPUT");
        assert_eq!(backend.read(&to).expect_err("a read in a capture").code(), "E_INPUT");
        assert_eq!(backend.alloc(16, "late").expect_err("an allocation in a capture").code(), "E_INPUT");
        backend.completed().expect("what is done can be asked at any time");
    });
    assert_eq!(backend.read(&to).expect("bytes"), vec![0; 1 << 10], "a capture runs nothing");
    for value in [7u8, 9] {
        backend.encode(&mut |encoder| encoder.write(&from, &[value; 1 << 10])).expect("a write outside of a capture");
        // SAFETY: a valid graph, whose regions live.
        ok(unsafe { sys::cuGraphLaunch(exec, host.stream) });
        assert_eq!(backend.read(&to).expect("bytes"), vec![value; 1 << 10]);
    }
    // SAFETY: no run of it is left, since the read has waited.
    ok(unsafe { sys::cuGraphExecDestroy(exec) });
}

#[test]
fn a_host_s_memory_becomes_a_region_and_stays_the_host_s() {
    let Some(host) = Host::new() else { return };
    let mut address: CUdeviceptr = 0;
    // SAFETY: writes one address.
    ok(unsafe { sys::cuMemAlloc_v2(&mut address, 64) });
    let backend = host.backend();
    let owner = Arc::new(());
    // SAFETY: 64 bytes, which live until the end of the test.
    let region = unsafe { backend.import(address, 64, owner.clone()) }.expect("a region");
    backend.encode(&mut |encoder| encoder.write(&region, &[5; 64])).expect("a write");
    assert_eq!(backend.read(&region.slice(3, 7).expect("a slice")).expect("bytes"), [5; 7]);
    drop(region);
    assert_eq!(Arc::strong_count(&owner), 1, "the owner is let go with the last region");
    // SAFETY: as above.
    let again = unsafe { backend.import(address, 64, owner) }.expect("a region");
    assert_eq!(backend.read(&again).expect("bytes"), [5; 64], "the memory was not freed");
    // SAFETY: null is never accessed: it is refused.
    assert!(unsafe { backend.import(0, 4, Arc::new(())) }.is_err());
    drop((again, backend));
    // SAFETY: allocated above, and nothing uses it any more.
    ok(unsafe { sys::cuMemFree_v2(address) });
}

#[test]
fn memory_dropped_right_after_its_work_was_sent_is_freed_after_that_work() {
    let Some(_host) = Host::new() else { return };
    let backend = CudaBackend::new(0).expect("a backend");
    let len = 8 << 20;
    let to = backend.alloc(len, "to").expect("memory");
    for value in 1..20u8 {
        let from = backend.alloc(len, "from").expect("memory");
        let bytes = vec![value; len as usize];
        backend
            .submit(&mut |encoder| {
                encoder.write(&from, &bytes)?;
                encoder.copy(&to, &from)
            })
            .expect("a submission");
        drop((from, bytes));
    }
    assert!(backend.read(&to).expect("bytes").iter().all(|byte| *byte == 19));
}

#[test]
fn a_graph_keeps_what_it_needs_and_a_failed_recording_sends_nothing() {
    let Some(_host) = Host::new() else { return };
    let backend = CudaBackend::new(0).expect("a backend");
    let to = backend.alloc(4096, "to").expect("memory");
    let graph = {
        let from = backend.alloc(4096, "from").expect("memory");
        let record = &mut |encoder: &mut dyn lorapool::backend::Encoder| {
            encoder.write(&from, &[3; 4096])?;
            encoder.copy(&to, &from)
        };
        backend.capture(record).expect("a graph")
    };
    let failed = backend.submit(&mut |encoder| {
        encoder.write(&to, &[8; 4096])?;
        encoder.write(&to, &[8; 4097])
    });
    assert_eq!(failed.expect_err("too many bytes").code(), "E_OUT_OF_BOUNDS");
    assert_eq!(backend.read(&to).expect("bytes"), [0; 4096], "neither the capture nor the failure ran anything");
    let first = graph.replay().expect("a replay");
    backend.wait(first).expect("its end");
    assert!(backend.completed().expect("a ticket") >= first);
    assert_eq!(backend.read(&to).expect("bytes"), [3; 4096]);
    backend.submit(&mut |encoder| encoder.write(&to, &[1; 4096])).expect("a submission");
    let second = graph.replay().expect("a replay");
    assert!(second > first);
    drop(graph);
    assert_eq!(backend.read(&to).expect("bytes"), [3; 4096], "dropped with a replay in flight");
    assert_eq!(backend.wait(Ticket(u64::MAX)).expect_err("no such ticket").code(), "E_SHAPE");
}

#[test]
fn many_threads_submit_at_once() {
    let Some(_host) = Host::new() else { return };
    let backend = Arc::new(CudaBackend::new(0).expect("a backend"));
    std::thread::scope(|scope| {
        for value in 1..=4u8 {
            let backend = backend.clone();
            scope.spawn(move || {
                let region = backend.alloc(256, "a thread's").expect("memory");
                for _ in 0..50 {
                    let ticket = backend.submit(&mut |e| e.write(&region, &[value; 256])).expect("a submission");
                    backend.wait(ticket).expect("its end");
                    assert_eq!(backend.read(&region).expect("bytes"), [value; 256]);
                }
            });
        }
    });
}

#[test]
fn memory_and_kernels_of_another_backend_are_refused_and_too_much_memory_is_an_error() {
    let Some(_host) = Host::new() else { return };
    let (one, two) = (CudaBackend::new(0).expect("a backend"), CudaBackend::new(0).expect("a backend"));
    let region = one.alloc(64, "one's").expect("memory");
    assert_eq!(two.read(&region).expect_err("another's memory").code(), "E_SHAPE");
    let written = two.submit(&mut |encoder| encoder.write(&region, &[0; 4]));
    assert_eq!(written.expect_err("another's memory").code(), "E_SHAPE");
    assert_eq!(one.alloc(u64::MAX, "all").expect_err("past the limit").code(), "E_LIMIT");
    let limit = one.caps().max_alloc;
    assert_eq!(one.alloc(limit, "all of it").expect_err("the context needs some").code(), "E_OUT_OF_MEMORY");
    one.alloc(0, "nothing").expect("an empty region");
}
