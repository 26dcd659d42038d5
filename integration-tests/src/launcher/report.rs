//! Error reports of ranks: files named by [`REPORT_VARIABLE`]. The launcher prints only the root cause, once.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

/// The environment variable with the name of a rank's report file.
pub const REPORT_VARIABLE: &str = "ZERO_REPORT_FILE";

/// Prefix of the report folders' names; the launcher's process id follows.
const PREFIX: &str = "zero-launch-";

/// Why a rank failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Its exit code.
    pub code: u8,
    /// Whether the failure of another rank caused this one.
    pub echo: bool,
    /// The error message, one line.
    pub message: String,
}

impl Report {
    /// Writes the report for the launcher. Returns false if no launcher that reads reports started this process.
    pub fn deliver(&self) -> bool {
        let Some(file) = std::env::var_os(REPORT_VARIABLE).filter(|name| !name.is_empty()) else { return false };
        self.write(Path::new(&file)).is_ok()
    }

    fn write(&self, file: &Path) -> io::Result<()> {
        fs::write(file, serde_json::to_vec(self)?)
    }
}

/// The folder of a job's reports. Dropping it removes the folder.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> io::Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("{PREFIX}{}-{number}", std::process::id()));
        // A killed process with the same id may have left one.
        let _ = fs::remove_dir_all(&path);
        remove_stale(&std::env::temp_dir());
        fs::create_dir(&path)?;
        Ok(Self(path))
    }

    pub(super) fn file(&self, rank: usize) -> PathBuf {
        self.0.join(format!("rank-{rank}.json"))
    }

    pub(super) fn read(&self, rank: usize) -> Option<Report> {
        serde_json::from_slice(&fs::read(self.file(rank)).ok()?).ok()
    }
}

/// Removes the folders of launchers that were killed: no process with their id exists.
fn remove_stale(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let id = || name.to_str()?.strip_prefix(PREFIX)?.split('-').next()?.parse().ok();
        let Some(process) = id().and_then(Pid::from_raw) else { continue };
        if test_kill_process(process) == Err(Errno::SRCH) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_stale_folders_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        // No Linux process has an id this high.
        let stale = parent.path().join(format!("{PREFIX}{}-0", i32::MAX));
        let own = parent.path().join(format!("{PREFIX}{}-0", std::process::id()));
        let other = parent.path().join(format!("{PREFIX}notes"));
        for path in [&stale, &own, &other] {
            fs::create_dir(path).unwrap();
            fs::write(path.join("rank-0.json"), "{}").unwrap();
        }
        remove_stale(parent.path());
        assert!(!stale.exists() && own.exists() && other.exists());
    }

    #[test]
    fn truncated_report_is_ignored() {
        let folder = Folder::new().unwrap();
        let report = Report { code: 2, echo: true, message: "rank 1: \"so\"".to_owned() };
        report.write(&folder.file(3)).unwrap();
        assert_eq!(folder.read(3), Some(report));
        assert_eq!(folder.read(2), None);
        fs::write(folder.file(2), "{\"code\":2").unwrap();
        assert_eq!(folder.read(2), None);
        let path = folder.0.clone();
        drop(folder);
        assert!(!path.exists());
    }
}
