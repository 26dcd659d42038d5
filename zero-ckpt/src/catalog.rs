//! The checkpoints of a directory, and which is the newest.
//!
//! ```text
//! DIR/step-00000015/manifest.json ...      a checkpoint, published whole by one rename
//! DIR/step-00000030/...
//! DIR/step-00000030.old.<random>/...       stands aside: another is taking its name, or a crash came between
//! DIR/latest                               "step-00000030 <checksum of the name>"
//! DIR/.lock                                held by rank 0 of the run that saves here
//! DIR/.staging/...                         what is not published yet; readers never look here
//! ```

use std::hash::{BuildHasher, Hasher, RandomState};

use crate::dir::Dir;
use crate::manifest::Manifest;
use crate::plan::checksum;
use crate::{CkptError, ModelSpec};

pub(crate) const LATEST: &str = "latest";
pub(crate) const STAGING: &str = ".staging";
pub(crate) const LOCK: &str = ".lock";
const PREFIX: &str = "step-";

/// The name of the checkpoint of a step.
pub(crate) fn step_name(step: u64) -> String {
    format!("{PREFIX}{step:08}")
}

/// The step of a checkpoint of this name.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?;
    let step = digits.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

/// A name for the checkpoint `name` to stand aside under, while another takes its own.
pub(crate) fn aside_name(name: &str) -> String {
    format!("{name}.old.{}", random())
}

/// The name of what stands aside under this one.
pub(crate) fn aside_of(name: &str) -> Option<&str> {
    let (of, rest) = name.split_once('.')?;
    (step_of(of).is_some() && rest.starts_with("old.")).then_some(of)
}

/// Digits for a name that nobody else takes.
pub(crate) fn random() -> String {
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    format!("{:016x}", hasher.finish())
}

/// The content of `latest`.
pub(crate) fn latest_line(name: &str) -> String {
    format!("{name} {:016x}\n", checksum(name.as_bytes()))
}

/// The name in `latest`; an error says what is wrong with the file.
pub(crate) fn read_latest(dir: &Dir) -> Result<String, CkptError> {
    let bytes = dir.read_small(LATEST, 4096)?;
    let path = dir.path().join(LATEST);
    let text = String::from_utf8(bytes).unwrap_or_default();
    let name = text.split(' ').next().unwrap_or_default();
    if step_of(name).is_none() || latest_line(name) != text {
        return Err(CkptError::BadManifest { path, why: "damaged: it is not a name and its checksum".into() });
    }
    Ok(name.into())
}

/// A published checkpoint, as far as its manifest tells.
pub(crate) struct Entry {
    /// Of its directory: a checkpoint's own, or one to stand aside under.
    pub(crate) name: String,
    pub(crate) sequence: u64,
    pub(crate) model: ModelSpec,
}

/// All published checkpoints with a good manifest, those that stand aside too, oldest save first, and why the others
/// are not among them.
pub(crate) fn list(dir: &Dir) -> Result<(Vec<Entry>, Vec<String>), CkptError> {
    let (mut entries, mut reasons) = (Vec::new(), Vec::new());
    for name in dir.names()? {
        if step_of(&name).or_else(|| aside_of(&name).and_then(step_of)).is_none() {
            continue;
        }
        match dir.open_dir(&name).and_then(|d| Manifest::read(&d)) {
            Ok((manifest, _)) => {
                entries.push(Entry { name, sequence: manifest.sequence, model: manifest.model });
            }
            Err(e) => reasons.push(e.to_string()),
        }
    }
    entries.sort_by(|a, b| (a.sequence, &a.name).cmp(&(b.sequence, &b.name)));
    Ok((entries, reasons))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_steps() {
        assert_eq!(step_name(30), "step-00000030");
        for step in [0, 30, 99_999_999, 100_000_000, u64::MAX] {
            let (name, aside) = (step_name(step), aside_name(&step_name(step)));
            assert_eq!((step_of(&name), aside_of(&name)), (Some(step), None));
            assert_eq!((step_of(&aside), aside_of(&aside)), (None, Some(name.as_str())));
        }
        for bad in
            ["step-30", "step-+0000030", "step-", "step-00000030.old", "latest", "step-000000000000000000000099"]
        {
            assert_eq!((step_of(bad), aside_of(bad)), (None, None), "{bad}");
        }
    }
}
