//! The driver's library: whether it can be used here, and its refusals as errors.
//!
//! `cudarc` looks every function up when it is first called and panics where it isn't there. So the library,
//! and each function that this backend calls, is looked for first ([`ready`]).

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUresult};

use super::NAME;
use crate::error::{Error, Result};

/// The oldest driver that loads the PTX: of CUDA 12.0.
const OLDEST: i32 = 12_000;

/// Every function of the driver that this backend calls after `cuInit`, the two for errors aside.
const FUNCTIONS: &[&str] = &[
    "cuCtxGetDevice",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuThreadExchangeStreamCaptureMode",
];

/// A handle of the driver's that may be used from any thread.
#[derive(Debug)]
pub(super) struct Handle<T>(pub *mut T);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

// SAFETY: contexts, streams, events, modules, functions and graphs belong to the process, not to the thread
// that made them: the driver's functions take them on any thread. Executable graphs are not used by two
// threads at once, since launches of them are made under `Shared`'s lock.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above; the handle itself is never written through.
unsafe impl<T> Sync for Handle<T> {}

/// Loads and initialises the driver, once a process.
///
/// # Errors
/// [`Error::Unavailable`] without the library, without a device, or with a driver that is too old.
pub(super) fn ready() -> Result<()> {
    static READY: OnceLock<Result<(), String>> = OnceLock::new();
    READY.get_or_init(find).clone().map_err(|reason| Error::Unavailable { backend: NAME, reason })
}

fn find() -> Result<(), String> {
    // SAFETY: loading the driver's library runs its initialisers, which make no demand on the caller.
    if !unsafe { sys::is_culib_present() } {
        return Err("no NVIDIA driver (libcuda.so.1, nvcuda.dll) is installed".into());
    }
    if !has("cuInit") {
        return Err("the library named libcuda has no cuInit".into());
    }
    // SAFETY: the function is there, and may be called at any time.
    let code = unsafe { sys::cuInit(0) };
    if code != CUresult::CUDA_SUCCESS {
        return Err(format!("cuInit: {}", describe(code)));
    }
    if let Some(missing) = FUNCTIONS.iter().find(|name| !has(name)) {
        return Err(format!("the driver has no {missing}; a driver of CUDA 12.0 or later is needed"));
    }
    match version() {
        Ok(found) if found < OLDEST => {
            Err(format!("the driver is of CUDA {}; one of 12.0 or later is needed", dotted(found)))
        }
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// Whether the library, which has been found, has this function.
fn has(name: &str) -> bool {
    // SAFETY: the symbol is looked up, not called.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok()
}

/// The newest CUDA that the driver serves, as 1000 times major plus 10 times minor.
pub(super) fn version() -> Result<i32> {
    let mut version = 0;
    // SAFETY: writes one integer.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    Ok(version)
}

/// `13000` as `13.0`.
pub(super) fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The driver's answer to `call` as a result.
pub(super) fn check(call: &'static str, code: CUresult) -> Result<()> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(Error::Driver { call, message: describe(code) }),
    }
}

/// The driver's own name and words for an error, its number where it has none.
pub(super) fn describe(code: CUresult) -> String {
    type Words = unsafe fn(CUresult, *mut *const c_char) -> CUresult;
    let words = |symbol, function: Words| {
        let mut text: *const c_char = ptr::null();
        // SAFETY: called only if the library has it; writes one pointer, to a string that is never freed, or null.
        if !has(symbol) || unsafe { function(code, &mut text) } != CUresult::CUDA_SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: the driver's names and messages are static strings that end in a zero byte.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    let name = words("cuGetErrorName", sys::cuGetErrorName).unwrap_or_else(|| format!("error {}", code as u32));
    match words("cuGetErrorString", sys::cuGetErrorString) {
        Some(text) => format!("{name}: {text}"),
        None if code == CUresult::CUDA_ERROR_NO_DEVICE => format!("{name}: no CUDA-capable device is detected"),
        None => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_reads_as_major_dot_minor() {
        assert_eq!(dotted(12_040), "12.4");
        assert_eq!(dotted(13_000), "13.0");
    }
}
