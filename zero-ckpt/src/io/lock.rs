//! The lock that lets one run at a time save into a directory.

use std::fs::File;
use std::io::Write;

use crate::CkptError;
use crate::format::names::LOCK;
use crate::io::dir::Dir;

/// A locked directory. The system also releases the lock when the process ends or is killed.
pub(crate) struct Lock {
    file: File,
}

impl Lock {
    /// Locks the directory for this process. Returns `None` if the file system does not support
    /// locks.
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
                Err(CkptError::Busy {
                    dir: dir.path().into(),
                    holder,
                })
            }
            Err(std::fs::TryLockError::Error(_)) => Ok(None),
        }
    }
}

impl Lock {
    /// Whether a process has locked the directory.
    pub(crate) fn is_taken(dir: &Dir) -> bool {
        let Ok((file, _)) = dir.open_file(LOCK, false) else {
            return false;
        };
        // The lock that this takes is shared and ends at once, but a run that starts just then
        // would find it.
        let taken = file.try_lock_shared();
        let _ = file.unlock();
        matches!(taken, Err(std::fs::TryLockError::WouldBlock))
    }
}

impl Drop for Lock {
    /// Unlocks explicitly: closing the file does not unlock it if a forked process has inherited
    /// it.
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}
