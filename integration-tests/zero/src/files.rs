//! Paths.

use std::path::Path;

/// The absolute path, for a record that is read in another current folder.
pub(crate) fn absolute(path: &Path) -> String {
    let absolute = path.canonicalize().or_else(|_| std::path::absolute(path));
    absolute.as_deref().unwrap_or(path).display().to_string()
}
