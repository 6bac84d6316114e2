//! A product of many groups of rows, each with a weight of its own, as cuBLAS takes it: arrays of shapes and of addresses.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use cudarc::cublas::sys::{self as blas, cublasComputeType_t, cublasOperation_t, cublasStatus_t, cudaDataType};

use super::NAME;
use super::product::{check, width};
use crate::backend::Product;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Region;

/// `cublasGemmGroupedBatchedEx`, as of CUDA 12.5.
type Call = unsafe extern "C" fn(
    handle: blas::cublasHandle_t,
    transa: *const cublasOperation_t,
    transb: *const cublasOperation_t,
    m: *const c_int,
    n: *const c_int,
    k: *const c_int,
    alpha: *const c_void,
    a: *const *const c_void,
    a_type: cudaDataType,
    lda: *const c_int,
    b: *const *const c_void,
    b_type: cudaDataType,
    ldb: *const c_int,
    beta: *const c_void,
    c: *const *mut c_void,
    c_type: cudaDataType,
    ldc: *const c_int,
    group_count: c_int,
    group_size: *const c_int,
    compute: cublasComputeType_t,
) -> cublasStatus_t;

/// The arrays of one product: an entry for each group that has rows. All but the addresses are read on the host, when the
/// library pleases: they are kept as long as the graph is.
#[derive(Debug)]
pub(super) struct Grouped {
    transposed: Vec<cublasOperation_t>,
    plain: Vec<cublasOperation_t>,
    outputs: Vec<c_int>,
    rows: Vec<c_int>,
    depth: Vec<c_int>,
    one: Vec<f32>,
    zero: Vec<f32>,
    /// Products of each group.
    size: Vec<c_int>,
    /// In device memory: addresses of the groups' weights, then of their inputs, then of their outputs.
    addresses: Region,
}

impl Grouped {
    /// Bytes of addresses that `product` needs.
    pub(super) fn bytes(product: &Product<'_>) -> u64 {
        3 * 8 * product.rows.iter().filter(|rows| **rows > 0).count() as u64
    }

    /// Arrays for `product`, and the addresses that `to`, [`Grouped::bytes`] long, has to hold when it runs.
    pub(super) fn new(product: &Product<'_>, dtype: DType, to: Region) -> Result<(Self, Vec<u64>)> {
        let (depth, outputs) = (u64::from(product.in_features), u64::from(product.out_features));
        let mut rows = Vec::new();
        let mut addresses = [const { Vec::new() }; 3];
        let mut before = 0;
        for (group, count) in (0u64..).zip(product.rows).filter(|(_, count)| **count > 0) {
            rows.push(width(*count)?);
            let elements = [group * outputs * depth, before * depth, before * outputs];
            for ((list, region), at) in addresses.iter_mut().zip([product.w, product.x, product.y]).zip(elements) {
                list.push(region.ptr().0 + at * dtype.size());
            }
            before += u64::from(*count);
        }
        let n = rows.len();
        let arrays = Self {
            transposed: vec![cublasOperation_t::CUBLAS_OP_T; n],
            plain: vec![cublasOperation_t::CUBLAS_OP_N; n],
            outputs: vec![width(product.out_features)?; n],
            depth: vec![width(product.in_features)?; n],
            one: vec![1.0; n],
            zero: vec![0.0; n],
            size: vec![1; n],
            rows,
            addresses: to,
        };
        Ok((arrays, addresses.concat()))
    }

    /// Sends the product to the handle's stream.
    pub(super) fn send(&self, handle: blas::cublasHandle_t, kind: cudaDataType) -> Result<()> {
        let n = self.rows.len();
        if n == 0 {
            return Ok(());
        }
        let call = find()?;
        let at = |part: usize| self.addresses.ptr().0 as usize + part * n * 8;
        // SAFETY: every array has `n` entries, those of addresses in live device memory that holds them before any work
        // runs; a group's matrices lie within its product's regions (`Product::check`, `Grouped::new`); the graph keeps
        // these, the addresses and the arrays.
        check("cublasGemmGroupedBatchedEx", unsafe {
            call(
                handle,
                self.transposed.as_ptr(),
                self.plain.as_ptr(),
                self.outputs.as_ptr(),
                self.rows.as_ptr(),
                self.depth.as_ptr(),
                self.one.as_ptr().cast(),
                at(0) as *const *const c_void,
                kind,
                self.depth.as_ptr(),
                at(1) as *const *const c_void,
                kind,
                self.depth.as_ptr(),
                self.zero.as_ptr().cast(),
                at(2) as *const *mut c_void,
                kind,
                self.outputs.as_ptr(),
                width(n as u32)?,
                self.size.as_ptr(),
                cublasComputeType_t::CUBLAS_COMPUTE_32F,
            )
        })
    }
}

/// The library's function, where its release has it. The library is there.
fn find() -> Result<Call> {
    // SAFETY: the library was found before (`Library::open`), and stays loaded; the function has had this signature since it
    // first came.
    let found = unsafe { blas::culib().get::<Call>(b"cublasGemmGroupedBatchedEx\0").map(|found| *found) };
    found.map_err(|_| {
        let reason = "this cuBLAS has no cublasGemmGroupedBatchedEx, which came with CUDA 12.5".to_owned();
        Error::Unavailable { backend: NAME, reason }
    })
}
