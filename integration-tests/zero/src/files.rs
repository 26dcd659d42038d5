//! Files and paths that nobody has checked.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The absolute path, for a record that is read in another current folder.
pub(crate) fn absolute(path: &Path) -> String {
    let absolute = path.canonicalize().or_else(|_| std::path::absolute(path));
    absolute.as_deref().unwrap_or(path).display().to_string()
}

/// Maximum length of a file that [`read_small`] reads.
const SMALL_FILE_BYTES: u64 = 4 << 20;

/// Reads a small file whose content nobody has verified; `None` if it is missing, long or no
/// regular file. Never waits for the writer of a pipe.
pub(crate) fn read_small(path: &Path) -> Option<Vec<u8>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .ok()?;
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() > SMALL_FILE_BYTES {
        return None;
    }
    let mut bytes = Vec::new();
    let read = file
        .take(SMALL_FILE_BYTES + 1)
        .read_to_end(&mut bytes)
        .ok()?;
    (read as u64 <= SMALL_FILE_BYTES).then_some(bytes)
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
        // What a killed process left.
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

    /// A pipe has no writer, so opening it would wait without end.
    #[test]
    fn only_small_regular_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), "text").unwrap();
        assert_eq!(read_small(&path("file")).unwrap(), b"text");
        assert!(
            std::process::Command::new("mkfifo")
                .arg(path("pipe"))
                .status()
                .unwrap()
                .success()
        );
        std::fs::File::create(path("long"))
            .unwrap()
            .set_len(SMALL_FILE_BYTES + 1)
            .unwrap();
        for name in ["missing", "pipe", "long", ".", "/dev/zero"] {
            assert!(read_small(&path(name)).is_none(), "{name}");
        }
    }
}
