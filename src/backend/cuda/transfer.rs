//! Copies on a stream of their own: the link and the multiprocessors work at once, and no lock is held meanwhile.

#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::check;
use super::memory::{Chunk, Memory};
use super::queue::{Remains, Shared};
use crate::backend::{HostBuffer, HostBytes, check_download, check_write};
use crate::error::{Error, Result};
use crate::memory::Region;

/// Page-locked memory of one owner.
#[derive(Debug)]
struct PageLocked {
    shared: Arc<Shared>,
    /// Until it is dropped.
    chunk: Option<Chunk>,
    len: usize,
}

impl HostBytes for PageLocked {}

impl AsRef<[u8]> for PageLocked {
    fn as_ref(&self) -> &[u8] {
        self.chunk.as_ref().map_or(&[], |chunk| &chunk.bytes()[..self.len])
    }
}

impl AsMut<[u8]> for PageLocked {
    fn as_mut(&mut self) -> &mut [u8] {
        self.chunk.as_mut().map_or(&mut [], |chunk| &mut chunk.bytes_mut()[..self.len])
    }
}

impl Drop for PageLocked {
    fn drop(&mut self) {
        if let Some(chunk) = self.chunk.take() {
            self.shared.inter(Remains::Chunk(chunk));
        }
    }
}

/// `len` zero bytes of page-locked memory.
pub(super) fn alloc_host(shared: &Arc<Shared>, len: usize) -> Result<HostBuffer> {
    let mut chunk = shared.chunk(len)?;
    chunk.bytes_mut().fill(0);
    Ok(HostBuffer::new(PageLocked { shared: shared.clone(), chunk: Some(chunk), len }))
}

/// Copies `bytes` to the start of `dst`.
pub(super) fn upload(shared: &Shared, dst: &Region, bytes: &[u8]) -> Result<()> {
    check_write(dst, bytes)?;
    Memory::check(dst, shared)?;
    shared.beside(|stream| match bytes.len() {
        0 => Ok(()),
        // SAFETY: `dst` holds that many bytes (checked above) of live memory; `bytes` outlive the copy, since
        // `beside` waits for it.
        len => check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(dst.ptr().0, bytes.as_ptr().cast(), len, stream)
        }),
    })
}

/// Copies the start of `src` to `to`.
pub(super) fn download(shared: &Shared, src: &Region, to: &mut [u8]) -> Result<()> {
    check_download(src, to)?;
    Memory::check(src, shared)?;
    shared.beside(|stream| match to.len() {
        0 => Ok(()),
        // SAFETY: `src` holds that many bytes (checked above) of live memory; `to` outlives the copy, since
        // `beside` waits for it.
        len => check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), src.ptr().0, len, stream)
        }),
    })
}

impl Shared {
    /// Runs `send` on a stream beside the queue's and waits for it. The host must not be capturing.
    pub(super) fn beside(&self, send: impl FnOnce(sys::CUstream) -> Result<()>) -> Result<()> {
        if self.capturing()? {
            return Err(Error::Input(
                "the host is capturing its stream: transfers work once the capture has ended".into(),
            ));
        }
        let _bound = self.device.bind()?;
        let stream = self.side_stream()?;
        let sent = send(stream);
        // SAFETY: the stream outlives `self`. A failed copy may have begun: its memory is waited for in any case.
        let waited = check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) });
        sent.and(waited)
    }
}
