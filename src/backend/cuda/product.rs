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
use super::grouped::Grouped;
use super::memory::Memory;
use super::queue::Shared;
use super::transfer;
use crate::backend::Product;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Allocation;

/// Memory that the library may use beside the operands, in bytes: as much as it asks for on a Hopper device.
const WORKSPACE: u64 = 32 << 20;

/// A context of the library's, and the arrays that it is given. The graph keeps it as it keeps memory.
#[derive(Debug)]
struct Library {
    shared: Arc<Shared>,
    handle: Handle<blas::cublasContext>,
    /// Of each product with more groups than one.
    grouped: Vec<Option<Grouped>>,
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
        Ok(Self { shared: shared.clone(), handle: Handle(handle), grouped: Vec::new() })
    }

    /// Makes the arrays of products with groups, and sends the addresses among them.
    fn group(&mut self, dtype: DType, products: &[Product<'_>]) -> Result<()> {
        let lens: Vec<u64> = products.iter().map(|p| if p.rows.len() == 1 { 0 } else { Grouped::bytes(p) }).collect();
        let total = lens.iter().sum();
        let all = Memory::alloc(&self.shared, total, "addresses of products")?;
        let mut addresses: Vec<u64> = Vec::with_capacity((total / 8) as usize);
        for (product, len) in products.iter().zip(lens) {
            let grouped = match product.rows.len() {
                1 => None,
                _ => {
                    let to = all.slice(addresses.len() as u64 * 8, len)?;
                    let (grouped, own) = Grouped::new(product, dtype, to)?;
                    addresses.extend(own);
                    Some(grouped)
                }
            };
            self.grouped.push(grouped);
        }
        transfer::upload(&self.shared, &all, bytemuck::cast_slice(&addresses))
    }
}

pub(super) fn check(call: &'static str, status: cublasStatus_t) -> Result<()> {
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
    let mut library = Library::open(shared)?;
    library.group(dtype, products)?;
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
        products.iter().zip(&library.grouped).try_for_each(|(product, grouped)| match grouped {
            Some(grouped) => grouped.send(handle, kind(dtype)),
            None => send(handle, dtype, product),
        })
    };
    // The library loads its kernels when they are first used, which no capture allows.
    shared.beside(send_all)?;
    let captured = graph::capture_with(shared, owners, send_all);
    captured.map(|graph| graph.keeping(Arc::new(library)))
}

fn kind(dtype: DType) -> cudaDataType {
    match dtype {
        DType::F32 => cudaDataType::CUDA_R_32F,
        DType::F16 => cudaDataType::CUDA_R_16F,
        DType::Bf16 => cudaDataType::CUDA_R_16BF,
    }
}

/// A size as the library takes it.
pub(super) fn width(n: u32) -> Result<c_int> {
    c_int::try_from(n).map_err(|_| Error::shape("product", n, "at most 2^31 - 1"))
}

/// `y = x W^T` of one group. The library's matrices are column-major: its C is y's transpose, out by rows.
fn send(handle: blas::cublasHandle_t, dtype: DType, product: &Product<'_>) -> Result<()> {
    let kind = kind(dtype);
    let (rows, k, n) = (width(product.rows[0])?, width(product.in_features)?, width(product.out_features)?);
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
