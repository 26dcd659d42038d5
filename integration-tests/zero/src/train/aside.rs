//! The files to which a resumed run moves what its outputs have of later steps.
//!
//! A killed run has written steps after its newest checkpoint, and a run may be resumed from an
//! earlier one. The resumed run computes these steps again, perhaps with other settings. So their
//! lines leave the file, but none is lost.

use std::path::{Path, PathBuf};

use crate::paths::with_suffix;

/// The file for what `path` has after `step`: `NAME.after-step-9`, then `NAME.after-step-9.2`.
pub(super) fn path(path: &Path, step: u64) -> PathBuf {
    let first = with_suffix(path, &format!(".after-step-{step}"));
    let more = (2_u64..).map(|n| with_suffix(&first, &format!(".{n}")));
    let mut free = std::iter::once(first.clone()).chain(more);
    // A link to nothing is taken, too.
    free.find(|path| path.symlink_metadata().is_err())
        .unwrap_or(first)
}
