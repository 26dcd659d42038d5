//! Files and paths that nobody has checked.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

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

#[cfg(test)]
mod tests {
    use super::*;

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
