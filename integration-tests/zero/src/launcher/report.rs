//! Error reports of ranks: files named by [`REPORT_VARIABLE`]. The launcher prints only the root
//! cause, once.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tempfile::TempDir;

/// The environment variable with the name of a rank's report file.
pub const REPORT_VARIABLE: &str = "ZERO_REPORT_FILE";

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

fn file_name() -> Option<std::ffi::OsString> {
    std::env::var_os(REPORT_VARIABLE).filter(|name| !name.is_empty())
}

impl Report {
    /// Whether a launcher that reads reports started this process.
    pub fn is_expected() -> bool {
        file_name().is_some()
    }

    /// Writes the report for the launcher. Returns false if no launcher that reads reports started
    /// this process.
    pub fn deliver(&self) -> bool {
        file_name().is_some_and(|file| self.write(Path::new(&file)).is_ok())
    }

    fn write(&self, file: &Path) -> io::Result<()> {
        fs::write(file, serde_json::to_vec(self)?)
    }
}

/// The folder of a job's reports. Dropping it removes the folder. If the launcher is killed, the
/// folder stays in the system's folder for temporary files, empty or with one small file for each
/// rank that failed.
pub(super) struct Folder(TempDir);

impl Folder {
    pub(super) fn new() -> io::Result<Self> {
        TempDir::with_prefix("zero-launch-").map(Self)
    }

    pub(super) fn file(&self, rank: usize) -> PathBuf {
        self.0.path().join(format!("rank-{rank}.json"))
    }

    pub(super) fn read(&self, rank: usize) -> Option<Report> {
        serde_json::from_slice(&fs::read(self.file(rank)).ok()?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_report_is_ignored() {
        let folder = Folder::new().unwrap();
        let report = Report {
            code: 2,
            echo: true,
            message: "rank 1: \"so\"".to_owned(),
        };
        report.write(&folder.file(3)).unwrap();
        assert_eq!(folder.read(3), Some(report));
        assert_eq!(folder.read(2), None);
        fs::write(folder.file(2), "{\"code\":2").unwrap();
        assert_eq!(folder.read(2), None);
    }
}
