//! The checkpoint to resume from: the newest whole one of a directory, or a named one.

use std::path::{Path, PathBuf};

use crate::format::manifest::MANIFEST_NAME;
use crate::format::names::step_of_any;
use crate::io::dir::Dir;
use crate::load::catalog;
use crate::save::staged::{newer_staged, staged_hint};
use crate::{CkptError, Reader};

/// The result of [`resolve`].
#[non_exhaustive]
pub struct Resolved {
    /// The directory of checkpoints that holds it.
    pub store_dir: PathBuf,
    /// The checkpoint, of which every byte was verified.
    pub reader: Reader,
    /// Name and defect of each newer checkpoint that is not whole, newest first.
    pub passed_over: Vec<(String, String)>,
    /// The remedy for a newer save of which all files are staged, if there is one and `path` is a
    /// directory of checkpoints.
    pub staged: Option<String>,
}

/// Opens the newest **whole** checkpoint of the directory `path`: the one that was saved last among
/// those of which every byte matches its checksum. If `path` is one checkpoint
/// (`.../step-00000030`), opens and verifies that one. Reads every byte of each checkpoint that it
/// considers.
///
/// # Errors
/// [`CkptError::NoCheckpoint`] with the defect of each candidate, the defect of a named checkpoint,
/// or a failed read.
pub fn resolve(path: impl AsRef<Path>) -> Result<Resolved, CkptError> {
    let path = path.as_ref();
    let root = Dir::open(path)?;
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());

    if root.has(MANIFEST_NAME) || name.is_some_and(|name| step_of_any(&name).is_some()) {
        let reader = Reader::open_one(root, Vec::new()).and_then(verified)?;
        return Ok(Resolved {
            store_dir: reader.store_dir()?,
            reader,
            passed_over: Vec::new(),
            staged: None,
        });
    }

    catalog::again_if_removed(|| newest_whole(&root))
}

/// The newest whole checkpoint of a directory.
///
/// # Errors
/// As [`resolve`], or [`CkptError::Removed`].
fn newest_whole(root: &Dir) -> Result<Resolved, CkptError> {
    let (entries, unreadable) = catalog::list(root)?;
    let mut passed_over = Vec::new();
    for entry in entries.iter().rev() {
        let reader = match Reader::open_listed(root, &entry.name, Vec::new()).and_then(verified) {
            Ok(reader) => reader,
            Err(removed @ CkptError::Removed { .. }) => return Err(removed),
            Err(defect) => {
                passed_over.push((entry.name.clone(), defect.to_string()));
                continue;
            }
        };
        // When an unreadable one was saved is not known; its step decides.
        let newer = unreadable
            .into_iter()
            .filter(|u| step_of_any(&u.name) > Some(reader.manifest.step));
        passed_over.extend(newer.map(|u| (u.name, u.reason)));
        return Ok(Resolved {
            store_dir: root.path().to_owned(),
            reader,
            passed_over,
            staged: newer_staged(root.path()),
        });
    }

    let reasons = passed_over
        .into_iter()
        .chain(unreadable.into_iter().map(|u| (u.name, u.reason)));
    let reasons = reasons
        .map(|(_, reason)| reason)
        .chain(staged_hint(root))
        .collect();

    Err(CkptError::NoCheckpoint {
        dir: root.path().to_owned(),
        reasons,
    })
}

/// Whether the directory `path` holds checkpoints, complete or not. False if it does not exist.
///
/// # Errors
/// The directory cannot be read.
pub fn has_checkpoints(path: impl AsRef<Path>) -> Result<bool, CkptError> {
    Ok(count_checkpoints(path)? > 0)
}

/// The number of checkpoints in `path`, with backups of replaced ones, as [`has_checkpoints`]
/// finds them.
///
/// # Errors
/// The directory cannot be opened or listed.
pub fn count_checkpoints(path: impl AsRef<Path>) -> Result<usize, CkptError> {
    match Dir::open(path.as_ref()) {
        Ok(dir) => Ok(catalog::names(&dir)?.len()),
        Err(error) if error.is_missing() => Ok(0),
        Err(e) => Err(e),
    }
}

/// Verifies every byte of a checkpoint; returns the first defect.
fn verified(reader: Reader) -> Result<Reader, CkptError> {
    let defect = reader.verify().problems.into_iter().next();
    defect.map_or(Ok(reader), Err)
}
