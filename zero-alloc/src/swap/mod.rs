//! Memory on a disk: a file without a name, which streams of the host read and write (Linux).
//!
//! A [`SwapFile`] reserves its whole length when it is created. Its **lanes** transfer ranges of it
//! from and to host memory, past the page cache (`O_DIRECT`), by io_uring; where the kernel refuses
//! io_uring, a pool of threads reads and writes. Each transfer is one operation of a stream, so
//! that events order it and the seeded scheduler checks it.
//!
//! The file has no name (`O_TMPFILE`, else it is created and unlinked at once): no other run finds
//! it, and its space is free again when the process ends, however it ends. So two runs share a
//! folder without a lock, nothing needs to be cleaned up, and no tool takes it for a checkpoint.
//! `lsof +L1` shows it.
//!
//! [`SwapParts`] and [`SwapRing`] are what programs use that offload: parts of a file, which
//! operations of a stream read, use and write through a few buffers.
//!
//! A transfer returns only when the kernel has returned every request, since the buffers belong to
//! the caller. If a request stays away for twice the limit, the process is aborted: its buffer must
//! not be used again.
//!
//! ```
//! use std::time::Duration;
//! use zero_alloc::device::{DType, Device, Stream};
//! use zero_alloc::host::HostDevice;
//! use zero_alloc::swap::{SwapFile, SwapOptions};
//! use zero_alloc::{Pool, Purpose};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = HostDevice::new();
//! let stream = device.create_stream("swap")?;
//! let pool = Pool::new(device, 1 << 20);
//! let block = pool.allocate(4096, DType::F32, Purpose::Optimizer, &stream)?;
//! // SAFETY: the block outlives the operations, which one stream orders.
//! let slice = unsafe { block.slice() };
//! let file = SwapFile::create(&std::env::temp_dir(), 1 << 20, SwapOptions::default())?;
//! let lane = file.lane()?;
//! lane.write(&stream, &[(0, slice)])?; // offset 0
//! lane.read(&stream, &[(0, slice)])?;
//! stream.synchronize(Duration::from_secs(60))?;
//! # Ok(())
//! # }
//! ```

mod buffer;
mod error;
#[cfg(any(test, feature = "testing"))]
mod fault;
mod file;
mod lane;
mod open_file;
mod options;
mod parts;
mod queue;
mod request;
mod ring;
mod threads;
mod uring;

pub use buffer::SwapBuffer;
pub use error::SwapError;
#[cfg(any(test, feature = "testing"))]
pub use fault::Fault;
pub use file::SwapFile;
pub use lane::SwapLane;
pub use options::{SwapEngine, SwapOptions};
pub use parts::SwapParts;
pub use ring::{HeldPart, SwapAccess, SwapRing};
