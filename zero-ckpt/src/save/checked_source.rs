//! A staged file of another save, for publication.

use crate::CkptError;
use crate::io::dir::{Dir, FileId};

/// A checked file that is linked or copied into a checkpoint.
pub(crate) struct CheckedSource<'a> {
    pub(super) dir: &'a Dir,
    pub(super) name: String,
    pub(super) id: FileId,
}

impl CheckedSource<'_> {
    pub(crate) fn link_or_copy(&self, to_dir: &Dir, to: &str) -> Result<(), CkptError> {
        self.dir.link_or_copy(&self.name, &self.id, to_dir, to)
    }
}
