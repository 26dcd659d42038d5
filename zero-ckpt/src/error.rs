//! Errors: one variant per cause, with the numbers.

use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::commands::commands;
use crate::files;

/// A failure to save, open or read a checkpoint.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum CkptError {
    /// A system call failed.
    #[error("cannot {action} {}: {error}{}", path.display(), files::remedy(error))]
    Io {
        /// The attempted action: "write", "rename", ...
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        error: std::io::Error,
    },
    /// The file system has no space for a rank's file.
    #[error(
        "cannot write {}: {error}; this rank's file needs {bytes} bytes, and the folder {} has {free_bytes} bytes free: free \
         space there, or save into another folder",
        path.display(), folder.display()
    )]
    NoSpace {
        path: PathBuf,
        bytes: u64,
        /// The directory of checkpoints.
        folder: PathBuf,
        /// Free bytes there, without those of the file, which is removed.
        free_bytes: u64,
        error: std::io::Error,
    },
    /// The directory was moved or replaced since it was opened.
    #[error(
        "{} was moved or replaced since this run opened it, and is now {now}; move it back, or resume from there",
        path.display()
    )]
    Moved {
        /// The path by which it was opened.
        path: PathBuf,
        /// Its path now, or what is known of it.
        now: String,
    },
    /// The checkpoint was removed while it was opened or read.
    #[error(
        "{} was removed while it was read: a run that saves there keeps its newest checkpoints only ({}); read again, for \
         a newer one",
        path.display(), commands().keep_last
    )]
    Removed { path: PathBuf },
    /// A save failed after its checkpoint was published.
    #[error(
        "{name} is published, but {what}: {error}; the checkpoint is complete: {} finds it",
        commands().resume_text()
    )]
    Published {
        /// The name of the checkpoint.
        name: String,
        /// The failed action: "`latest` could not be updated".
        what: &'static str,
        error: Box<CkptError>,
    },
    /// The directory has no complete checkpoint.
    #[error("{}: no complete checkpoint{}", dir.display(), Reasons(reasons))]
    NoCheckpoint {
        dir: PathBuf,
        /// The defect of each candidate.
        reasons: Vec<String>,
    },
    /// The files of the model are not beside the checkpoint that lists them.
    #[error(
        "{}: the kept files of the model (tokenizer, ...) do not exist; copy this folder from the run's folder of \
         checkpoints",
        path.display()
    )]
    NoModelFiles { path: PathBuf },
    /// Another running process saves into the directory.
    #[error("{}: another run ({holder}) is saving into this directory; choose another directory", dir.display())]
    Busy {
        dir: PathBuf,
        /// Process and host that hold the lock, from the lock file.
        holder: String,
    },
    /// The manifest breaks a rule of the format.
    #[error("{}: invalid manifest: {why}", path.display())]
    BadManifest { path: PathBuf, why: String },
    /// The manifest has an unknown format version.
    #[error("{}: format version {found}; this program reads version {supported}", path.display())]
    UnsupportedVersion {
        path: PathBuf,
        found: u64,
        /// The version that this crate reads.
        supported: u64,
    },
    /// A safetensors file breaks a rule of its format, or its header differs from the manifest.
    #[error("{}: invalid safetensors file: {why}", path.display())]
    BadSafetensors { path: PathBuf, why: String },
    /// `latest`, an index of safetensors files, a `config.json` or a `tensor_parallel.json` is
    /// invalid.
    #[error("{}: {why}", path.display())]
    BadFile { path: PathBuf, why: String },
    /// A file is shorter or longer than the manifest records.
    #[error("{}: {got_bytes} bytes long; the manifest records {expected_bytes}", path.display())]
    WrongLength {
        path: PathBuf,
        expected_bytes: u64,
        got_bytes: u64,
    },
    /// The bytes of a file do not match their recorded checksum.
    #[error(
        "{}: damaged: bytes {} to {} have checksum {got:016x}; recorded is {expected:016x}",
        path.display(), range.start, range.end
    )]
    Corrupt {
        path: PathBuf,
        /// Byte range in the file.
        range: Range<u64>,
        expected: u64,
        /// Checksum of the bytes.
        got: u64,
    },
    /// A name that could lead outside the directory, or not a regular file or directory.
    #[error("{}: {name:?} {why}", dir.display())]
    UnsafeName {
        dir: PathBuf,
        /// The name, from the directory or from a manifest.
        name: String,
        why: &'static str,
    },
    /// The checkpoint belongs to another model.
    #[error("{}: checkpoint of another model: {difference}", path.display())]
    AnotherModel { path: PathBuf, difference: String },
    /// A parameter of the checkpoint cannot be cut over the tensor-parallel ranks that load it.
    #[error("{}: tensor-parallel rank {rank} of {ranks} cannot load its part: {why}", path.display())]
    NoPart {
        path: PathBuf,
        rank: u64,
        /// Tensor-parallel ranks of the loading run.
        ranks: u64,
        why: String,
    },
    /// The checkpoint was saved by a run that is neither this one nor one that it resumed.
    #[error(
        "{}: a checkpoint of another run{}; resume that run, or save into another directory",
        path.display(), run.as_ref().map(|run| format!(" ({run})")).unwrap_or_default()
    )]
    AnotherRun {
        path: PathBuf,
        /// The run that saved it; `None` if it names none or its manifest is damaged.
        run: Option<String>,
    },
    /// The checkpoint does not hold the requested state.
    #[error("{}: the checkpoint has no state {state:?}; it has {}", path.display(), available.join(", "))]
    MissingState {
        path: PathBuf,
        state: String,
        /// The states that it holds.
        available: Vec<String>,
    },
    /// Elements that no shard file holds.
    #[error("{}: elements {} to {} of unit {unit:?} are in no file", path.display(), range.start, range.end)]
    Uncovered {
        path: PathBuf,
        unit: String,
        range: Range<u64>,
    },
    /// Elements that two shard files hold.
    #[error("{}: elements {} to {} of unit {unit:?} are in two files", path.display(), range.start, range.end)]
    CoveredTwice {
        path: PathBuf,
        unit: String,
        range: Range<u64>,
    },
    /// A part of a checkpoint is larger than readers accept.
    #[error(
        "{what} would have {bytes} bytes and readers accept at most {limit_bytes}: it grows with the number of units and, \
         for the manifest, of ranks and with the trainer's state; save fewer, larger units"
    )]
    TooLarge {
        /// The manifest, or the header of a file.
        what: &'static str,
        bytes: u64,
        limit_bytes: u64,
    },
    /// A rank found another checkpoint than rank 0 opened.
    #[error(
        "{}: another checkpoint than rank 0 opened: the manifest has checksum {got:016x}, rank 0 has {expected:016x}; it was \
         replaced meanwhile, or this machine has another directory at this path",
        path.display()
    )]
    NotSelected {
        path: PathBuf,
        /// Checksum of the manifest that rank 0 read.
        expected: u64,
        /// Checksum of this rank's.
        got: u64,
    },
    /// An argument of a call is out of range.
    #[error("{what}: expected {expected}, got {got}")]
    BadArgument {
        what: String,
        expected: String,
        got: String,
    },
    /// The shards of a layout cannot be stored in this way.
    #[error("the state cannot be saved: {why}")]
    NotStorable { why: String },
    /// The files that the ranks staged do not form one checkpoint.
    #[error("the staged files of the ranks do not form one checkpoint: {why}")]
    Mismatch { why: String },
    /// A rank failed; the message is that rank's error.
    #[error("rank {rank}: {message}")]
    Rank { rank: u64, message: String },
    /// A rank does not see the directory that rank 0 saves into.
    #[error(
        "rank {rank}: {message}; all ranks must save into one directory that they share: name a path on a file system that \
         every machine mounts"
    )]
    NotShared {
        rank: u64,
        /// Its directory and that of rank 0.
        message: String,
    },
    /// A save failed after this rank had staged its file, which is kept.
    #[error(
        "{error}; this rank's staged file is kept: {}; if those of all ranks are, {} makes a checkpoint of them",
        path.display(), commands().assemble_text()
    )]
    Kept {
        /// The reason of the failure.
        error: Box<CkptError>,
        /// The staged file, or the directory into which rank 0 has moved it.
        path: PathBuf,
    },
    /// No save of which all files are staged can be assembled.
    #[error("no staged save can be assembled{}", Reasons(reasons))]
    NotAssembled {
        /// The defect of each save or directory.
        reasons: Vec<String>,
    },
    /// A frame received from a rank is malformed.
    #[error("malformed frame from rank {rank}: {why}")]
    BadFrame { rank: u64, why: String },
    /// The exchange between the ranks failed.
    #[error("the exchange between the ranks failed: {message}")]
    Exchange { message: String },
    /// All staging buffers are in use.
    #[error(
        "{limit} saves are in flight, one for each staging buffer; complete one before the next"
    )]
    InFlight {
        /// Number of staging buffers.
        limit: usize,
    },
    /// There is no save to complete.
    #[error("no save is in flight; begin one first")]
    NothingInFlight,
    /// A thread panicked.
    #[error("a thread that saves or opens a checkpoint has panicked")]
    Panicked,
    /// A staging buffer could not be allocated.
    #[error("failed to allocate a staging buffer of {bytes} bytes: out of host memory")]
    OutOfMemory { bytes: u64 },
    /// The copy of the state into the staging buffer failed.
    #[error("the snapshot failed: {message}")]
    Snapshot {
        /// The error of the copy or of the fence.
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
    pub(crate) fn io(
        action: &'static str,
        path: impl AsRef<Path>,
    ) -> impl FnOnce(std::io::Error) -> CkptError {
        let path = path.as_ref().to_path_buf();
        move |error| CkptError::Io {
            action,
            path,
            error,
        }
    }

    pub(crate) fn os(
        action: &'static str,
        path: impl AsRef<Path>,
    ) -> impl FnOnce(rustix::io::Errno) -> CkptError {
        let make = Self::io(action, path);
        move |errno| make(errno.into())
    }

    /// The message of a failed exchange.
    pub(crate) fn into_exchange_message(self) -> String {
        match self {
            CkptError::Exchange { message } => message,
            other => other.to_string(),
        }
    }

    /// Whether the entry that a call names does not exist.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, CkptError::Io { error, .. } if error.kind() == std::io::ErrorKind::NotFound)
    }

    pub(crate) fn argument(
        what: impl Into<String>,
        expected: impl std::fmt::Display,
        got: impl std::fmt::Display,
    ) -> CkptError {
        CkptError::BadArgument {
            what: what.into(),
            expected: expected.to_string(),
            got: got.to_string(),
        }
    }
}
