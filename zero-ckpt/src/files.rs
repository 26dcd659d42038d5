//! Small files that somebody else wrote, such as those of a downloaded model's folder.
//!
//! Such a folder may hold anything under a familiar name: a link to a device without end, a pipe
//! without a writer, a link whose target was deleted, a file of terabytes. So all functions here
//! open regular files only, never wait for the writer of a pipe, and read a bounded number of
//! bytes. Symbolic links are followed, since Hugging Face's cache consists of them.
//!
//! A repository that was cloned without Git LFS has pointers of 130 bytes in place of its large
//! files. [`open_content`] and the functions that read refuse them, with the remedy.
//!
//! A name is *absent* only if the folder has no entry of that name. What is there and cannot be
//! read is an error, never absent: a run that goes on without it would be another run.
//!
//! ```
//! use zero_ckpt::files;
//!
//! let dir = tempfile::tempdir().unwrap();
//! let path = dir.path().join("config.json");
//! assert!(files::read_if_present(&path, 1 << 20).unwrap().is_none());
//! std::os::unix::fs::symlink("deleted", &path).unwrap();
//! let error = files::read_if_present(&path, 1 << 20).unwrap_err().to_string();
//! assert!(error.starts_with("a symbolic link to a file that does not exist"));
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

/// A limit for configurations and other small files of a model's folder.
pub const SMALL_FILE_BYTES: u64 = 16 << 20;

/// Whether there is an entry at `path`: also a link without a target, or a folder that cannot be
/// read.
///
/// # Errors
/// The folder of `path` cannot be searched.
pub fn is_present(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if is_absence(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Opens a regular file for reading; returns it and its length.
///
/// # Errors
/// There is no such file, it is not a regular file, or it cannot be opened. The text does not name
/// the path.
pub fn open(path: &Path) -> io::Result<(File, u64)> {
    // With NONBLOCK the opening of a pipe returns at once. It has no effect on regular files.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits() as i32)
        .open(path);
    let file = opened.map_err(|error| explained(path, error))?;

    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(not_regular("a folder, where a file is expected"));
    }
    if !metadata.is_file() {
        return Err(not_regular(NOT_REGULAR));
    }
    Ok((file, metadata.len()))
}

/// As [`open`], but refuses the pointer that Git LFS leaves in place of a file's content.
///
/// # Errors
/// Those of [`open`], or a pointer.
pub fn open_content(path: &Path) -> io::Result<(File, u64)> {
    let (file, len) = open(path)?;
    let mut start = [0; LFS_POINTER.len()];
    match file.read_exact_at(&mut start, 0) {
        Ok(()) if start == *LFS_POINTER => Err(io::Error::new(
            ErrorKind::InvalidData,
            "a Git LFS pointer in place of the file: get the file by `git lfs pull` in its folder (Git LFS must be \
             installed), or download it from its page",
        )),
        Err(error) if error.kind() != ErrorKind::UnexpectedEof => Err(error),
        _ => Ok((file, len)),
    }
}

/// The start of a pointer, by the specification of Git LFS.
const LFS_POINTER: &[u8; 42] = b"version https://git-lfs.github.com/spec/v1";

/// Reads a regular file of at most `limit_bytes`.
///
/// # Errors
/// Those of [`open_content`], a longer file, or a failed read.
pub fn read(path: &Path, limit_bytes: u64) -> io::Result<Vec<u8>> {
    let too_long = || {
        let why = format!("longer than {limit_bytes} bytes, the limit for such a file");
        io::Error::new(ErrorKind::FileTooLarge, why)
    };
    let (file, len) = open_content(path)?;
    if len > limit_bytes {
        return Err(too_long());
    }

    // Files of /proc have no length, and others may grow.
    let mut bytes = Vec::new();
    file.take(limit_bytes.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit_bytes {
        return Err(too_long());
    }
    Ok(bytes)
}

/// Reads a regular file of at most `limit_bytes`; `None` if there is no entry of that name.
///
/// # Errors
/// Those of [`read`], and a symbolic link without a target.
pub fn read_if_present(path: &Path, limit_bytes: u64) -> io::Result<Option<Vec<u8>>> {
    if is_present(path)? {
        read(path, limit_bytes).map(Some)
    } else {
        Ok(None)
    }
}

/// Reads a regular file of UTF-8 text of at most `limit_bytes`.
///
/// # Errors
/// Those of [`read`], or other text.
pub fn read_text(path: &Path, limit_bytes: u64) -> io::Result<String> {
    text(read(path, limit_bytes)?)
}

/// Reads a regular file of UTF-8 text of at most `limit_bytes`; `None` if there is no entry of that
/// name.
///
/// # Errors
/// Those of [`read_if_present`], or other text.
pub fn read_text_if_present(path: &Path, limit_bytes: u64) -> io::Result<Option<String>> {
    read_if_present(path, limit_bytes)?.map(text).transpose()
}

/// The remedy for an error of the system, to be appended to its text; empty for most errors.
pub fn remedy(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => "; raise the limit of open files: ulimit -n",
        Some(Errno::NFILE) => "; raise the machine's limit of open files: sysctl fs.file-max",
        _ => "",
    }
}

const NOT_REGULAR: &str =
    "not a regular file but a pipe, a socket or a device: copy its content to a file";

fn not_regular(why: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, why)
}

/// Whether the error means that there is no entry of that name.
fn is_absence(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// The error of an opening, with its reason where the system's text has another.
fn explained(path: &Path, error: io::Error) -> io::Error {
    let entry = fs::symlink_metadata(path);
    let is_link = entry.as_ref().is_ok_and(|entry| entry.is_symlink());
    if is_link && is_absence(&error) {
        let why = "a symbolic link to a file that does not exist here: restore the file (download it again), or remove \
                   the link";
        return io::Error::new(ErrorKind::NotFound, why);
    }
    // A socket, or a device without a driver.
    if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) {
        return not_regular(NOT_REGULAR);
    }
    error
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        io::Error::new(
            ErrorKind::InvalidData,
            format!("not UTF-8 text at byte {at}"),
        )
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    /// Nobody writes to the pipe, so opening it as `File::open` does would wait without end.
    #[test]
    fn only_short_regular_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "text").unwrap();
        symlink(at("file"), at("link")).unwrap();
        for name in ["file", "link"] {
            assert_eq!(read(&at(name), 4).unwrap(), b"text", "{name}");
            assert_eq!(read_text(&at(name), 5).unwrap(), "text", "{name}");
        }

        mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        symlink("pipe", at("link-to-pipe")).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        fs::create_dir(at("folder")).unwrap();
        symlink("loop", at("loop")).unwrap();
        let sparse = File::create(at("sparse")).unwrap();
        sparse.set_len(1 << 32).unwrap();
        symlink("/dev/zero", at("device")).unwrap();
        symlink("gone", at("dangling")).unwrap();
        symlink("file/under", at("under-a-file")).unwrap();

        for (name, expected) in [
            ("pipe", "not a regular file"),
            ("link-to-pipe", "not a regular file"),
            ("socket", "not a regular file"),
            ("device", "not a regular file"),
            ("folder", "a folder"),
            ("loop", "symbolic links"),
            ("sparse", "longer than 3 bytes"),
            ("file", "longer than 3 bytes"),
            ("dangling", "a symbolic link to a file that does not exist"),
            (
                "under-a-file",
                "a symbolic link to a file that does not exist",
            ),
        ] {
            assert!(is_present(&at(name)).unwrap(), "{name}");
            let error = read_if_present(&at(name), 3).unwrap_err().to_string();
            assert!(error.contains(expected), "{name}: {error}");
        }
    }

    #[test]
    fn only_a_name_without_an_entry_is_absent() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"a\xff").unwrap();
        for absent in [dir.path().join("none"), file.join("under")] {
            assert!(read_text_if_present(&absent, 9).unwrap().is_none());
            assert!(read(&absent, 9).is_err());
        }
        let error = read_text_if_present(&file, 9).unwrap_err().to_string();
        assert_eq!(error, "not UTF-8 text at byte 1");
    }

    #[test]
    fn limit_of_open_files_is_named() {
        use crate::CkptError;

        let error = |errno| CkptError::os("open", "a")(errno).to_string();
        assert!(error(Errno::MFILE).ends_with("ulimit -n"));
        assert!(error(Errno::NFILE).ends_with("fs.file-max"));
        let other = error(Errno::NOENT);
        assert!(other.ends_with(&format!("(os error {})", Errno::NOENT.raw_os_error())));
    }

    #[test]
    fn lfs_pointer_is_not_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
        fs::write(&path, pointer).unwrap();
        let errors = [
            open_content(&path).unwrap_err(),
            read_text_if_present(&path, 1 << 20).unwrap_err(),
        ];
        for error in errors {
            let error = error.to_string();
            assert!(error.contains("`git lfs pull`"), "{error}");
        }
        for other in ["", "version 7", &pointer[1..]] {
            fs::write(&path, other).unwrap();
            assert_eq!(read_text(&path, 1 << 20).unwrap(), other);
        }
    }

    /// Files of `/proc` have the length 0.
    #[test]
    fn length_is_not_trusted() {
        let path = Path::new("/proc/self/status");
        if path.exists() {
            assert!(!read(path, 1 << 20).unwrap().is_empty());
            let error = read(path, 10).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::FileTooLarge);
        }
    }
}
