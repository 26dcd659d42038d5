//! The checkpoints of a directory, and which one is the newest.
//!
//! ```text
//! DIR/step-00000015/manifest.json ...      a complete checkpoint, published by one rename
//! DIR/step-00000030/...
//! DIR/step-00000030.old.<random>/...       backup during a replacement; a crash can leave it behind
//! DIR/latest                               "step-00000030 <checksum of the name>"
//! DIR/best                                 as `latest`, the best checkpoint; missing if the run does not compare them
//! DIR/.lock                                locked by rank 0 of the run that saves here
//! DIR/.staging/...                         unpublished files; readers never open them
//! ```

use std::hash::{BuildHasher, Hasher, RandomState};

use crate::format::blocks::checksum;
use crate::format::manifest::Manifest;
use crate::io::dir::Dir;
use crate::load::joined::Joined;
use crate::{CkptError, ModelSpec};

pub(crate) const LATEST: &str = "latest";
pub(crate) const BEST: &str = "best";
pub(crate) const STAGING: &str = ".staging";
pub(crate) const LOCK: &str = ".lock";
const PREFIX: &str = "step-";

/// The name of the checkpoint of a step.
pub(crate) fn step_name(step: u64) -> String {
    format!("{PREFIX}{step:08}")
}

/// Parses the step of a checkpoint's name.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?;
    let step = digits.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

/// A new name for a backup of the checkpoint `name`.
pub(crate) fn backup_name(name: &str) -> String {
    format!("{name}.old.{}", random())
}

/// Parses the checkpoint's name of a backup's name.
pub(crate) fn backup_of(name: &str) -> Option<&str> {
    let (of, rest) = name.split_once('.')?;
    (step_of(of).is_some() && rest.starts_with("old.")).then_some(of)
}

/// Random digits for a unique file name.
pub(crate) fn random() -> String {
    format!("{:016x}", random_number())
}

/// A random number for a unique file name.
pub(crate) fn random_number() -> u64 {
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}

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
/// That of `read`.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_encode_steps_and_backups() {
        assert_eq!(step_name(30), "step-00000030");
        for step in [0, 30, 99_999_999, 100_000_000, u64::MAX] {
            let name = step_name(step);
            let backup = backup_name(&step_name(step));
            assert_eq!((step_of(&name), backup_of(&name)), (Some(step), None));
            assert_eq!(
                (step_of(&backup), backup_of(&backup)),
                (None, Some(name.as_str()))
            );
        }
        for bad in [
            "step-30",
            "step-+0000030",
            "step-",
            "step-00000030.old",
            "latest",
            "step-000000000000000000000099",
        ] {
            assert_eq!((step_of(bad), backup_of(bad)), (None, None), "{bad}");
        }
    }
}
