//! A device: its capabilities, and the context that calls are made in.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;

use cudarc::driver::sys::{self, CUcontext, CUctx_st, CUdevice, CUdevice_attribute, CUstreamCaptureMode};

use super::NAME;
use super::driver::{self, Handle, check};
use super::sm90::Room;
use super::variant::Variant;
use crate::backend::{Caps, DeviceClass, WeightLayout};
use crate::contract::Z_PARTS;
use crate::error::{Error, Result};

/// The oldest compute capability that the PTX is made for.
const OLDEST: (i32, i32) = (7, 0);

/// Graphs keep such launches from CUDA 12.3 on.
fn early_launches() -> Result<bool> {
    Ok(driver::version()? >= 12_030)
}

/// A device's number and capabilities, before any context.
#[derive(Debug)]
pub(super) struct Candidate {
    number: CUdevice,
    capability: (i32, i32),
    room: Room,
    pub(super) caps: Caps,
}

/// Devices that can run the kernels, and for each that can't, why.
pub(super) fn candidates() -> Result<(Vec<Candidate>, Vec<String>)> {
    driver::ready()?;
    let mut count = 0;
    // SAFETY: writes one integer.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    let (mut good, mut refused) = (Vec::new(), Vec::new());
    for ordinal in 0..count {
        let mut number = 0;
        // SAFETY: writes one integer.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut number, ordinal) })?;
        match Candidate::of(number) {
            Ok(candidate) => good.push(candidate),
            Err(Error::Unavailable { reason, .. }) => refused.push(reason),
            Err(error) => refused.push(format!("device {ordinal}: {error}")),
        }
    }
    Ok((good, refused))
}

impl Candidate {
    fn of(number: CUdevice) -> Result<Self> {
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: writes one integer; `number` comes from cuDeviceGet or cuCtxGetDevice.
            check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, which, number) })?;
            Ok::<i32, Error>(value)
        };
        let mut name = [0u8; 256];
        // SAFETY: writes at most that many bytes, a zero byte last.
        check("cuDeviceGetName", unsafe {
            sys::cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), name.len() as i32, number)
        })?;
        let name = CStr::from_bytes_until_nul(&name).map_or_else(|_| "?".into(), |n| n.to_string_lossy().into_owned());
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if (major, minor) < OLDEST {
            let reason = format!("{name} has compute capability {major}.{minor}, {}.{} is needed", OLDEST.0, OLDEST.1);
            return Err(Error::Unavailable { backend: NAME, reason });
        }
        let mut memory = 0;
        // SAFETY: writes one integer.
        check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut memory, number) })?;
        let x = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X)?;
        let y = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y)?;
        let warp = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)? as u32;
        let class = match attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? {
            0 => DeviceClass::Discrete,
            _ => DeviceClass::Integrated,
        };
        let caps = Caps {
            backend: NAME,
            device: name,
            driver: format!("NVIDIA driver of CUDA {}", driver::dotted(driver::version()?)),
            api: format!("sm_{major}{minor}"),
            class,
            memory: memory as u64,
            layout: WeightLayout::SlotMajor,
            max_alloc: memory as u64,
            max_binding: u64::MAX,
            binding_align: 1,
            max_groups: [x as u32, y as u32],
            subgroup: [warp, warp],
            z_parts: if (major, minor) >= (9, 0) { Z_PARTS } else { 0 },
        };
        let room = Room {
            multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1) as u32,
            shared: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?.max(0) as u32,
        };
        Ok(Self { number, capability: (major, minor), room, caps })
    }
}

/// A device with a context: the device's primary one, or a host's.
#[derive(Debug)]
pub(super) struct Device {
    number: CUdevice,
    context: Handle<CUctx_st>,
    /// Whether the primary context is retained, and so has to be released.
    retained: bool,
    /// Compute capability.
    pub(super) capability: (i32, i32),
    /// Whether launches may start before the one before has ended, in captured graphs too.
    pub(super) early_launches: bool,
    /// What launches of kernels that fill a multiprocessor go by.
    pub(super) room: Room,
    /// The least plain way in which kernels may run.
    pub(super) limit: Variant,
    pub(super) caps: Caps,
}

impl Device {
    /// Retains the device's primary context, which the CUDA runtime uses too.
    pub(super) fn open(candidate: Candidate) -> Result<Self> {
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, candidate.number) })?;
        let Candidate { number, capability, room, caps } = candidate;
        Ok(Self {
            number,
            context: Handle(context),
            retained: true,
            capability,
            early_launches: early_launches()?,
            room,
            limit: Variant::Routed,
            caps,
        })
    }

    /// The same device with its primary context, for kernels no less plain than `limit`.
    pub(super) fn again(&self, limit: Variant) -> Result<Self> {
        let mut device = Self::open(Candidate::of(self.number)?)?;
        device.limit = limit;
        Ok(device)
    }

    /// A host's context, which stays the host's.
    ///
    /// # Safety
    /// `context` is a valid context and outlives what is returned.
    pub(super) unsafe fn adopt(context: CUcontext) -> Result<Self> {
        driver::ready()?;
        // SAFETY: the caller vouches for the context.
        let _bound = unsafe { Bound::to(context) }?;
        let mut number = 0;
        // SAFETY: writes one integer; a context is current.
        check("cuCtxGetDevice", unsafe { sys::cuCtxGetDevice(&mut number) })?;
        let Candidate { capability, room, caps, .. } = Candidate::of(number)?;
        Ok(Self {
            number,
            context: Handle(context),
            retained: false,
            capability,
            early_launches: early_launches()?,
            room,
            limit: Variant::Routed,
            caps,
        })
    }

    /// Makes the context current on this thread until the guard is dropped; then the one before is again.
    pub(super) fn bind(&self) -> Result<Bound> {
        // SAFETY: retained, or vouched for by the caller of `adopt`.
        unsafe { Bound::to(self.context.0) }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.retained {
            // SAFETY: retained once by `open`. An error can only mean that the driver is shutting down.
            let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.number) };
        }
    }
}

/// While it lives, the context is current on this thread, and the driver doesn't refuse calls because another
/// stream is being captured somewhere in the process. Not `Send`.
#[derive(Debug)]
pub(super) struct Bound {
    mode: CUstreamCaptureMode,
    thread: PhantomData<*const ()>,
}

impl Bound {
    /// # Safety
    /// `context` is valid while the guard lives.
    unsafe fn to(context: CUcontext) -> Result<Self> {
        // SAFETY: the caller vouches for the context.
        check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(context) })?;
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: swaps this thread's mode with `mode`. Relaxed is right: what a capture must not see, such as
        // an allocation, is kept off capturing streams by `Shared`.
        let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        let bound = Self { mode, thread: PhantomData };
        check("cuThreadExchangeStreamCaptureMode", code)?;
        Ok(bound)
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: gives this thread back the mode and the context that `to` found. An error can only mean that
        // the context is broken, which every later call will say.
        unsafe {
            let _ = sys::cuThreadExchangeStreamCaptureMode(&mut self.mode);
            let _ = sys::cuCtxPopCurrent_v2(&mut popped);
        }
    }
}
