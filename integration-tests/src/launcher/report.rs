//! How a rank tells its launcher why it failed: in a file that [`REPORT_VARIABLE`] names, so that the launcher can
//! say it once, and say the cause instead of what other ranks saw of it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

/// The variable with the file's name.
pub const REPORT_VARIABLE: &str = "ZERO_REPORT_FILE";

/// How the names of the folders begin; the launcher's process number follows.
const PREFIX: &str = "zero-launch-";

/// Why a rank failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Its exit code.
    pub code: u8,
    /// It failed because another rank had.
    pub echo: bool,
    /// The words, a line.
    pub message: String,
}

impl Report {
    /// Gives it to the launcher that started this process, if one did that wants to know.
    pub fn deliver(&self) -> bool {
        let Some(file) = std::env::var_os(REPORT_VARIABLE).filter(|name| !name.is_empty()) else { return false };
        self.write(Path::new(&file)).is_ok()
    }

    fn write(&self, file: &Path) -> io::Result<()> {
        fs::write(file, serde_json::to_vec(self)?)
    }
}

/// The folder of a job's reports; it goes with this.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> io::Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("{PREFIX}{}-{number}", std::process::id()));
        // What is left of a process that was killed and had the same number.
        let _ = fs::remove_dir_all(&path);
        sweep(&std::env::temp_dir());
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

/// Removes what launchers have left that were killed: folders whose process is there no more.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = || name.to_str()?.strip_prefix(PREFIX)?.split('-').next()?.parse().ok();
        let Some(process) = number().and_then(Pid::from_raw) else { continue };
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
    fn what_a_killed_launcher_left_goes_and_what_a_running_one_has_stays() {
        let parent = tempfile::tempdir().unwrap();
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let folder = |process: u32| parent.path().join(format!("{PREFIX}{process}-0"));
        let (gone, here) = (folder(ended.id()), folder(std::process::id()));
        let other = parent.path().join(format!("{PREFIX}notes"));
        for path in [&gone, &here, &other] {
            fs::create_dir(path).unwrap();
            fs::write(path.join("rank-0.json"), "{}").unwrap();
        }
        sweep(parent.path());
        assert!(!gone.exists());
        assert!(here.exists() && other.exists());
    }

    #[test]
    fn a_report_arrives_and_half_of_one_is_none() {
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
