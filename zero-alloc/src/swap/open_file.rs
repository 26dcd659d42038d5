//! The open file that handles and lanes share: its space, its notices, its counters.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;
use rustix::process::Resource;

use super::SwapError;
use super::options::SwapOptions;
use super::request::TransferRequest;

/// A file without a name, whose space is reserved.
#[derive(Debug)]
pub(super) struct OpenFile {
    pub(super) file: File,
    pub(super) dir: PathBuf,
    pub(super) bytes: u64,
    pub(super) options: SwapOptions,
    /// Whether lanes use io_uring.
    pub(super) uring: bool,
    /// Whether streams only record the transfers: there is no file.
    pub(super) recorded: bool,
    pub(super) notices: Mutex<Vec<String>>,
    pub(super) read_bytes: AtomicU64,
    pub(super) written_bytes: AtomicU64,
    #[cfg(any(test, feature = "testing"))]
    pub(super) faults: super::fault::Faults,
    /// Addresses of the file's bytes in the seeded scheduler's checks; no memory has them.
    #[cfg(any(test, feature = "testing"))]
    pub(super) shadow: usize,
}

/// The next free addresses for [`OpenFile::shadow`], above those that programs use.
#[cfg(any(test, feature = "testing"))]
static SHADOW: std::sync::atomic::AtomicUsize =
    std::sync::atomic::AtomicUsize::new(1 << (usize::BITS - 1));

impl OpenFile {
    pub(super) fn new(file: File, dir: &Path, bytes: u64, options: SwapOptions) -> Self {
        Self {
            file,
            dir: dir.into(),
            bytes,
            options,
            uring: false,
            recorded: false,
            notices: Mutex::default(),
            read_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            #[cfg(any(test, feature = "testing"))]
            faults: Default::default(),
            #[cfg(any(test, feature = "testing"))]
            shadow: SHADOW.fetch_add(bytes as usize, std::sync::atomic::Ordering::Relaxed),
        }
    }

    /// The failure of a request.
    pub(super) fn failed(&self, request: &TransferRequest, error: io::Error) -> SwapError {
        let TransferRequest { offset, bytes, .. } = *request;
        SwapError::Transfer {
            dir: self.dir.clone(),
            op: request.op(),
            offset,
            bytes,
            error,
        }
    }

    /// The failure of a request that is not back within the limit.
    pub(super) fn late(&self, request: &TransferRequest) -> SwapError {
        let TransferRequest { offset, bytes, .. } = *request;
        SwapError::Late {
            dir: self.dir.clone(),
            op: request.op(),
            offset,
            bytes,
            limit: self.options.limit,
        }
    }

    /// Adds a notice, once.
    pub(super) fn notice(&self, text: String) {
        let mut notices = self.notices.lock();
        if !notices.contains(&text) {
            notices.push(text);
        }
    }

    /// Adds the notice that threads replace io_uring.
    pub(super) fn notice_threads(&self, error: &io::Error) {
        let remedy = match error.raw_os_error() {
            Some(libc::ENOMEM) => "raise ulimit -l (locked memory), or use a smaller queue depth",
            Some(libc::EMFILE | libc::ENFILE) => "raise ulimit -n (open files)",
            _ => {
                "allow io_uring_setup (a container's seccomp profile, sysctl kernel.io_uring_disabled)"
            }
        };
        self.notice(format!(
            "the kernel refuses io_uring ({error}): {} threads a lane read and write the swap file instead, slower; {remedy}",
            self.options.queue_depth
        ));
    }

    pub(super) fn system(&self, call: &'static str, error: io::Error) -> SwapError {
        let advice = match call {
            "io_uring_setup" => {
                "allow it (a container's seccomp profile, sysctl kernel.io_uring_disabled), or use SwapEngine::Auto"
            }
            "fallocate" => "name a folder on a local disk, and check ulimit -f",
            _ => "check ulimit -l, ulimit -n and ulimit -u, or use a smaller queue depth",
        };
        SwapError::System {
            dir: self.dir.clone(),
            call,
            error,
            advice,
        }
    }

    /// Reserves the space of the whole file; where the file system cannot, writes it once.
    pub(super) fn reserve(&self) -> Result<(), SwapError> {
        let free_bytes = free_bytes(&self.file).map_err(|error| self.system("fstatvfs", error))?;
        let result = if self.bytes > free_bytes {
            // Not tried: the disk would be full meanwhile.
            Err(Errno::NOSPC.into())
        } else if self.bytes > max_file_bytes() {
            // Not tried: the system would send a signal.
            Err(Errno::FBIG.into())
        } else {
            match allocate(&self.file, self.bytes) {
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => write_out(&self.file, self.bytes),
                result => result.map_err(io::Error::from),
            }
        };

        result.map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::NOSPC | Errno::DQUOT) => SwapError::DiskFull {
                dir: self.dir.clone(),
                needed_bytes: self.bytes,
                free_bytes,
            },
            _ => self.system("fallocate", error),
        })
    }

    /// Reports to the seeded scheduler that the running operation accesses a range of the file.
    pub(super) fn note_access(&self, offset: u64, bytes: usize, write: bool) {
        #[cfg(any(test, feature = "testing"))]
        crate::device::watch::touch(self.shadow + offset as usize, bytes, write);
        #[cfg(not(any(test, feature = "testing")))]
        let _ = (offset, bytes, write);
    }

    pub(super) fn set_direct(&self) {
        let dir = self.dir.display();
        if file_system(&self.file) == Some(libc::TMPFS_MAGIC as u64) {
            self.notice(format!(
                "swap folder {dir} is a file system in memory: nothing leaves the memory; name a folder on a disk"
            ));
        }
        if !self.options.direct {
            return;
        }
        let direct = rustix::fs::fcntl_getfl(&self.file)
            .and_then(|flags| rustix::fs::fcntl_setfl(&self.file, flags | OFlags::DIRECT));
        if let Err(error) = direct {
            let error = io::Error::from(error);
            self.notice(format!(
                "swap folder {dir}: the file system refuses O_DIRECT ({error}): transfers go through the page cache, slower and with more memory; name a folder on ext4 or XFS"
            ));
        }
    }
}

/// The free bytes of the file's disk.
fn free_bytes(file: &File) -> io::Result<u64> {
    let stat = rustix::fs::fstatvfs(file)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// The kind of the file system.
fn file_system(file: &File) -> Option<u64> {
    let stat = rustix::fs::fstatfs(file).ok()?;
    Some(stat.f_type as u64)
}

/// The largest file that the process may write.
fn max_file_bytes() -> u64 {
    let limit = rustix::process::getrlimit(Resource::Fsize);
    limit.current.unwrap_or(u64::MAX)
}

/// Allocates the space of the whole file.
fn allocate(file: &File, bytes: u64) -> rustix::io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes))
}

fn write_out(file: &File, bytes: u64) -> io::Result<()> {
    let zeros = vec![0; 1 << 20];
    for at in (0..bytes).step_by(zeros.len()) {
        let len = (bytes - at).min(zeros.len() as u64) as usize;
        file.write_all_at(&zeros[..len], at)?;
    }
    file.sync_data()
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn file_systems_without_allocation() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = tempfile::tempfile_in(dir.path()).expect("a file");
        write_out(&file, (1 << 20) + 4096).expect("room");
        let meta = file.metadata().expect("open");
        assert_eq!((meta.len(), meta.nlink()), ((1 << 20) + 4096, 0));
        assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 0);
    }
}
