//! What can be wrong with a checkpoint: one variant per cause, with the numbers.

use std::ops::Range;
use std::path::{Path, PathBuf};

/// Why a checkpoint could not be saved, opened or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CkptError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: "write", "rename", ...
        action: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// There is nothing to load.
    #[error("{}: no whole checkpoint here{}", dir.display(), Reasons(reasons))]
    NoCheckpoint {
        /// The directory that was searched.
        dir: PathBuf,
        /// Why each candidate was refused.
        reasons: Vec<String>,
    },
    /// Another live run saves into the directory.
    #[error("{}: another run is saving into this directory ({holder}); give this run another directory", dir.display())]
    Busy {
        /// The directory.
        dir: PathBuf,
        /// Who holds it, as it described itself.
        holder: String,
    },
    /// The manifest is not one.
    #[error("{}: {why}", path.display())]
    BadManifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The manifest has a version that this program does not know.
    #[error("{}: format version {found}; this program reads version {supported}", path.display())]
    UnsupportedVersion {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The version known here.
        supported: u64,
    },
    /// The header of a safetensors file breaks a rule.
    #[error("{}: {why}", path.display())]
    BadHeader {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A file is shorter or longer than the manifest says.
    #[error("{}: {got_bytes} bytes long, the manifest says {expected_bytes}", path.display())]
    WrongLength {
        /// The file.
        path: PathBuf,
        /// Length by the manifest.
        expected_bytes: u64,
        /// Length found.
        got_bytes: u64,
    },
    /// Bytes of a file do not have the checksum that was recorded.
    #[error(
        "{}: damaged: bytes {} to {} have checksum {got:016x}, recorded was {expected:016x}",
        path.display(), range.start, range.end
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Byte range in the file.
        range: Range<u64>,
        /// Recorded checksum (CRC-64/NVME).
        expected: u64,
        /// Checksum of the bytes found.
        got: u64,
    },
    /// A name that could lead outside the directory, or is not a regular file or directory.
    #[error("{}: {name:?} {why}", dir.display())]
    UnsafeName {
        /// The directory.
        dir: PathBuf,
        /// The name found in it or in the manifest.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The checkpoint is of another model.
    #[error("{}: a checkpoint of another model: {difference}", path.display())]
    AnotherModel {
        /// The checkpoint.
        path: PathBuf,
        /// The first difference.
        difference: String,
    },
    /// The checkpoint does not hold a state that was asked for.
    #[error("{}: no state {state:?} in this checkpoint (it holds: {})", path.display(), available.join(", "))]
    MissingState {
        /// The checkpoint.
        path: PathBuf,
        /// The state asked for.
        state: String,
        /// What there is.
        available: Vec<String>,
    },
    /// Elements that no shard file holds.
    #[error("{}: elements {} to {} of unit {unit:?} are in no file", path.display(), range.start, range.end)]
    Uncovered {
        /// The checkpoint.
        path: PathBuf,
        /// The unit.
        unit: String,
        /// The hole.
        range: Range<u64>,
    },
    /// Elements that two shard files hold.
    #[error("{}: elements {} to {} of unit {unit:?} are in two files", path.display(), range.start, range.end)]
    CoveredTwice {
        /// The checkpoint.
        path: PathBuf,
        /// The unit.
        unit: String,
        /// The overlap.
        range: Range<u64>,
    },
    /// A range, unit, parameter or length given by the caller does not exist.
    #[error("{what}: expected {expected}, got {got}")]
    BadArgument {
        /// Which argument of which call.
        what: String,
        /// What would have been right.
        expected: String,
        /// What was given.
        got: String,
    },
    /// The ranks' receipts do not make one checkpoint.
    #[error("the receipts of the ranks do not fit together: {why}")]
    Receipts {
        /// What does not fit.
        why: String,
    },
    /// A rank failed; the message is the error of that rank.
    #[error("rank {rank}: {message}")]
    Rank {
        /// The rank at fault.
        rank: u64,
        /// Its error.
        message: String,
    },
    /// Bytes that came over the network are not a report.
    #[error("a report of {what} cannot be read: {why}")]
    BadFrame {
        /// Whose report.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// The exchange between the ranks failed.
    #[error("the exchange between the ranks failed: {message}")]
    Exchange {
        /// What the communicator said.
        message: String,
    },
    /// A save was begun while as many as the staging buffers allow were in flight.
    #[error("{limit} saves are in flight, one for each staging buffer; complete one first")]
    InFlight {
        /// Staging buffers, hence saves at once.
        limit: usize,
    },
    /// A save was to be completed and none was begun.
    #[error("no save is in flight")]
    NothingInFlight,
    /// There is not enough memory for staging.
    #[error("no memory for a staging buffer of {bytes} bytes")]
    OutOfMemory {
        /// The size asked for.
        bytes: u64,
    },
    /// The copy of the state into staging memory failed.
    #[error("the snapshot failed: {message}")]
    Snapshot {
        /// What the device said.
        message: String,
    },
}

struct Reasons<'a>(&'a [String]);

impl std::fmt::Display for Reasons<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|reason| write!(f, "; {reason}"))
    }
}

impl CkptError {
    pub(crate) fn io(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> CkptError {
        let path = path.as_ref().to_path_buf();
        move |source| CkptError::Io { action, path, source }
    }

    pub(crate) fn os(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(rustix::io::Errno) -> CkptError {
        let make = Self::io(action, path);
        move |errno| make(errno.into())
    }

    pub(crate) fn argument(
        what: impl Into<String>,
        expected: impl std::fmt::Display,
        got: impl std::fmt::Display,
    ) -> CkptError {
        CkptError::BadArgument { what: what.into(), expected: expected.to_string(), got: got.to_string() }
    }
}
