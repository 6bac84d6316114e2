//! Bytes between host and device beside the queue, and the host memory that they go fastest from.

use std::fmt::Debug;
use std::ops::{Deref, DerefMut};

use super::{GpuBackend, check_write};
use crate::error::{Error, Result};
use crate::memory::Region;

/// Bytes that a backend without a second queue sends at a time: work that is submitted meanwhile waits for
/// no more than that.
const PIECE: usize = 4 << 20;

/// What stands behind a [`HostBuffer`]: for backends.
pub trait HostBytes: AsRef<[u8]> + AsMut<[u8]> + Debug + Send + Sync {}

impl HostBytes for Vec<u8> {}

/// Host memory of a fixed length, such as [`GpuBackend::alloc_host`] makes.
#[derive(Debug)]
pub struct HostBuffer(Box<dyn HostBytes>);

impl HostBuffer {
    /// For backends: `bytes` as a buffer.
    pub fn new(bytes: impl HostBytes + 'static) -> Self {
        Self(Box::new(bytes))
    }

    /// `len` zero bytes of ordinary memory.
    pub fn plain(len: usize) -> Self {
        Self::new(vec![0; len])
    }
}

impl Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        (*self.0).as_mut()
    }
}

/// [`GpuBackend::upload`] by way of the queue, a piece at a time.
pub(super) fn upload_in_pieces(gpu: &(impl GpuBackend + ?Sized), dst: &Region, bytes: &[u8]) -> Result<()> {
    check_write(dst, bytes)?;
    for (i, piece) in bytes.chunks(PIECE).enumerate() {
        let to = dst.slice((i * PIECE) as u64, piece.len() as u64)?;
        let ticket = gpu.submit(&mut |encoder| encoder.write(&to, piece))?;
        gpu.wait(ticket)?;
    }
    Ok(())
}

/// [`GpuBackend::download`] by way of the queue, a piece at a time.
pub(super) fn download_in_pieces(gpu: &(impl GpuBackend + ?Sized), src: &Region, to: &mut [u8]) -> Result<()> {
    check_download(src, to)?;
    for (i, piece) in to.chunks_mut(PIECE).enumerate() {
        piece.copy_from_slice(&gpu.read(&src.slice((i * PIECE) as u64, piece.len() as u64)?)?);
    }
    Ok(())
}

/// What every [`GpuBackend::download`] checks first.
///
/// # Errors
/// [`Error::OutOfBounds`] when `to` is longer than `src`.
pub fn check_download(src: &Region, to: &[u8]) -> Result<()> {
    match to.len() as u64 <= src.len() {
        true => Ok(()),
        false => Err(Error::OutOfBounds { offset: 0, len: to.len() as u64, available: src.len() }),
    }
}
