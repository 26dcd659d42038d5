//! The names in a directory of checkpoints.
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

/// Parses the step of the name of a checkpoint or backup.
pub(crate) fn step_of_any(name: &str) -> Option<u64> {
    step_of(backup_of(name).unwrap_or(name))
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
