//! The options of a swap file.

use std::time::Duration;

use super::SwapError;

/// Offsets, lengths and addresses of transfers are multiples of this.
pub(super) const ALIGN_BYTES: usize = 4096;

/// How requests reach the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SwapEngine {
    /// io_uring, or threads where the kernel refuses it.
    #[default]
    Auto,
    /// io_uring only.
    IoUring,
    /// `queue_depth` threads a lane, which call `pread` and `pwrite`.
    Threads,
}

/// Options of a [`SwapFile`](super::SwapFile).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SwapOptions {
    /// Requests in flight at most in each lane. Default 32.
    pub queue_depth: usize,
    /// The largest request, in bytes: a multiple of
    /// [`SwapFile::ALIGN_BYTES`](super::SwapFile::ALIGN_BYTES). Default 1 MiB.
    pub request_bytes: usize,
    /// How requests reach the kernel.
    pub engine: SwapEngine,
    /// Whether to bypass the page cache (`O_DIRECT`). Default true.
    pub direct: bool,
    /// How long requests may take. If none of a transfer comes back in this time, the transfer
    /// fails as soon as all have come back; if they do not in the same time again, the process is
    /// aborted, because the kernel may still write to their buffers. Default 2 minutes.
    pub limit: Duration,
}

impl Default for SwapOptions {
    fn default() -> Self {
        Self {
            queue_depth: 32,
            request_bytes: 1 << 20,
            engine: SwapEngine::Auto,
            direct: true,
            limit: Duration::from_secs(120),
        }
    }
}

setters!(SwapOptions {
    queue_depth: usize,
    request_bytes: usize,
    engine: SwapEngine,
    direct: bool,
    limit: Duration,
});

/// Checks the options of a file.
pub(super) fn check(options: &SwapOptions) -> Result<(), SwapError> {
    let SwapOptions {
        queue_depth,
        request_bytes,
        ..
    } = *options;

    if !(1..=4096).contains(&queue_depth) {
        return Err(SwapError::Option {
            name: "queue_depth",
            expected: "1 to 4096",
            got: queue_depth,
        });
    }

    if request_bytes == 0 || request_bytes > 1 << 30 || !request_bytes.is_multiple_of(ALIGN_BYTES) {
        let expected = "a multiple of 4096 bytes, at most 1 GiB";
        return Err(SwapError::Option {
            name: "request_bytes",
            expected,
            got: request_bytes,
        });
    }

    if options.limit.is_zero() {
        return Err(SwapError::Option {
            name: "limit",
            expected: "more than 0",
            got: 0,
        });
    }
    Ok(())
}
