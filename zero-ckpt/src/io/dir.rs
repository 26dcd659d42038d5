//! An open directory, whose entries are accessed relative to its descriptor and never by path.
//!
//! Names are single components, symbolic links are not followed, and only regular files are opened.
//! The path is used only in error messages.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{self, AtFlags, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::CkptError;
use crate::format::names::step_of_any;
use crate::io::counts;

const DIR_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);
/// Direct I/O, where the system has it as a flag.
#[cfg(target_os = "linux")]
pub(crate) const DIRECT: OFlags = OFlags::DIRECT;
#[cfg(not(target_os = "linux"))]
pub(crate) const DIRECT: OFlags = OFlags::empty();
const FILE_FLAGS: OFlags = OFlags::NOFOLLOW
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK);

#[cfg(test)]
thread_local! {
    /// Simulates, on this thread, a file system that cannot exchange two names (NFS).
    pub(crate) static WITHOUT_EXCHANGE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// A file and the state of its content.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
    bytes: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
}

impl FileId {
    pub(crate) fn of(file: &File) -> std::io::Result<Self> {
        let meta = file.metadata()?;
        let modified = (meta.mtime(), meta.mtime_nsec());
        Ok(Self {
            device: meta.dev(),
            inode: meta.ino(),
            bytes: meta.len(),
            modified,
        })
    }
}

/// An open directory.
pub(crate) struct Dir {
    fd: OwnedFd,
    path: PathBuf,
    /// `path`, whatever the working directory becomes.
    absolute: PathBuf,
}

impl Dir {
    /// Opens a directory named by the user; links in that path are followed.
    pub(crate) fn open(path: &Path) -> Result<Self, CkptError> {
        counts::opened();
        let fd = fs::open(path, DIR_FLAGS, Mode::empty()).map_err(CkptError::os("open", path))?;
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        Ok(Self {
            fd,
            path: path.to_path_buf(),
            absolute,
        })
    }

    /// Opens the directory; creates it and its parents if missing.
    pub(crate) fn create(path: &Path) -> Result<Self, CkptError> {
        std::fs::create_dir_all(path).map_err(CkptError::io("create", path))?;
        Self::open(path)
    }

    /// The error if `path` does not name this directory any longer. Not for a path that cannot be
    /// examined now.
    pub(crate) fn moved(&self) -> Option<CkptError> {
        let own = fs::fstat(&self.fd).ok()?;
        match fs::stat(&self.absolute) {
            Ok(other) if (own.st_dev, own.st_ino) == (other.st_dev, other.st_ino) => return None,
            Ok(_) | Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(_) => return None,
        }
        let now = std::fs::read_link(format!("/proc/self/fd/{}", self.fd.as_raw_fd()));
        let now = now.map_or_else(
            |_| "in another place".to_owned(),
            |now| now.display().to_string(),
        );
        Some(CkptError::Moved {
            path: self.path.clone(),
            now,
        })
    }

    /// Whether `name` is the open directory `other`, and not another one since.
    pub(crate) fn names_dir(&self, name: &str, other: &Dir) -> bool {
        let named = fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW);
        let (Ok(named), Ok(other)) = (named, fs::fstat(&other.fd)) else {
            return false;
        };
        (named.st_dev, named.st_ino) == (other.st_dev, other.st_ino)
    }

    /// Whether the name is that of a checkpoint, which may be removed while others read it.
    fn is_checkpoint(&self) -> bool {
        let name = self.absolute.file_name().and_then(|name| name.to_str());
        name.and_then(step_of_any).is_some()
    }

    /// The error of a checkpoint that was removed while this directory was open.
    pub(crate) fn removed(&self) -> CkptError {
        CkptError::Removed {
            path: self.path.clone(),
        }
    }

    /// Holds the checkpoint in this directory: [`Dir::is_held`] is true until the directory is
    /// closed or released. Does nothing on a file system without locks.
    ///
    /// # Errors
    /// The checkpoint is being removed.
    pub(crate) fn hold(&self) -> Result<(), CkptError> {
        match fs::flock(&self.fd, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK) => Err(self.removed()),
            _ => Ok(()),
        }
    }

    /// Ends the hold.
    pub(crate) fn release(&self) {
        let _ = fs::flock(&self.fd, FlockOperation::Unlock);
    }

    /// Whether a reader holds the checkpoint in this directory. If not, none can until this
    /// directory is closed.
    pub(crate) fn is_held(&self) -> bool {
        let locked = fs::flock(&self.fd, FlockOperation::NonBlockingLockExclusive);
        locked == Err(Errno::WOULDBLOCK)
    }

    /// Free bytes of the file system.
    pub(crate) fn free_bytes(&self) -> u64 {
        fs::fstatvfs(&self.fd).map_or(0, |system| system.f_bavail.saturating_mul(system.f_frsize))
    }

    /// The bytes of a file, or of the files in a directory.
    pub(crate) fn bytes_of(&self, name: &str) -> u64 {
        let Ok(stat) = fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) else {
            return 0;
        };
        if fs::FileType::from_raw_mode(stat.st_mode) != fs::FileType::Directory {
            return stat.st_size as u64;
        }
        let within = self.open_dir(name).and_then(|dir| Ok((dir.names()?, dir)));
        within.map_or(0, |(names, dir)| {
            names.iter().map(|name| dir.bytes_of(name)).sum()
        })
    }

    /// The path by which it was opened.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a subdirectory; a link is an error.
    pub(crate) fn open_dir(&self, name: &str) -> Result<Self, CkptError> {
        self.check(name)?;
        let path = self.path.join(name);
        counts::opened();
        let fd = fs::openat(&self.fd, name, DIR_FLAGS | OFlags::NOFOLLOW, Mode::empty())
            .map_err(CkptError::os("open", &path))?;
        Ok(Self {
            fd,
            absolute: self.absolute.join(name),
            path,
        })
    }

    /// Opens a subdirectory; creates it if missing.
    pub(crate) fn create_dir(&self, name: &str) -> Result<Self, CkptError> {
        self.check(name)?;
        match fs::mkdirat(&self.fd, name, Mode::from_raw_mode(0o777)) {
            Ok(()) | Err(Errno::EXIST) => self.open_dir(name),
            Err(errno) => Err(CkptError::os("create", self.path.join(name))(errno)),
        }
    }

    /// Opens a regular file for reading; returns it and its length.
    pub(crate) fn open_file(&self, name: &str, direct: bool) -> Result<(File, u64), CkptError> {
        self.check(name)?;
        let path = self.path.join(name);
        counts::opened();
        let flags = FILE_FLAGS | OFlags::RDONLY | if direct { DIRECT } else { OFlags::empty() };
        let file = File::from(match fs::openat(&self.fd, name, flags, Mode::empty()) {
            Err(Errno::LOOP) => return Err(self.unsafe_name(name, "is a symbolic link")),
            Err(Errno::NOENT) if self.is_checkpoint() && self.moved().is_some() => {
                return Err(self.removed());
            }
            other => other.map_err(CkptError::os("open", &path))?,
        });
        let meta = file.metadata().map_err(CkptError::io("examine", &path))?;
        if !meta.is_file() {
            return Err(self.unsafe_name(name, "is not a regular file"));
        }
        Ok((file, meta.len()))
    }

    /// Creates a file for writing; it must not exist. Uses direct I/O if the file system supports
    /// it.
    pub(crate) fn create_file(&self, name: &str, direct: bool) -> Result<File, CkptError> {
        self.check(name)?;
        counts::opened();
        let base = FILE_FLAGS | OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let open = |flags| fs::openat(&self.fd, name, flags, Mode::from_raw_mode(0o666));
        let fd = match open(if direct { base | DIRECT } else { base }) {
            // Some systems create the file before they reject direct I/O.
            Err(Errno::INVAL) if direct => {
                let _ = fs::unlinkat(&self.fd, name, AtFlags::empty());
                open(base)
            }
            other => other,
        };
        fd.map(File::from)
            .map_err(CkptError::os("create", self.path.join(name)))
    }

    /// Opens a file for reading and appending; creates it if missing.
    pub(crate) fn open_or_create_file(&self, name: &str) -> Result<File, CkptError> {
        self.check(name)?;
        counts::opened();
        let flags = FILE_FLAGS | OFlags::RDWR | OFlags::APPEND | OFlags::CREATE;
        let fd = fs::openat(&self.fd, name, flags, Mode::from_raw_mode(0o666));
        fd.map(File::from)
            .map_err(CkptError::os("open", self.path.join(name)))
    }

    /// Reads a file of at most `limit_bytes`.
    pub(crate) fn read_small(&self, name: &str, limit_bytes: u64) -> Result<Vec<u8>, CkptError> {
        let (file, len) = self.open_file(name, false)?;
        let path = self.path.join(name);
        if len > limit_bytes {
            return Err(CkptError::argument(
                format!("length of {}", path.display()),
                format!("at most {limit_bytes} bytes"),
                len,
            ));
        }
        let mut bytes = Vec::new();
        file.take(limit_bytes)
            .read_to_end(&mut bytes)
            .map_err(CkptError::io("read", &path))?;
        counts::read(bytes.len());
        Ok(bytes)
    }

    /// Writes a new file and syncs it; removes it on failure.
    pub(crate) fn write_new(&self, name: &str, bytes: &[u8]) -> Result<(), CkptError> {
        let mut file = self.create_file(name, false)?;
        counts::wrote(bytes.len());
        let done = file.write_all(bytes).and_then(|()| file.sync_all());
        done.map_err(|e| {
            let _ = self.remove_file(name);
            CkptError::io("write", self.path.join(name))(e)
        })
    }

    /// Renames `name` to `to_dir/to`, replacing a file of that name.
    pub(crate) fn rename(&self, name: &str, to_dir: &Dir, to: &str) -> Result<(), CkptError> {
        self.check(name)?;
        self.check(to)?;
        fs::renameat(&self.fd, name, &to_dir.fd, to)
            .map_err(CkptError::os("move into place", to_dir.path.join(to)))
    }

    /// Exchanges two entries atomically; `Ok(false)` if the file system cannot.
    pub(crate) fn exchange(&self, name: &str, to_dir: &Dir, to: &str) -> Result<bool, CkptError> {
        self.check(name)?;
        self.check(to)?;
        #[cfg(test)]
        if WITHOUT_EXCHANGE.get() {
            return Ok(false);
        }
        match fs::renameat_with(&self.fd, name, &to_dir.fd, to, RenameFlags::EXCHANGE) {
            Ok(()) => Ok(true),
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Ok(false),
            Err(errno) => Err(CkptError::os("move into place", to_dir.path.join(to))(
                errno,
            )),
        }
    }

    /// Removes a file or link.
    pub(crate) fn remove_file(&self, name: &str) -> Result<(), CkptError> {
        self.check(name)?;
        fs::unlinkat(&self.fd, name, AtFlags::empty())
            .map_err(CkptError::os("remove", self.path.join(name)))
    }

    /// Removes an empty directory.
    pub(crate) fn remove_empty_dir(&self, name: &str) -> Result<(), CkptError> {
        self.check(name)?;
        fs::unlinkat(&self.fd, name, AtFlags::REMOVEDIR)
            .map_err(CkptError::os("remove", self.path.join(name)))
    }

    /// Removes a file, or a directory with its contents. Of a link, removes the link only. Adds 1
    /// to `progress` for each removed entry.
    pub(crate) fn remove(&self, name: &str, progress: &AtomicU64) -> Result<(), CkptError> {
        self.check(name)?;
        let failed = CkptError::os("remove", self.path.join(name));
        let name =
            CString::new(name).map_err(|_| self.unsafe_name(name, "is not a plain file name"))?;
        remove_at(self.fd.as_fd(), &name, progress).map_err(failed)
    }

    /// Gives the regular file `name` the second name `to_dir/to`; copies it if the file system
    /// cannot. Syncs the content.
    ///
    /// # Errors
    /// [`CkptError::Mismatch`] if the file is not `id`, which was checked, or has been written
    /// since; or a failed system call.
    pub(crate) fn link_or_copy(
        &self,
        name: &str,
        id: &FileId,
        to_dir: &Dir,
        to: &str,
    ) -> Result<(), CkptError> {
        self.check(name)?;
        to_dir.check(to)?;
        let check_id = |file: &File| {
            let path = self.path.join(name);
            let got = FileId::of(file).map_err(CkptError::io("examine", &path))?;
            let why = || {
                format!(
                    "{} has changed since it was checked; a run may be saving there",
                    path.display()
                )
            };
            if got == *id {
                Ok(())
            } else {
                Err(CkptError::Mismatch { why: why() })
            }
        };

        if fs::linkat(&self.fd, name, &to_dir.fd, to, AtFlags::empty()).is_ok() {
            let (link, _) = to_dir.open_file(to, false)?;
            check_id(&link)?;
            counts::synced_file();
            return link
                .sync_all()
                .map_err(CkptError::io("sync", to_dir.path.join(to)));
        }

        let (mut from, _) = self.open_file(name, false)?;
        check_id(&from)?;
        let mut copy = to_dir.create_file(to, false)?;
        counts::synced_file();
        let copied = std::io::copy(&mut from, &mut copy).and_then(|_| copy.sync_all());
        copied.map_err(CkptError::io("copy to", to_dir.path.join(to)))
    }

    /// Whether an entry has this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// The names of the entries that this type can open, sorted; hidden ones included.
    pub(crate) fn names(&self) -> Result<Vec<String>, CkptError> {
        let names = names_of(self.fd.as_fd()).map_err(CkptError::os("list", &self.path))?;
        let names = names.into_iter().filter_map(|name| name.into_string().ok());
        let mut names: Vec<String> = names.filter(|name| is_component(name)).collect();
        names.sort();
        Ok(names)
    }

    /// Syncs the directory: makes renames and new names durable.
    pub(crate) fn sync(&self) -> Result<(), CkptError> {
        counts::synced_dir();
        match fs::fsync(&self.fd) {
            // Some network file systems cannot sync directories.
            Ok(()) | Err(Errno::INVAL | Errno::ROFS) => Ok(()),
            Err(errno) => Err(CkptError::os("sync", &self.path)(errno)),
        }
    }

    fn check(&self, name: &str) -> Result<(), CkptError> {
        if is_component(name) {
            Ok(())
        } else {
            Err(self.unsafe_name(name, "is not a plain file name"))
        }
    }

    fn unsafe_name(&self, name: &str, why: &'static str) -> CkptError {
        CkptError::UnsafeName {
            dir: self.path.clone(),
            name: name.chars().take(80).collect(),
            why,
        }
    }
}

/// All names in a directory except `.` and `..`.
fn names_of(dir: BorrowedFd<'_>) -> Result<Vec<CString>, Errno> {
    let names = fs::Dir::read_from(dir)?.map(|entry| Ok(entry?.file_name().to_owned()));
    names
        .filter(|name| !matches!(name.as_deref().map(CStr::to_bytes), Ok(b"." | b"..")))
        .collect()
}

fn remove_at(dir: BorrowedFd<'_>, name: &CStr, progress: &AtomicU64) -> Result<(), Errno> {
    progress.fetch_add(1, Ordering::Relaxed);
    match fs::unlinkat(dir, name, AtFlags::empty()) {
        // The errors for a directory: EISDIR on Linux, EPERM in POSIX.
        Err(errno @ (Errno::ISDIR | Errno::PERM)) => {
            let within = fs::openat(dir, name, DIR_FLAGS | OFlags::NOFOLLOW, Mode::empty());
            let within =
                within.map_err(|other| if other == Errno::NOTDIR { errno } else { other })?;
            for name in names_of(within.as_fd())? {
                match remove_at(within.as_fd(), &name, progress) {
                    // Another process removes it too.
                    Ok(()) | Err(Errno::NOENT) => {}
                    Err(errno) => return Err(errno),
                }
            }
            fs::unlinkat(dir, name, AtFlags::REMOVEDIR)
        }
        other => other,
    }
}

fn is_component(name: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    (1..=200).contains(&name.len()) && name.bytes().all(allowed) && name != "." && name != ".."
}

/// Whether a manifest may use this file name: 1 to 200 letters, digits, `.`, `_`, `-`; no leading
/// dot.
pub(crate) fn is_plain(name: &str) -> bool {
    is_component(name) && !name.starts_with('.')
}

#[cfg(test)]
mod tests {
    use rustix::fs::FileType;

    use super::*;

    #[test]
    fn unsafe_names_are_rejected() {
        for bad in [
            "",
            ".",
            "..",
            "../x",
            "a/b",
            "/etc/passwd",
            "a\0b",
            "ü",
            &"x".repeat(201),
        ] {
            assert!(!is_component(bad), "{bad:?}");
        }
        assert!(
            is_component(".staging")
                && !is_plain(".staging")
                && is_plain("shard-00000-of-00004.safetensors")
        );
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn links_pipes_and_directories_are_not_opened() {
        let tmp = tempfile::tempdir().unwrap();
        std::fs::write(tmp.path().join("real"), "x").unwrap();
        std::os::unix::fs::symlink("real", tmp.path().join("link")).unwrap();
        std::os::unix::fs::symlink("/", tmp.path().join("linkdir")).unwrap();
        std::fs::create_dir(tmp.path().join("dir")).unwrap();
        let pipe = tmp.path().join("pipe");

        fs::mknodat(
            fs::CWD,
            &pipe,
            FileType::Fifo,
            Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();

        let dir = Dir::open(tmp.path()).unwrap();
        assert!(dir.open_file("real", false).is_ok());
        for name in ["link", "dir", "pipe"] {
            assert!(
                matches!(
                    dir.open_file(name, false),
                    Err(CkptError::UnsafeName { .. })
                ),
                "{name}"
            );
        }

        assert!(dir.open_dir("linkdir").is_err());
        assert!(dir.has("link") && !dir.has("nothing"));
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn changed_file_is_not_linked() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = Dir::open(tmp.path()).unwrap();
        let path = tmp.path().join("a");
        let checked = || {
            std::fs::write(&path, "checked").unwrap();
            FileId::of(&dir.open_file("a", false).unwrap().0).unwrap()
        };

        dir.link_or_copy("a", &checked(), &dir, "same").unwrap();
        let id = checked();
        std::fs::write(&path, "longer than before").unwrap();
        let written = dir.link_or_copy("a", &id, &dir, "written");
        assert!(
            matches!(written, Err(CkptError::Mismatch { .. })),
            "{written:?}"
        );
        let id = checked();
        std::fs::rename(&path, tmp.path().join("moved")).unwrap();
        checked();
        let replaced = dir.link_or_copy("a", &id, &dir, "replaced");
        assert!(
            matches!(replaced, Err(CkptError::Mismatch { .. })),
            "{replaced:?}"
        );
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn replaced_directory_is_not_touched() {
        let tmp = tempfile::tempdir().unwrap();
        let at = tmp.path().join("dir");
        let other = tmp.path().join("other");
        for (path, file) in [(&at, "own"), (&other, "another's")] {
            std::fs::create_dir_all(path.join("tree/deep")).unwrap();
            std::fs::write(path.join("tree/deep").join(file), "x").unwrap();
            std::os::unix::fs::symlink(tmp.path(), path.join("tree/link")).unwrap();
            std::fs::write(path.join(file), "x").unwrap();
        }

        let dir = Dir::open(&at).unwrap();
        std::fs::rename(&at, tmp.path().join("moved")).unwrap();
        std::fs::rename(&other, &at).unwrap();

        assert_eq!(dir.names().unwrap(), ["own", "tree"]);
        let progress = AtomicU64::new(0);
        dir.remove("tree", &progress).unwrap();
        dir.remove("own", &progress).unwrap();
        assert!(dir.remove("own", &progress).is_err());
        assert!(progress.into_inner() >= 5);
        dir.open_or_create_file("new").unwrap();
        assert_eq!(dir.names().unwrap(), ["new"]);
        assert!(
            at.join("tree/deep/another's").exists()
                && at.join("another's").exists()
                && !at.join("new").exists()
        );
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn unopenable_names_are_not_listed() {
        let tmp = tempfile::tempdir().unwrap();
        for name in ["plain", ".hidden", "with space", "ü"] {
            std::fs::write(tmp.path().join(name), "x").unwrap();
        }
        assert_eq!(
            Dir::open(tmp.path()).unwrap().names().unwrap(),
            [".hidden", "plain"]
        );
    }
}
