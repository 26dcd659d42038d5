//! Errors of the swap file.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::AllocError;
use crate::device::DeviceError;

/// Why a swap file could not be made, or a transfer failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum SwapError {
    /// The folder is missing or cannot hold files.
    #[error("swap folder {}: {error}; name an existing folder on a local disk that this user may write to", dir.display())]
    Folder { dir: PathBuf, error: io::Error },
    /// The disk has too little free space for the whole file.
    #[error(
        "swap folder {}: failed to reserve {needed_bytes} bytes, the disk has {free_bytes} bytes free; free some space or name a folder on another disk",
        dir.display()
    )]
    DiskFull {
        dir: PathBuf,
        /// The size of the file.
        needed_bytes: u64,
        /// The free bytes before the attempt.
        free_bytes: u64,
    },
    /// An option has an invalid value.
    #[error("swap option {name}: expected {expected}, got {got}")]
    Option {
        name: &'static str,
        /// The allowed values.
        expected: &'static str,
        got: usize,
    },
    /// A call of the system failed.
    #[error("swap file in {}: {call}: {error}; {advice}", dir.display())]
    System {
        dir: PathBuf,
        call: &'static str,
        error: io::Error,
        advice: &'static str,
    },
    /// A buffer is not in host memory, or a stream could not be made.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The buffers of a ring could not be allocated.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A request failed.
    #[error("{op} of {bytes} bytes at offset {offset} of the swap file in {}: {error}; {}", dir.display(), advice(error))]
    Transfer {
        dir: PathBuf,
        /// `read` or `write`.
        op: &'static str,
        /// The offset in the file, in bytes.
        offset: u64,
        /// The length of the request.
        bytes: usize,
        error: io::Error,
    },
    /// A request took longer than the limit.
    #[error(
        "{op} of {bytes} bytes at offset {offset} of the swap file in {} took longer than {limit:?}; look for errors of the disk with dmesg, or set a longer SwapOptions::limit",
        dir.display()
    )]
    Late {
        dir: PathBuf,
        /// `read` or `write`.
        op: &'static str,
        /// The offset in the file, in bytes.
        offset: u64,
        /// The length of the request.
        bytes: usize,
        limit: Duration,
    },
}

/// The remedy for a failed request.
fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => {
            "the disk is full although the space was reserved (a thin or copy-on-write volume): free some space or use another disk"
        }
        Some(libc::EFBIG) => "the file size is limited: raise ulimit -f",
        Some(libc::EINVAL) => {
            "the disk may need a coarser alignment: set SwapOptions::direct to false, or use another disk"
        }
        Some(_) => "look for errors of the disk with dmesg, and use a folder on another disk",
        None => "something shortened the file: use a folder that only this run uses",
    }
}
