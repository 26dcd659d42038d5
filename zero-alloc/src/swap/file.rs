//! The handle of a swap file: its creation, its lanes.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::open_file::OpenFile;
use super::options::{ALIGN_BYTES, SwapEngine, SwapOptions, check};
use super::uring::Uring;
use super::{SwapError, SwapLane};

/// A file without a name. Cheap to clone; its space is free again once all clones and lanes are
/// dropped.
#[derive(Clone, Debug)]
pub struct SwapFile(pub(super) Arc<OpenFile>);

impl SwapFile {
    /// Offsets, lengths and addresses of transfers are multiples of this.
    pub const ALIGN_BYTES: usize = ALIGN_BYTES;

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
        let mut open = OpenFile::new(file, dir, bytes, options);
        open.reserve()?;
        open.set_direct();
        choose_engine(&mut open)?;
        Ok(Self(Arc::new(open)))
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
        Ok(Self(Arc::new(OpenFile {
            recorded: true,
            ..OpenFile::new(file, dir, bytes, options)
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

/// Chooses how requests reach the kernel.
fn choose_engine(file: &mut OpenFile) -> Result<(), SwapError> {
    if file.options.engine == SwapEngine::Threads {
        return Ok(());
    }
    match Uring::new(file) {
        Ok(_) => file.uring = true,
        Err(error) if file.options.engine == SwapEngine::Auto => file.notice_threads(&error),
        Err(error) => return Err(file.system("io_uring_setup", error)),
    }
    Ok(())
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
}
