//! Many LoRA adapters resident on one GPU, a different one for every row of a batch.

pub mod adapter;
pub mod backend;
pub mod conformance;
pub mod contract;
mod dtype;
mod error;
pub mod manager;
mod memory;
pub mod ops;
pub mod pool;

pub use dtype::DType;
pub use error::{Error, Holder, Result};
pub use memory::{Allocation, DevicePtr, Region};

/// The README's program, compiled and run with the documentation's tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
