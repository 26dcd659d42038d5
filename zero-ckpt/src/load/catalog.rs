//! The checkpoints of a directory, and which one is the newest.

use crate::format::file_layout::checksum;
use crate::format::manifest::Manifest;
use crate::format::names::{backup_of, step_of};
use crate::io::dir::Dir;
use crate::load::joined::Joined;
use crate::{CkptError, ModelSpec};

/// The content of `latest` or `best`.
pub(crate) fn pointer_line(name: &str) -> String {
    format!("{name} {:016x}\n", checksum(name.as_bytes()))
}

/// Reads and checks the name in `file`: `latest` or `best`.
pub(crate) fn read_pointer(dir: &Dir, file: &str) -> Result<String, CkptError> {
    let bytes = dir.read_small(file, 4096)?;
    let path = dir.path().join(file);
    let text = String::from_utf8(bytes).unwrap_or_default();
    let name = text.split(' ').next().unwrap_or_default();
    if step_of(name).is_none() || pointer_line(name) != text {
        return Err(CkptError::BadFile {
            path,
            why: "damaged: it is not a checkpoint's name and its checksum".into(),
        });
    }
    Ok(name.into())
}

/// A published checkpoint, from its manifest.
pub(crate) struct Entry {
    /// Name of its directory: a checkpoint's or a backup's.
    pub(crate) name: String,
    pub(crate) sequence: u64,
    /// Its whole model; `None` if its description of tensor-parallel ranks is damaged.
    pub(crate) model: Option<ModelSpec>,
    /// The run that saved it.
    pub(crate) run: Option<String>,
}

/// A checkpoint or backup without a valid manifest.
pub(crate) struct Unreadable {
    pub(crate) name: String,
    pub(crate) reason: String,
}

/// The names of checkpoints and backups, sorted.
pub(crate) fn names(dir: &Dir) -> Result<Vec<String>, CkptError> {
    let mut names = dir.names()?;
    names.retain(|name| step_of(name).is_some() || backup_of(name).is_some());
    Ok(names)
}

/// Maximum number of times that a directory is listed because checkpoints of it were removed.
const LISTINGS: usize = 1000;

/// Calls `read`, which lists the directory's checkpoints and opens one, again while one that it
/// found is removed meanwhile: another process saves there with `--keep-last`.
///
/// # Errors
/// The error of `read`.
pub(crate) fn again_if_removed<T>(
    mut read: impl FnMut() -> Result<T, CkptError>,
) -> Result<T, CkptError> {
    for _ in 1..LISTINGS {
        match read() {
            Err(CkptError::Removed { .. }) => {}
            done => return done,
        }
    }
    read()
}

/// Opens the checkpoint `name` of a listing of `dir` by `open`.
///
/// # Errors
/// [`CkptError::Removed`] if it is gone, or the error of `open`.
pub(crate) fn open_listed<T>(
    dir: &Dir,
    name: &str,
    open: impl FnOnce(Dir) -> Result<T, CkptError>,
) -> Result<T, CkptError> {
    match dir.open_dir(name).and_then(open) {
        Err(_) if !dir.has(name) => Err(CkptError::Removed {
            path: dir.path().join(name),
        }),
        opened => opened,
    }
}

/// Lists all published checkpoints and backups with a valid manifest, oldest save first, and the
/// others by name.
///
/// # Errors
/// [`CkptError::Removed`] if one of them is removed meanwhile, or the directory cannot be read.
pub(crate) fn list(dir: &Dir) -> Result<(Vec<Entry>, Vec<Unreadable>), CkptError> {
    let mut entries = Vec::new();
    let mut unreadable = Vec::new();
    for name in names(dir)? {
        match open_listed(dir, &name, read_entry) {
            Err(removed @ CkptError::Removed { .. }) => return Err(removed),
            Ok((manifest, model)) => entries.push(Entry {
                name,
                sequence: manifest.sequence,
                model,
                run: manifest.run,
            }),
            Err(e) => unreadable.push(Unreadable {
                name,
                reason: e.to_string(),
            }),
        }
    }

    entries.sort_by(|a, b| (a.sequence, &a.name).cmp(&(b.sequence, &b.name)));
    Ok((entries, unreadable))
}

/// The manifest of a checkpoint, and its whole model.
fn read_entry(dir: Dir) -> Result<(Manifest, Option<ModelSpec>), CkptError> {
    let (manifest, ..) = Manifest::read(&dir)?;
    let model = match Joined::read(&dir, &manifest) {
        Ok(None) => Some(manifest.model.clone()),
        Ok(Some(joined)) => Some(ModelSpec {
            units: joined.units,
        }),
        Err(_) => None,
    };
    Ok((manifest, model))
}
