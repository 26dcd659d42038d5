//! The file: its options, its creation, its counters.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;
use rustix::process::Resource;

use super::uring::Uring;
use super::{SwapError, SwapLane};

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

/// Options of a [`SwapFile`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SwapOptions {
    /// Requests in flight at most in each lane. Default 32.
    pub queue_depth: usize,
    /// The largest request, in bytes: a multiple of [`SwapFile::ALIGN_BYTES`]. Default 1 MiB.
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

impl SwapOptions {
    /// Sets [`SwapOptions::queue_depth`].
    #[must_use]
    pub fn queue_depth(mut self, queue_depth: usize) -> Self {
        self.queue_depth = queue_depth;
        self
    }

    /// Sets [`SwapOptions::request_bytes`].
    #[must_use]
    pub fn request_bytes(mut self, request_bytes: usize) -> Self {
        self.request_bytes = request_bytes;
        self
    }

    /// Sets [`SwapOptions::engine`].
    #[must_use]
    pub fn engine(mut self, engine: SwapEngine) -> Self {
        self.engine = engine;
        self
    }

    /// Sets [`SwapOptions::direct`].
    #[must_use]
    pub fn direct(mut self, direct: bool) -> Self {
        self.direct = direct;
        self
    }

    /// Sets [`SwapOptions::limit`].
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }
}

/// A file without a name. Cheap to clone; its space is free again once all clones and lanes are
/// dropped.
#[derive(Clone, Debug)]
pub struct SwapFile(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
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

/// The next free addresses for [`Inner::shadow`], above those that programs use.
#[cfg(any(test, feature = "testing"))]
static SHADOW: std::sync::atomic::AtomicUsize =
    std::sync::atomic::AtomicUsize::new(1 << (usize::BITS - 1));

impl SwapFile {
    /// Offsets, lengths and addresses of transfers are multiples of this.
    pub const ALIGN_BYTES: usize = 4096;

    /// Creates a file of `bytes` bytes, all zero, in the folder `dir`, and reserves its space on
    /// the disk.
    ///
    /// # Errors
    /// The folder is missing, the disk has too little free space, an option is invalid, or io_uring
    /// was requested and the kernel refuses it.
    pub fn create(dir: &Path, bytes: u64, options: SwapOptions) -> Result<Self, SwapError> {
        check(&options)?;
        let folder = |error| SwapError::Folder {
            dir: dir.into(),
            error,
        };
        if !std::fs::metadata(dir).map_err(folder)?.is_dir() {
            return Err(folder(io::ErrorKind::NotADirectory.into()));
        }
        let file = tempfile::tempfile_in(dir).map_err(folder)?;
        let mut inner = Inner::new(file, dir, bytes, options);
        inner.reserve()?;
        inner.set_direct();
        inner.choose_engine()?;
        Ok(Self(Arc::new(inner)))
    }

    /// A file of `bytes` bytes for streams that only record: it takes no space, and `dir` need not
    /// exist.
    ///
    /// # Errors
    /// An option is invalid, or the system has no `/dev/null`.
    pub(super) fn recorded(
        dir: &Path,
        bytes: u64,
        options: SwapOptions,
    ) -> Result<Self, SwapError> {
        check(&options)?;
        let file = File::open("/dev/null").map_err(|error| SwapError::Folder {
            dir: "/dev".into(),
            error,
        })?;
        Ok(Self(Arc::new(Inner {
            recorded: true,
            ..Inner::new(file, dir, bytes, options)
        })))
    }

    /// The size in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// The parts that are slower than requested, with a remedy; empty if none is.
    pub fn notices(&self) -> Vec<String> {
        self.0.notices.lock().clone()
    }

    /// Makes a lane. A lane has its own queue of requests: its operations run one after another,
    /// those of different lanes at the same time. With [`SwapEngine::Auto`] it uses threads if the
    /// kernel refuses it io_uring.
    ///
    /// # Errors
    /// The system is out of threads, descriptors or memory.
    pub fn lane(&self) -> Result<SwapLane, SwapError> {
        SwapLane::new(Arc::clone(&self.0))
    }

    /// The bytes that all lanes have read so far.
    pub fn read_bytes(&self) -> u64 {
        self.0.read_bytes.load(Ordering::Relaxed)
    }

    /// The bytes that all lanes have written so far.
    pub fn written_bytes(&self) -> u64 {
        self.0.written_bytes.load(Ordering::Relaxed)
    }

    /// Makes a request fail: the one after the next `after` ones, counted over all lanes.
    #[cfg(any(test, feature = "testing"))]
    pub fn inject(&self, after: u64, fault: super::Fault) {
        self.0.faults.inject(after, fault);
    }
}

/// Checks the options of a file.
fn check(options: &SwapOptions) -> Result<(), SwapError> {
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

    if request_bytes == 0
        || request_bytes > 1 << 30
        || !request_bytes.is_multiple_of(SwapFile::ALIGN_BYTES)
    {
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

impl Inner {
    fn new(file: File, dir: &Path, bytes: u64, options: SwapOptions) -> Self {
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
            shadow: SHADOW.fetch_add(bytes as usize, Ordering::Relaxed),
        }
    }

    /// Adds a notice, once.
    pub(super) fn notice(&self, text: String) {
        let mut notices = self.notices.lock();
        if !notices.contains(&text) {
            notices.push(text);
        }
    }

    fn choose_engine(&mut self) -> Result<(), SwapError> {
        if self.options.engine == SwapEngine::Threads {
            return Ok(());
        }
        match Uring::new(self) {
            Ok(_) => self.uring = true,
            Err(error) if self.options.engine == SwapEngine::Auto => self.notice_threads(&error),
            Err(error) => return Err(self.system("io_uring_setup", error)),
        }
        Ok(())
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
    fn reserve(&self) -> Result<(), SwapError> {
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

    fn set_direct(&self) {
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
    fn file_has_its_space_and_no_name() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = SwapFile::create(dir.path(), 1 << 20, SwapOptions::default()).expect("room");
        let meta = file.0.file.metadata().expect("open");
        assert_eq!((meta.len(), meta.nlink()), (1 << 20, 0));
        assert!(meta.blocks() * 512 >= 1 << 20, "{} blocks", meta.blocks());
    }

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
