//! A file of a folder: its text, or why it is left out.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use zero_ckpt::files;

use super::corpus::TextFile;
use super::foreign::{self, PROBE_BYTES};
use super::start::Start;
use super::{DataError, outputs};

/// Larger files of the default folder are left out: they are rarely written by a person.
pub(super) const MAX_DEFAULT_FILE_BYTES: u64 = 1 << 20;

/// Which files of a folder are data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// The folder is the default: without hidden files, files that a `.gitignore` of the folder
    /// names, build folders (`target`, or with a `CACHEDIR.TAG`) and files above 1 MiB. More files
    /// than this are an error.
    Default { most_files: usize },
    /// The user named the folder: all text files.
    Whole,
}

/// Why a file or folder is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    Large,
    Binary,
    /// A file that is no text, by its first bytes.
    Foreign(&'static str),
    NotUtf8 {
        at: usize,
    },
    FolderLink,
    NoFile,
    Output,
    OutputFolder,
    VersionControl,
}

impl Reason {
    /// The kind of file, for a sum.
    pub(super) fn kind(self) -> &'static str {
        match self {
            Self::Large => "above 1 MiB",
            Self::Binary | Self::Foreign(_) => "binary",
            Self::NotUtf8 { .. } => "not UTF-8",
            Self::FolderLink => "links to folders",
            Self::NoFile => "neither files nor folders",
            Self::Output | Self::OutputFolder => "written by runs",
            Self::VersionControl => "version control",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Large => write!(f, "above 1 MiB"),
            Self::Binary => write!(f, "binary"),
            Self::Foreign(what) => write!(f, "{what}"),
            Self::NotUtf8 { at } => {
                write!(f, "not UTF-8 at byte {at}: convert it, such as with iconv")
            }
            Self::FolderLink => write!(f, "a symbolic link to a folder: pass the folder"),
            Self::NoFile => write!(f, "neither a file nor a folder"),
            Self::Output => write!(f, "written by a run"),
            Self::OutputFolder => write!(f, "checkpoints or a model"),
            Self::VersionControl => write!(f, "version control"),
        }
    }
}

/// The content of a file.
pub(super) enum FileContent<T> {
    Text(T),
    /// Nothing to train on.
    Blank,
    Other {
        reason: Reason,
        bytes: u64,
    },
}

fn read_start(file: &mut File, file_bytes: u64) -> io::Result<Start> {
    let mut bytes = Vec::new();
    let mut start = file.take(PROBE_BYTES as u64);
    start.read_to_end(&mut bytes)?;
    Ok(Start { bytes, file_bytes })
}

/// Why a file is no text, by its first bytes.
fn not_text(start: &Start) -> Option<Reason> {
    if let Some(foreign) = foreign::of(start) {
        return Some(Reason::Foreign(foreign.what));
    }
    if foreign::is_parquet(start) {
        return Some(Reason::Foreign("parquet"));
    }
    start.bytes.contains(&0).then_some(Reason::Binary)
}

/// A file that begins as a text does.
struct Beginning {
    file: File,
    start: Start,
}

/// Opens a file; `Err` within is the content of a file that does not begin as a text does. A large
/// binary file is not read whole.
fn open<T>(path: &Path, scope: Scope) -> Result<Result<Beginning, FileContent<T>>, DataError> {
    let failed = |source| unreadable(path, source);
    let bytes = fs::metadata(path).map_err(failed)?.len();
    if bytes == 0 {
        // Also a file of /proc, whose read may wait.
        return Ok(Err(FileContent::Blank));
    }
    if scope != Scope::Whole && bytes > MAX_DEFAULT_FILE_BYTES {
        let reason = Reason::Large;
        return Ok(Err(FileContent::Other { reason, bytes }));
    }

    let (mut file, _) = files::open(path).map_err(failed)?;
    let start = read_start(&mut file, bytes).map_err(failed)?;
    Ok(match not_text(&start) {
        Some(reason) => Err(FileContent::Other { reason, bytes }),
        None => Ok(Beginning { file, start }),
    })
}

fn unreadable(path: &Path, source: io::Error) -> DataError {
    DataError::Unreadable {
        path: path.to_owned(),
        source,
    }
}

/// Checks a file as [`read_file`] does.
pub(super) fn scan_file(path: &Path, scope: Scope) -> Result<FileContent<TextFile>, DataError> {
    let start = match open(path, scope)? {
        Ok(Beginning { start, .. }) => start,
        Err(content) => return Ok(content),
    };
    let bytes = start.file_bytes;
    let other = |reason| Ok(FileContent::Other { reason, bytes });

    let scanned = match TextFile::scan(path) {
        Ok(scanned) => scanned,
        Err(DataError::NotUtf8 { at, .. }) => return other(Reason::NotUtf8 { at }),
        Err(DataError::Read { source, .. }) => return Err(unreadable(path, source)),
        Err(other) => return Err(other),
    };
    if scanned.is_blank {
        return Ok(FileContent::Blank);
    }
    // What tells an output is in its first lines.
    if outputs::is_output_file(path, &String::from_utf8_lossy(&start.bytes)) {
        return other(Reason::Output);
    }
    Ok(FileContent::Text(scanned))
}

/// The text of a file, which ends a line.
///
/// # Errors
/// [`DataError::Unreadable`].
pub(super) fn read_file(path: &Path, scope: Scope) -> Result<FileContent<String>, DataError> {
    let Beginning { mut file, start } = match open(path, scope)? {
        Ok(beginning) => beginning,
        Err(content) => return Ok(content),
    };
    let bytes = start.file_bytes;
    let other = |reason| Ok(FileContent::Other { reason, bytes });
    let failed = |source| unreadable(path, source);

    let mut content = start.bytes;
    let rest = usize::try_from(bytes)
        .unwrap_or(usize::MAX)
        .saturating_sub(content.len());
    content
        .try_reserve(rest)
        .map_err(|_| failed(io::ErrorKind::OutOfMemory.into()))?;
    file.read_to_end(&mut content).map_err(failed)?;

    let mut text = match String::from_utf8(content) {
        Ok(text) => text,
        Err(error) => {
            return other(Reason::NotUtf8 {
                at: error.utf8_error().valid_up_to(),
            });
        }
    };

    if text.trim().is_empty() {
        return Ok(FileContent::Blank);
    }
    if outputs::is_output_file(path, &text) {
        return other(Reason::Output);
    }
    if !text.ends_with('\n') {
        text.push('\n');
    }

    Ok(FileContent::Text(text))
}
