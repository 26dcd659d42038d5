//! The lock that admits one run at a time to a directory.

use std::fs::File;
use std::io::Write;

use crate::CkptError;
use crate::format::catalog::LOCK;
use crate::io::dir::Dir;

/// A locked directory. The system releases the lock when the process ends, however it ends.
pub(crate) struct Lock {
    file: File,
}

impl Lock {
    /// Locks the directory for this process; `None` if the file system has no locks.
    pub(crate) fn acquire(dir: &Dir) -> Result<Option<Self>, CkptError> {
        let mut file = dir.open_or_create_file(LOCK)?;
        match file.try_lock() {
            Ok(()) => {
                let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
                let _ = file.set_len(0);
                let _ = write!(file, "process {} on {}", std::process::id(), host.trim());
                Ok(Some(Self { file }))
            }
            Err(std::fs::TryLockError::WouldBlock) => {
                let holder = dir.read_small(LOCK, 4096).unwrap_or_default();
                let holder: String = String::from_utf8_lossy(&holder).chars().take(200).collect();
                Err(CkptError::Busy { dir: dir.path().into(), holder })
            }
            Err(std::fs::TryLockError::Error(_)) => Ok(None),
        }
    }
}

impl Drop for Lock {
    /// Unlocks explicitly: closing the file would not suffice if a forked process had inherited it.
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}
