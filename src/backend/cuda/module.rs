//! Kernels of one device: the committed PTX, compiled by the driver.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{self, CUfunc_st, CUfunction_attribute, CUjit_option, CUmod_st, CUmodule};

use super::driver::{Handle, check};
use super::queue::{Shared, lock};
use super::sm90::{self, Room};
use crate::backend::Pipeline;
use crate::contract::{Kernel, MAX_RANK, Params, Spec, THREADS, Z_PARTS};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// The PTX of all types of one kernel, made by `kernels-cuda/build`.
const fn ptx(kernel: Kernel) -> &'static str {
    match kernel {
        Kernel::BgmvShrink => include_str!("../../../kernels-cuda/ptx/bgmv_shrink.ptx"),
        Kernel::BgmvExpand => include_str!("../../../kernels-cuda/ptx/bgmv_expand.ptx"),
        Kernel::SgmvShrink => include_str!("../../../kernels-cuda/ptx/sgmv_shrink.ptx"),
        Kernel::SgmvExpand => include_str!("../../../kernels-cuda/ptx/sgmv_expand.ptx"),
        Kernel::EmbedShrink => include_str!("../../../kernels-cuda/ptx/embed_shrink.ptx"),
        Kernel::OverlayEmbed => include_str!("../../../kernels-cuda/ptx/overlay_embed.ptx"),
        Kernel::OverlayLogits => include_str!("../../../kernels-cuda/ptx/overlay_logits.ptx"),
        Kernel::ExpertRows => include_str!("../../../kernels-cuda/ptx/expert_rows.ptx"),
    }
}

/// The PTX of [`Variant::Sm90`], made by the same; of a kernel without that variant, the plain one.
const fn sm90_ptx(kernel: Kernel) -> &'static str {
    match kernel {
        Kernel::EmbedShrink | Kernel::OverlayEmbed | Kernel::OverlayLogits => ptx(kernel),
        Kernel::BgmvShrink => include_str!("../../../kernels-cuda/ptx/bgmv_shrink_sm90.ptx"),
        Kernel::BgmvExpand => include_str!("../../../kernels-cuda/ptx/bgmv_expand_sm90.ptx"),
        Kernel::SgmvShrink => include_str!("../../../kernels-cuda/ptx/sgmv_shrink_sm90.ptx"),
        Kernel::SgmvExpand => include_str!("../../../kernels-cuda/ptx/sgmv_expand_sm90.ptx"),
        Kernel::ExpertRows => ptx(kernel),
    }
}

/// How a kernel is written. Chosen by device, types and whether a launch is a routed layer's ([`Function::serves`]), so a
/// row's bits are the same in every launch of its op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Variant {
    /// As the contract lays out its workgroups: any device, any types.
    Plain,
    /// With tensor cores, clusters and early launches ([`sm90`]): bf16 from compute capability 9.0 on.
    Sm90,
}

impl Variant {
    fn of(capability: (i32, i32), kernel: Kernel, spec: Spec) -> Self {
        let bf16 = spec == Spec { act: DType::Bf16, weight: DType::Bf16 };
        if bf16 && capability >= (9, 0) && kernel.is_pair() { Self::Sm90 } else { Self::Plain }
    }

    fn ptx(self, kernel: Kernel) -> &'static str {
        match self {
            Self::Sm90 => sm90_ptx(kernel),
            Self::Plain => ptx(kernel),
        }
    }

    /// Most threads of a block, and most bytes of shared memory that it asks for.
    fn block(self, kernel: Kernel, room: Room) -> (u32, u32) {
        match self {
            // With the fewest ranks a block has the most warps, with the most ranks the most memory for each.
            Self::Sm90 => {
                let (threads, shared) = sm90::block(kernel, 1, room);
                (threads, shared.max(sm90::block(kernel, MAX_RANK, room).1))
            }
            Self::Plain => (THREADS, 0),
        }
    }
}

/// What a [`Pipeline`] holds: a kernel of a loaded module, in the variants that this device runs.
#[derive(Debug)]
pub(super) struct Function {
    /// [`Shared::id`] of the backend whose modules it is of.
    pub(super) backend: u64,
    plain: Handle<CUfunc_st>,
    sm90: Option<Handle<CUfunc_st>>,
}

impl Function {
    /// The kernel for a launch: the faster one, but for a routed layer's rows, which have no packs or read rows of x that
    /// aren't their own, and for decode where z has no room for sums in parts.
    pub(super) fn serves(&self, kernel: Kernel, params: &Params) -> (Variant, Handle<CUfunc_st>) {
        let decode = matches!(kernel, Kernel::BgmvShrink | Kernel::BgmvExpand);
        let usual = params.x_rows_at == 0 && (!decode || (params.packs_at != 0 && params.z_parts >= Z_PARTS));
        match self.sm90 {
            Some(function) if usual => (Variant::Sm90, function),
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
    let fast = Variant::of(shared.device.capability, kernel, spec) == Variant::Sm90;
    let sm90 = if fast { Some(function(Variant::Sm90)?) } else { None };
    let function = Arc::new(Function { backend: shared.id, plain: function(Variant::Plain)?, sm90 });
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
    if shared > 0 {
        // All of a multiprocessor's memory to blocks, always: a change between two launches would keep the second from
        // starting beside the first.
        for (attribute, value) in [
            (CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared as i32),
            (CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
        ] {
            // SAFETY: a function of a loaded module.
            check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(function, attribute, value) })?;
        }
    }
    Ok(Handle(function))
}

/// Name of the entry in the PTX.
fn entry(kernel: Kernel, spec: Spec) -> String {
    format!("lorapool_{}_{}_{}", kernel.name(), spec.act, spec.weight)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ptx_has_an_entry_for_every_kernel_and_type_with_the_contract_s_arguments() {
        let old = ((7, 0), DType::ALL.to_vec());
        let new = ((9, 0), vec![DType::Bf16]);
        for (kernel, (capability, types)) in Kernel::ALL.into_iter().flat_map(|k| [(k, &old), (k, &new)]) {
            for &act in types {
                for &weight in types {
                    let spec = Spec { act, weight };
                    let name = entry(kernel, spec);
                    let text = Variant::of(*capability, kernel, spec).ptx(kernel);
                    let (_, declaration) = text.split_once(&format!(".visible .entry {name}(")).expect("no such entry");
                    let (arguments, _) = declaration.split_once(')').expect("no end of its arguments");
                    let arguments: Vec<_> = arguments.split(',').map(str::trim).collect();
                    let (params, addresses) = arguments.split_last().expect("no arguments");
                    assert_eq!(addresses.len(), kernel.operands().len(), "{name}");
                    assert!(addresses.iter().all(|a| a.contains(".u64")), "{name}: {addresses:?}");
                    let block = format!("{name}_param_{}[{}]", addresses.len(), size_of::<Params>());
                    assert!(params.ends_with(&block), "{name}: {params}");
                }
            }
        }
    }

    #[test]
    fn a_routed_layer_s_rows_are_served_by_the_plain_kernels_and_all_others_by_the_fast_ones() {
        let [plain, fast] = [1, 2].map(|at| Handle(ptr::without_provenance_mut(at)));
        let function = Function { backend: 0, plain, sm90: Some(fast) };
        let packed = Params { packs_at: 40, z_parts: Z_PARTS, ..Params::default() };
        for (kernel, params, expected) in [
            (Kernel::BgmvShrink, packed, Variant::Sm90),
            (Kernel::BgmvExpand, packed, Variant::Sm90),
            (Kernel::BgmvExpand, Params::default(), Variant::Plain),
            (Kernel::BgmvShrink, Params { z_parts: 0, ..packed }, Variant::Plain),
            (Kernel::BgmvShrink, Params { x_rows_at: 8, ..packed }, Variant::Plain),
            (Kernel::SgmvShrink, Params::default(), Variant::Sm90),
            (Kernel::SgmvShrink, Params { x_rows_at: 8, ..Params::default() }, Variant::Plain),
        ] {
            assert_eq!(function.serves(kernel, &params).0, expected, "{kernel:?}");
        }
    }

    #[test]
    fn the_ptx_is_of_an_isa_that_drivers_of_cuda_12_0_load() {
        for kernel in Kernel::ALL {
            assert!(ptx(kernel).contains("\n.version 8.0\n.target sm_70\n"), "{}", kernel.name());
            let target = if kernel.is_pair() { "sm_90" } else { "sm_70" };
            assert!(sm90_ptx(kernel).contains(&format!("\n.version 8.0\n.target {target}\n")), "{}", kernel.name());
        }
    }
}
