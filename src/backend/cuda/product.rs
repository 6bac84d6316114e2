//! The base model's own products by cuBLAS, for measurement: what a host's engine spends beside the adapters.
//!
//! The library is looked for when it is first asked for; nothing else of this backend needs it.

#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::cublas::sys::{
    self as blas, cublasComputeType_t, cublasGemmAlgo_t, cublasOperation_t, cublasStatus_t, cudaDataType,
};
use cudarc::driver::sys::CUstream;

use super::NAME;
use super::driver::Handle;
use super::graph::{self, CudaGraph};
use super::memory::Memory;
use super::queue::Shared;
use crate::backend::Product;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Allocation;

/// Memory that the library may use beside the operands, in bytes: as much as it asks for on a Hopper device.
const WORKSPACE: u64 = 32 << 20;

/// A context of the library's. The graph keeps it as it keeps memory.
#[derive(Debug)]
struct Library {
    shared: Arc<Shared>,
    handle: Handle<blas::cublasContext>,
}

impl Allocation for Library {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        let Ok(_bound) = self.shared.device.bind() else { return };
        // SAFETY: made by `open`, destroyed once; no call of ours uses it any more.
        let _ = unsafe { blas::cublasDestroy_v2(self.handle.0) };
    }
}

impl Library {
    fn open(shared: &Arc<Shared>) -> Result<Self> {
        // SAFETY: loading the library runs its initialisers, which make no demand on the caller.
        if !unsafe { blas::is_culib_present() } {
            let reason = "no cuBLAS (libcublas.so, cublas64.dll) is installed".to_owned();
            return Err(Error::Unavailable { backend: NAME, reason });
        }
        let _bound = shared.device.bind()?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle; a context is current.
        check("cublasCreate", unsafe { blas::cublasCreate_v2(&mut handle) })?;
        Ok(Self { shared: shared.clone(), handle: Handle(handle) })
    }
}

fn check(call: &'static str, status: cublasStatus_t) -> Result<()> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => Err(Error::Driver { call, message: format!("{other:?}") }),
    }
}

/// Keeps `products`, one after the other, as a graph.
pub(super) fn capture(shared: &Arc<Shared>, dtype: DType, products: &[Product<'_>]) -> Result<CudaGraph> {
    for product in products {
        product.check(dtype)?;
        [product.x, product.w, product.y].into_iter().try_for_each(|region| Memory::check(region, shared))?;
    }
    let library = Library::open(shared)?;
    let workspace = Memory::alloc(shared, WORKSPACE, "cuBLAS workspace")?;
    let mut owners: Vec<Arc<dyn Allocation>> = vec![workspace.owner().clone()];
    owners.extend(products.iter().flat_map(|p| [p.x, p.w, p.y]).map(|region| region.owner().clone()));
    let handle = library.handle.0;
    let send_all = |stream: CUstream| {
        // SAFETY: handle, stream and workspace are valid in the current context; the workspace is kept by the graph.
        // Setting the stream takes the workspace back, so it comes first.
        unsafe {
            check("cublasSetStream", blas::cublasSetStream_v2(handle, stream.cast()))?;
            let workspace = workspace.ptr().0 as *mut c_void;
            check("cublasSetWorkspace", blas::cublasSetWorkspace_v2(handle, workspace, WORKSPACE as usize))?;
        }
        products.iter().try_for_each(|product| send(handle, dtype, product))
    };
    // The library loads its kernels when they are first used, which no capture allows.
    shared.beside(send_all)?;
    let captured = graph::capture_with(shared, owners, send_all);
    captured.map(|graph| graph.keeping(Arc::new(library)))
}

/// `y = x W^T`. The library's matrices are column-major: its C is y's transpose, out by rows.
fn send(handle: blas::cublasHandle_t, dtype: DType, product: &Product<'_>) -> Result<()> {
    let kind = match dtype {
        DType::F32 => cudaDataType::CUDA_R_32F,
        DType::F16 => cudaDataType::CUDA_R_16F,
        DType::Bf16 => cudaDataType::CUDA_R_16BF,
    };
    let width = |n: u32| c_int::try_from(n).map_err(|_| Error::shape("product", n, "at most 2^31 - 1"));
    let (rows, k, n) = (width(product.rows)?, width(product.in_features)?, width(product.out_features)?);
    let (one, zero) = (1f32, 0f32);
    let (a, b, c) = (product.w.ptr().0, product.x.ptr().0, product.y.ptr().0);
    // SAFETY: the operands hold their matrices (`Product::check`) and are kept by the graph; alpha and beta are read
    // during the call.
    check("cublasGemmEx", unsafe {
        blas::cublasGemmEx(
            handle,
            cublasOperation_t::CUBLAS_OP_T,
            cublasOperation_t::CUBLAS_OP_N,
            n,
            rows,
            k,
            (&raw const one).cast(),
            a as *const c_void,
            kind,
            k,
            b as *const c_void,
            kind,
            k,
            (&raw const zero).cast(),
            c as *mut c_void,
            kind,
            n,
            cublasComputeType_t::CUBLAS_COMPUTE_32F,
            cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
        )
    })
}
