//! Paths, and files that are replaced whole.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The absolute path, for a record that is read in another current folder.
pub(crate) fn absolute(path: &Path) -> String {
    let absolute = path.canonicalize().or_else(|_| std::path::absolute(path));
    absolute.as_deref().unwrap_or(path).display().to_string()
}

/// `path` with `suffix` behind its name.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_name().map(OsString::from).unwrap_or_default();
    name.push(suffix);
    path.with_file_name(name)
}

/// Gives `path` this content atomically, with the permissions of the file that it replaces, if
/// there is one. No two processes may do so at once.
///
/// # Errors
/// A failed write; `path` is as it was.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().display();
    replace_by(&path.with_file_name(format!(".{name}.new")), path, content)
}

/// As [`replace`]; the content is written to the file `new` first, which is then renamed. What a
/// killed process has left there is removed.
pub(crate) fn replace_by(new: &Path, path: &Path, content: &[u8]) -> io::Result<()> {
    match fs::remove_file(new) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }

    let write = || {
        let mut file = OpenOptions::new().write(true).create_new(true).open(new)?;
        if let Ok(old) = path.metadata() {
            file.set_permissions(old.permissions())?;
        }
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(new, path)
    };
    write().inspect_err(|_| {
        let _ = fs::remove_file(new);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replacement_is_whole_and_leaves_nothing() {
        use std::os::unix::fs::PermissionsExt;

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.b");
        let names = || fs::read_dir(dir.path()).unwrap().count();
        replace(&path, b"one").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        // A leftover of a killed process.
        fs::write(dir.path().join(".a.b.new"), "half").unwrap();
        replace(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(names(), 1);
        // A folder cannot be replaced.
        fs::create_dir(dir.path().join("c")).unwrap();
        replace(&dir.path().join("c"), b"three").unwrap_err();
        assert_eq!(names(), 2);
    }
}
