//! Choices on disk, one file each, so that the bits of products stay the same on a machine.
//!
//! A file's name is a hash of the choice's subject: the card, the versions of driver and library,
//! and the product. The file repeats the subject, lists what was measured, and ends with the choice
//! and a checksum:
//!
//! ```text
//! zero matmul choice, version 1
//! NVIDIA H200, sm_90, driver 13.0, cuBLASLt 130101
//! matmul onto fp32, [768, 32768] x [32768, 3072], ...
//! *     412.3 us  id 66, tile 20, stages 36, split-K 3, reduction 2, ..., workspace 28311552
//! choice 42000000...
//! checksum 1f0c6e5a90b3d274
//! ```
//!
//! Processes that need a choice at the same time measure one after the other: the first locks the
//! file, measures and writes; the others wait for the lock and then read. Ranks reach the first use
//! of a product after the same collectives, so the rank that measures needs nothing from those that
//! wait for the same file.
//!
//! A new choice is written to a temporary file, which replaces the old one when its bytes are on
//! the disk: readers without the lock and crashes see one or the other, whole. Whoever waited for
//! the lock of the old file then locks the new one. A temporary file is named by the file that it
//! replaces, with random letters and digits: `.choice-KEY-RANDOM`. Those of killed processes are
//! removed when a choice of the folder is locked next, if the file that they replace can be locked.
//!
//! A choice selects machine code, and the folder may be one that others can write to. So a file is
//! used only if it is a regular file of this user or of root, and symbolic links are refused.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

const FIRST: &str = "zero matmul choice, version 1";
/// The maximum size of a file.
const MAX_BYTES: u64 = 1 << 16;
/// The time between two attempts to lock a file.
const POLL: Duration = Duration::from_millis(5);

/// A folder of choices.
#[derive(Clone, Debug)]
pub(super) struct Choices(PathBuf);

/// The contents of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Contents {
    /// The choice.
    Choice(String),
    /// Nothing was written yet.
    Nothing,
    /// A damaged file, or one for another subject.
    Damaged,
}

impl Choices {
    /// Choices in `folder`, which is created when the first choice is stored.
    pub(super) fn at(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    /// The file of a subject.
    pub(super) fn path(&self, subject: &str) -> PathBuf {
        self.0.join(format!("{:016x}.txt", hash(subject)))
    }

    /// The choice of `subject`, if it is kept.
    pub(super) fn find(&self, subject: &str) -> Option<String> {
        match read(&self.path(subject), subject) {
            Ok(Contents::Choice(choice)) => Some(choice),
            _ => None,
        }
    }

    /// Locks the file of `subject` for this process, after others have released it.
    ///
    /// # Errors
    /// The file cannot be created or locked, is a symbolic link or another user's, or the limit has
    /// passed ([`io::ErrorKind::WouldBlock`]).
    pub(super) fn lock(&self, subject: &str, limit: Duration) -> io::Result<Locked> {
        std::fs::create_dir_all(&self.0)?;
        let path = self.path(subject);
        let start = Instant::now();
        loop {
            let file = open(
                &path,
                File::options()
                    .read(true)
                    .write(true)
                    .create(true)
                    .truncate(false),
            )?;
            while let Err(error) = file.try_lock() {
                match error {
                    TryLockError::WouldBlock if start.elapsed() < limit => std::thread::sleep(POLL),
                    error => return Err(error.into()),
                }
            }
            let locked = Locked {
                file,
                path: path.clone(),
                subject: subject.to_owned(),
            };
            if locked.is_current()? {
                self.remove_leftovers(&path);
                return Ok(locked);
            }
            // Another process has replaced the file meanwhile.
        }
    }

    /// Removes the temporary files of killed processes: those for `held`, which this process has
    /// locked, and those for files that no process has locked. A failure leaves the file for the
    /// next lock.
    fn remove_leftovers(&self, held: &Path) {
        let Ok(entries) = std::fs::read_dir(&self.0) else {
            return;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(key) = name.to_str().and_then(temporary_key) else {
                continue;
            };

            // Locked until the file is removed, so that no process writes it meanwhile.
            let path = self.0.join(format!("{key}.txt"));
            let lock = (path != held).then(|| try_lock(&path));
            if matches!(lock, Some(None)) {
                continue;
            }
            let temporary = entry.path();
            if open(&temporary, File::options().read(true)).is_ok() {
                let _ignored = std::fs::remove_file(temporary);
            }
        }
    }
}

/// The start of a temporary file's name.
const TEMPORARY: &str = ".choice-";
/// The random letters and digits at its end.
const RANDOM_LEN: usize = 6;

/// The key of the file that a temporary file of this name replaces.
fn temporary_key(name: &str) -> Option<&str> {
    let is_key = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let rest = name.strip_prefix(TEMPORARY)?;
    let (key, random) = rest.split_once('-')?;
    let is_temporary = key.len() == 16
        && key.bytes().all(is_key)
        && random.len() == RANDOM_LEN
        && random.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_temporary.then_some(key)
}

/// Locks an existing file, unless another process has locked or replaced it.
fn try_lock(path: &Path) -> Option<Locked> {
    let file = open(path, File::options().read(true)).ok()?;
    file.try_lock().ok()?;
    let locked = Locked {
        file,
        path: path.to_owned(),
        subject: String::new(),
    };
    locked.is_current().ok()?.then_some(locked)
}

/// A locked file. The system also releases the lock when the process ends.
#[derive(Debug)]
pub(super) struct Locked {
    file: File,
    path: PathBuf,
    subject: String,
}

impl Locked {
    /// The present contents of the file.
    pub(super) fn read(&self) -> io::Result<Contents> {
        read(&self.path, &self.subject)
    }

    /// Replaces the file by one with this choice, on the disk when this returns, and releases the
    /// lock.
    pub(super) fn write(self, table: &str, choice: &str) -> io::Result<()> {
        let body = format!("{FIRST}\n{}\n{table}choice {choice}\n", self.subject);
        let text = format!("{body}checksum {:016x}\n", hash(&body));
        let folder = self.path.parent().unwrap_or(Path::new("."));

        let mut new = self.temporary(folder)?;
        new.write_all(text.as_bytes())?;
        new.as_file().sync_all()?;
        new.persist(&self.path)?;
        File::open(folder)?.sync_all()
    }

    /// A new file in `folder`, which is removed unless it replaces the locked one.
    fn temporary(&self, folder: &Path) -> io::Result<NamedTempFile> {
        let key = format!("{:016x}", hash(&self.subject));
        // Readable by all, as the file of a plain `File::create`.
        let permissions = std::fs::Permissions::from_mode(0o644);
        tempfile::Builder::new()
            .prefix(&format!("{TEMPORARY}{key}-"))
            .rand_bytes(RANDOM_LEN)
            .permissions(permissions)
            .tempfile_in(folder)
    }

    /// Whether the locked file is still the one at the path.
    fn is_current(&self) -> io::Result<bool> {
        let locked = self.file.metadata()?;
        match std::fs::symlink_metadata(&self.path) {
            Ok(now) => Ok((now.dev(), now.ino()) == (locked.dev(), locked.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Locked {
    /// Unlocks explicitly: closing the file does not unlock it if a forked process has inherited
    /// it.
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}

/// Opens a regular file that is no symbolic link and that this user or root owns. Never waits, as
/// for a writer of a pipe.
fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = match options
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
    {
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            return Err(io::Error::other(
                "it is a symbolic link, which is not followed",
            ));
        }
        opened => opened?,
    };

    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let user = rustix::process::geteuid().as_raw();

    if !is_trusted(metadata.uid(), user) {
        let message = format!(
            "it belongs to user {}, and this program runs as user {user}",
            metadata.uid()
        );
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    }

    Ok(file)
}

/// Whether files of `owner` may select machine code of a program of `user`.
fn is_trusted(owner: u32, user: u32) -> bool {
    owner == user || owner == 0
}

fn read(path: &Path, subject: &str) -> io::Result<Contents> {
    let mut bytes = Vec::new();
    let file = open(path, File::options().read(true))?;
    file.take(MAX_BYTES).read_to_end(&mut bytes)?;
    if bytes.is_empty() {
        return Ok(Contents::Nothing);
    }
    let choice = std::str::from_utf8(&bytes)
        .ok()
        .and_then(|text| parse(text, subject));
    Ok(choice.map_or(Contents::Damaged, |choice| {
        Contents::Choice(choice.to_owned())
    }))
}

/// The choice in a file's text, if the file is whole and for this subject.
fn parse<'a>(text: &'a str, subject: &str) -> Option<&'a str> {
    let (body, checksum) = text.rsplit_once("checksum ")?;
    if checksum != format!("{:016x}\n", hash(body)) {
        return None;
    }
    let rest = body
        .strip_prefix(FIRST)?
        .strip_prefix('\n')?
        .strip_prefix(subject)?
        .strip_prefix('\n')?;
    rest.lines().last()?.strip_prefix("choice ")
}

/// 64-bit FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUBJECT: &str = "a card\na product";

    fn keep(choices: &Choices, subject: &str, choice: &str) {
        let locked = choices.lock(subject, Duration::ZERO).unwrap();
        locked.write("", choice).unwrap();
    }

    #[test]
    fn choice_is_read_by_its_subject_alone() {
        let folder = tempfile::tempdir().unwrap();
        let choices = Choices::at(&folder.path().join("made/when/needed"));
        assert_eq!(choices.find(SUBJECT), None);
        let lock = || choices.lock(SUBJECT, Duration::ZERO).unwrap();
        assert_eq!(lock().read().unwrap(), Contents::Nothing);
        lock().write("  1.0 us  tile 3\n", "abc").unwrap();
        lock().write("  1.0 us  t\n", "ab").unwrap();
        assert_eq!(lock().read().unwrap(), Contents::Choice("ab".into()));
        assert_eq!(choices.find(SUBJECT).as_deref(), Some("ab"));
        assert_eq!(choices.find("a card\nanother product"), None);
        let text = std::fs::read_to_string(choices.path(SUBJECT)).unwrap();
        assert!(
            text.contains("\na card\na product\n  1.0 us  t\nchoice ab\nchecksum "),
            "{text}"
        );
    }

    #[test]
    fn damaged_and_foreign_files_are_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let choices = Choices::at(folder.path());
        keep(&choices, SUBJECT, "abc");
        let path = choices.path(SUBJECT);
        let good = std::fs::read(&path).unwrap();
        let mut damaged: Vec<Vec<u8>> =
            vec![good[..10].into(), good[..good.len() - 1].into(), vec![0xff]];

        for at in [0, 40, good.len() - 2] {
            let mut flipped = good.clone();
            flipped[at] ^= 1;
            damaged.push(flipped);
        }

        // A whole file under the name of another.
        keep(&choices, "other", "abc");
        damaged.push(std::fs::read(choices.path("other")).unwrap());

        for bytes in damaged {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(choices.find(SUBJECT), None);
            let locked = choices.lock(SUBJECT, Duration::ZERO).unwrap();
            assert_eq!(locked.read().unwrap(), Contents::Damaged);
            locked.write("", "abc").unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), good);
        }
    }

    #[test]
    fn one_process_at_a_time_has_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let choices = Choices::at(folder.path());
        let first = choices.lock(SUBJECT, Duration::ZERO).unwrap();
        assert_eq!(
            choices.lock(SUBJECT, Duration::ZERO).unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        drop(choices.lock("another subject", Duration::ZERO).unwrap());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                choices
                    .lock(SUBJECT, Duration::from_secs(300))
                    .unwrap()
                    .read()
                    .unwrap()
            });
            first.write("", "abc").unwrap();
            assert_eq!(waits.join().unwrap(), Contents::Choice("abc".into()));
        });
    }

    #[test]
    fn links_are_neither_read_nor_written() {
        let folder = tempfile::tempdir().unwrap();
        let choices = Choices::at(folder.path());
        let path = choices.path(SUBJECT);
        keep(&choices, SUBJECT, "abc");
        let target = folder.path().join("another file");
        std::fs::rename(&path, &target).unwrap();
        let contents = std::fs::read(&target).unwrap();

        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert_eq!(choices.find(SUBJECT), None);
        let error = choices.lock(SUBJECT, Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("symbolic link"), "{error}");
        assert_eq!(std::fs::read(&target).unwrap(), contents);
        assert!(path.is_symlink());
    }

    #[test]
    fn pipes_are_refused_without_a_wait() {
        let folder = tempfile::tempdir().unwrap();
        let choices = Choices::at(folder.path());
        let path = choices.path(SUBJECT);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
        assert_eq!(choices.find(SUBJECT), None);
        let error = choices.lock(SUBJECT, Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("not a regular file"), "{error}");
    }

    #[test]
    fn files_of_other_users_are_refused() {
        assert!(is_trusted(1000, 1000) && is_trusted(0, 1000));
        assert!(!is_trusted(1001, 1000) && !is_trusted(1000, 0));
        let folder = tempfile::tempdir().unwrap();
        let choices = Choices::at(folder.path());
        keep(&choices, SUBJECT, "abc");
        if std::os::unix::fs::chown(choices.path(SUBJECT), Some(12345), None).is_err() {
            return eprintln!("NOT TESTED with a file: only root can give one away");
        }
        assert_eq!(choices.find(SUBJECT), None);
        let error = choices.lock(SUBJECT, Duration::ZERO).unwrap_err();
        assert!(
            error.to_string().contains("belongs to user 12345"),
            "{error}"
        );
    }

    #[test]
    fn open_file_stays_whole_when_it_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let choices = Choices::at(folder.path());
        keep(&choices, SUBJECT, "abc");
        let path = choices.path(SUBJECT);
        let before = std::fs::read_to_string(&path).unwrap();
        let mut open = File::open(&path).unwrap();

        keep(&choices, SUBJECT, "another");
        let mut seen = String::new();
        open.read_to_string(&mut seen).unwrap();
        assert_eq!(seen, before);
        assert_eq!(choices.find(SUBJECT).as_deref(), Some("another"));
        let left = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, 1, "no temporary file");
    }

    #[test]
    fn leftovers_are_removed_unless_locked() {
        let folder = tempfile::tempdir().unwrap();
        let choices = Choices::at(folder.path());
        let lock = |subject: &str| choices.lock(subject, Duration::ZERO).unwrap();
        // As a killed process leaves it.
        let leave = |locked: &Locked| {
            let temporary = locked.temporary(folder.path()).unwrap();
            temporary.keep().unwrap().1
        };

        let dead = leave(&lock("dead"));
        let living = lock("living");
        let written = leave(&living);
        let name = |start: &str| folder.path().join(format!("{start}-abcdef"));
        // One has no file that could be locked; the others have other names.
        let others = [
            name(".choice-0123456789abcdef"),
            name(".choice"),
            name(".choice-0123456789abcdefg"),
            name("notes"),
        ];
        for path in &others {
            std::fs::write(path, b"mine").unwrap();
        }
        let link = written.with_file_name(format!(".choice-{:016x}-linked", hash("dead")));
        std::os::unix::fs::symlink(&others[3], &link).unwrap();

        let own = leave(&lock(SUBJECT));
        drop(lock(SUBJECT));
        assert!(!dead.exists() && !own.exists());
        assert!(written.exists() && link.is_symlink());
        assert!(others.iter().all(|path| path.exists()));

        living.write("", "abc").unwrap();
        drop(lock(SUBJECT));
        assert!(!written.exists());
        assert_eq!(choices.find("living").as_deref(), Some("abc"));
    }

    #[test]
    fn unwritable_folder_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(
            Choices::at(file.path())
                .lock(SUBJECT, Duration::ZERO)
                .is_err()
        );
    }
}
