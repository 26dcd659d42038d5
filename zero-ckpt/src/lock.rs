//! One run at a time saves into a directory.

use std::fs::File;
use std::io::Write;

use crate::CkptError;
use crate::catalog::LOCK;
use crate::dir::Dir;

/// A directory held for this run. The system lets go of it when the process ends, however it ends.
pub(crate) struct Lock {
    file: File,
}

impl Lock {
    /// Takes the directory for this run; `None` where the file system has no locks.
    pub(crate) fn take(dir: &Dir) -> Result<Option<Self>, CkptError> {
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
    /// Lets go at once, also where a process forked meanwhile has inherited the file.
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}
