//! The remedy for staged files that no checkpoint has.

use crate::format::names::STAGING;
use crate::format::staged_name::StagedName;
use crate::io::dir::Dir;
use crate::io::lock::Lock;

/// The remedy for the staged files of a failed save, if there are any and no run saves there now.
pub(crate) fn staged_hint(root: &Dir) -> Option<String> {
    if Lock::is_taken(root) {
        return None;
    }
    let names = root
        .open_dir(STAGING)
        .and_then(|staging| staging.names())
        .unwrap_or_default();
    let is_staged = names.iter().any(|name| StagedName::parse(name).is_some());
    let hint = "a failed save has left files in its .staging: `zero ckpt assemble` makes a checkpoint of those of all ranks";
    is_staged.then(|| hint.to_owned())
}
