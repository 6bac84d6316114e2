//! Kernels of one device: the committed PTX, compiled by the driver.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{
    self, CUfunc_st, CUfunction_attribute, CUjit_option, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchAttributeValue, CUlaunchAttributeValue_union__bindgen_ty_1, CUlaunchConfig, CUmod_st, CUmodule,
};

use super::driver::{Handle, check};
use super::queue::{Shared, lock};
use super::sm90::Room;
use super::variant::Variant;
use super::{routed, sm90a};
use crate::backend::Pipeline;
use crate::contract::{Kernel, MAX_RANK, Params, Spec, Z_PARTS};
use crate::error::{Error, Result};

/// What a [`Pipeline`] holds: a kernel of a loaded module, in the variants that this device runs.
#[derive(Debug)]
pub(super) struct Function {
    /// [`Shared::id`] of the backend whose modules it is of.
    pub(super) backend: u64,
    plain: Handle<CUfunc_st>,
    sm90: Option<Handle<CUfunc_st>>,
    sm90a: Option<Handle<CUfunc_st>>,
    routed: Option<Handle<CUfunc_st>>,
    /// Clusters of that for 9.0 alone that fit on the device at once.
    pub(super) clusters: u32,
}

impl Function {
    /// The kernel for a launch: the fastest one, but for decode where z has no room for sums in parts.
    pub(super) fn serves(&self, kernel: Kernel, params: &Params) -> (Variant, Handle<CUfunc_st>) {
        let decode = matches!(kernel, Kernel::BgmvShrink | Kernel::BgmvExpand);
        let usual = !decode || params.z_parts >= Z_PARTS;
        match (self.routed, self.sm90a, self.sm90) {
            (Some(function), ..) if routed::serves(kernel, params) => (Variant::Routed, function),
            (_, Some(function), _) if sm90a::serves(kernel, params) => (Variant::Sm90a, function),
            (.., Some(function)) if usual => (Variant::Sm90, function),
            _ => (Variant::Plain, self.plain),
        }
    }
}

/// Modules loaded so far, and their kernels.
#[derive(Debug, Default)]
pub(super) struct Modules(Mutex<Loaded>);

#[derive(Debug, Default)]
struct Loaded {
    modules: BTreeMap<(Kernel, Variant), Handle<CUmod_st>>,
    functions: BTreeMap<(Kernel, Spec), Arc<Function>>,
}

impl Modules {
    /// Unloads all.
    ///
    /// # Safety
    /// Their context is current, and no work, now or later, uses their kernels.
    pub(super) unsafe fn unload(&self) {
        let mut loaded = lock(&self.0);
        loaded.functions.clear();
        for module in std::mem::take(&mut loaded.modules).into_values() {
            // SAFETY: loaded by `compile`, unloaded once.
            let _ = unsafe { sys::cuModuleUnload(module.0) };
        }
    }
}

/// Compiles a kernel, or finds it compiled.
pub(super) fn load(shared: &Shared, kernel: Kernel, spec: Spec) -> Result<Pipeline> {
    let mut loaded = lock(&shared.modules.0);
    if let Some(function) = loaded.functions.get(&(kernel, spec)) {
        return Ok(Pipeline::new(kernel, spec, function.clone()));
    }
    let _bound = shared.device.bind()?;
    let mut function = |variant: Variant| {
        let module = match loaded.modules.get(&(kernel, variant)) {
            Some(module) => *module,
            None => {
                let module = compile(kernel, variant)?;
                loaded.modules.insert((kernel, variant), module);
                module
            }
        };
        find(module, kernel, variant, spec, shared.device.room)
    };
    let (device, room) = (&shared.device, shared.device.room);
    let mut faster = |variant: Variant| {
        let fits = variant <= device.limit && variant.block(kernel, room).1 <= room.shared;
        let serves = fits && variant.serves(device.capability, kernel, spec);
        serves.then(|| function(variant)).transpose()
    };
    let [sm90, sm90a, routed] = [Variant::Sm90, Variant::Sm90a, Variant::Routed].map(&mut faster);
    let (sm90, sm90a, routed) = (sm90?, sm90a?, routed?);
    let clusters = sm90a.map_or(Ok(0), |function| clusters(function, kernel, room))?;
    let plain = function(Variant::Plain)?;
    let function = Arc::new(Function { backend: shared.id, plain, sm90, sm90a, routed, clusters });
    loaded.functions.insert((kernel, spec), function.clone());
    Ok(Pipeline::new(kernel, spec, function))
}

/// Has the driver compile the PTX for the current context's device. The driver keeps the result on disk.
fn compile(kernel: Kernel, variant: Variant) -> Result<Handle<CUmod_st>> {
    let started = std::time::Instant::now();
    let image = CString::new(variant.ptx(kernel)).map_err(|_| Error::Driver {
        call: "cuModuleLoadData",
        message: format!("{}.ptx holds a zero byte", kernel.name()),
    })?;
    let mut log = [0u8; 8192];
    let mut options = [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // The size goes into the pointer's place by value.
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(log.len())];
    let mut module: CUmodule = ptr::null_mut();
    // SAFETY: the image ends in a zero byte; both options have a value of the kind that the driver's manual
    // gives; `log` is writable for the length given; writes one handle.
    let code = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            image.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    check("cuModuleLoadDataEx", code).map_err(|error| match error {
        Error::Driver { call, message } => {
            let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
            let log = String::from_utf8_lossy(&log[..end]);
            Error::Driver { call, message: format!("{}.ptx: {message}: {}", kernel.name(), log.trim()) }
        }
        other => other,
    })?;
    tracing::debug!(kernel = kernel.name(), elapsed = ?started.elapsed(), "PTX compiled");
    Ok(Handle(module))
}

/// The entry for `spec`, put on the device now and not at its first launch, which may be in a capture.
fn find(
    module: Handle<CUmod_st>,
    kernel: Kernel,
    variant: Variant,
    spec: Spec,
    room: Room,
) -> Result<Handle<CUfunc_st>> {
    let entry = entry(kernel, spec);
    let missing = |message| Error::Driver { call: "cuModuleGetFunction", message };
    let name = CString::new(entry.as_str()).map_err(|error| missing(error.to_string()))?;
    let mut function = ptr::null_mut();
    // SAFETY: the module is loaded; the name ends in a zero byte; writes one handle.
    check("cuModuleGetFunction", unsafe { sys::cuModuleGetFunction(&mut function, module.0, name.as_ptr()) }).map_err(
        |error| match error {
            Error::Driver { message, .. } => missing(format!("{entry}: {message}")),
            other => other,
        },
    )?;
    let mut threads = 0;
    let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
    // SAFETY: a function of a loaded module; writes one integer.
    check("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&mut threads, most, function) })?;
    let (needed, shared) = variant.block(kernel, room);
    if (threads as u32) < needed {
        return Err(missing(format!("{entry} runs with at most {threads} threads a block, {needed} are needed")));
    }
    let room =
        (shared > 0).then_some((CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared as i32));
    let carveout = variant.carveout(kernel);
    let carveout =
        carveout.map(|part| (CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, part));
    for (attribute, value) in room.into_iter().chain(carveout) {
        // SAFETY: a function of a loaded module.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(function, attribute, value) })?;
    }
    Ok(Handle(function))
}

/// Clusters of a kernel of [`sm90a`] that fit on the current context's device at once.
fn clusters(function: Handle<CUfunc_st>, kernel: Kernel, room: Room) -> Result<u32> {
    let (threads, shared) = sm90a::block(kernel, MAX_RANK);
    let blocks = sm90a::cluster(kernel);
    if blocks == 1 {
        return Ok(room.multiprocessors);
    }
    let mut cluster = CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: CUlaunchAttributeValue {
            clusterDim: CUlaunchAttributeValue_union__bindgen_ty_1 { x: blocks, y: 1, z: 1 },
        },
    };
    let config = CUlaunchConfig {
        gridDimX: room.multiprocessors / blocks * blocks,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shared,
        hStream: ptr::null_mut(),
        attrs: &mut cluster,
        numAttrs: 1,
    };
    let mut most = 0;
    // SAFETY: a function of a loaded module; `config` and the attribute that it points to outlive the call, which writes one integer.
    check("cuOccupancyMaxActiveClusters", unsafe {
        sys::cuOccupancyMaxActiveClusters(&mut most, function.0, &config)
    })?;
    Ok(u32::try_from(most).unwrap_or(0).max(1))
}

/// Name of the entry in the PTX.
pub(super) fn entry(kernel: Kernel, spec: Spec) -> String {
    format!("lorapool_{}_{}_{}", kernel.name(), spec.act, spec.weight)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_without_room_for_parts_is_served_by_the_plain_kernels_and_prefill_of_many_ranks_by_the_widest() {
        let [plain, fast, wide, short] = [1, 2, 3, 4].map(|at| Handle(ptr::without_provenance_mut(at)));
        let (sm90, sm90a, routed) = (Some(fast), Some(wide), Some(short));
        let function = Function { backend: 0, plain, sm90, sm90a, routed, clusters: 15 };
        let packed = Params { packs_at: 40, z_parts: Z_PARTS, ..Params::default() };
        for (kernel, params, expected) in [
            (Kernel::BgmvShrink, packed, Variant::Sm90),
            (Kernel::BgmvExpand, packed, Variant::Sm90),
            (Kernel::BgmvExpand, Params::default(), Variant::Plain),
            (Kernel::BgmvShrink, Params { z_parts: 0, ..packed }, Variant::Plain),
            (Kernel::BgmvShrink, Params { x_rows_at: 8, packs_at: 0, ..packed }, Variant::Sm90),
            (Kernel::SgmvShrink, Params::default(), Variant::Sm90),
            (Kernel::SgmvShrink, Params { x_rows_at: 8, ..Params::default() }, Variant::Sm90),
            (Kernel::SgmvShrink, Params { sites: 3, max_rank: 32, ..Params::default() }, Variant::Sm90),
            (Kernel::SgmvShrink, Params { sites: 3, max_rank: 33, ..Params::default() }, Variant::Sm90a),
            (Kernel::SgmvShrink, Params { experts: 8, sites: 1, max_rank: 64, ..Params::default() }, Variant::Routed),
            (Kernel::SgmvShrink, Params { experts: 8, sites: 1, max_rank: 65, ..Params::default() }, Variant::Sm90a),
            (Kernel::SgmvExpand, Params { max_rank: 32, ..Params::default() }, Variant::Sm90),
            (Kernel::SgmvExpand, Params { max_rank: 256, ..Params::default() }, Variant::Sm90a),
            (Kernel::SgmvExpand, Params { max_rank: 257, ..Params::default() }, Variant::Sm90),
        ] {
            assert_eq!(function.serves(kernel, &params).0, expected, "{kernel:?}");
        }
    }
}
