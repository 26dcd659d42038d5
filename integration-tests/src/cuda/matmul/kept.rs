//! Choices on disk, one file each, so that the bits of products stay the same on a machine.
//!
//! A file's name is a hash of the choice's subject: the card, the versions of driver and library, and the product. The
//! file repeats the subject, lists what was measured, and ends with the choice and a checksum:
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
//! Processes that need a choice at the same time measure one after the other: the first locks the file, measures and
//! writes; the others wait for the lock and then read. Ranks reach the first use of a product after the same
//! collectives, so the rank that measures needs nothing from those that wait for the same file.

use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

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
        match read(&mut File::open(self.path(subject)).ok()?, subject) {
            Ok(Contents::Choice(choice)) => Some(choice),
            _ => None,
        }
    }

    /// Locks the file of `subject` for this process, after others have released it.
    ///
    /// # Errors
    /// The file cannot be created or locked, or the limit has passed ([`io::ErrorKind::WouldBlock`]).
    pub(super) fn lock(&self, subject: &str, limit: Duration) -> io::Result<Locked> {
        std::fs::create_dir_all(&self.0)?;
        let file = File::options().read(true).write(true).create(true).truncate(false).open(self.path(subject))?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Locked { file, subject: subject.to_owned() }),
                Err(TryLockError::WouldBlock) if start.elapsed() < limit => std::thread::sleep(POLL),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// A locked file. The system also releases the lock when the process ends.
#[derive(Debug)]
pub(super) struct Locked {
    file: File,
    subject: String,
}

impl Locked {
    /// The present contents of the file.
    pub(super) fn read(&mut self) -> io::Result<Contents> {
        read(&mut self.file, &self.subject)
    }

    /// Replaces the contents. A reader without the lock sees either a whole file or a checksum that does not match.
    pub(super) fn write(&mut self, table: &str, choice: &str) -> io::Result<()> {
        let body = format!("{FIRST}\n{}\n{table}choice {choice}\n", self.subject);
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(format!("{body}checksum {:016x}\n", hash(&body)).as_bytes())
    }
}

impl Drop for Locked {
    /// Unlocks explicitly: closing the file does not unlock it if a forked process has inherited it.
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}

fn read(file: &mut File, subject: &str) -> io::Result<Contents> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(MAX_BYTES).read_to_end(&mut bytes)?;
    if bytes.is_empty() {
        return Ok(Contents::Nothing);
    }
    let choice = std::str::from_utf8(&bytes).ok().and_then(|text| parse(text, subject));
    Ok(choice.map_or(Contents::Damaged, |choice| Contents::Choice(choice.to_owned())))
}

/// The choice in a file's text, if the file is whole and for this subject.
fn parse<'a>(text: &'a str, subject: &str) -> Option<&'a str> {
    let (body, checksum) = text.rsplit_once("checksum ")?;
    if checksum != format!("{:016x}\n", hash(body)) {
        return None;
    }
    let rest = body.strip_prefix(FIRST)?.strip_prefix('\n')?.strip_prefix(subject)?.strip_prefix('\n')?;
    rest.lines().last()?.strip_prefix("choice ")
}

/// 64-bit FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUBJECT: &str = "a card\na product";

    #[test]
    fn choice_is_read_by_its_subject_alone() {
        let folder = tempfile::tempdir().unwrap();
        let choices = Choices::at(&folder.path().join("made/when/needed"));
        assert_eq!(choices.find(SUBJECT), None);
        let mut locked = choices.lock(SUBJECT, Duration::ZERO).unwrap();
        assert_eq!(locked.read().unwrap(), Contents::Nothing);
        locked.write("  1.0 us  tile 3\n", "abc").unwrap();
        locked.write("  1.0 us  t\n", "ab").unwrap();
        assert_eq!(locked.read().unwrap(), Contents::Choice("ab".into()));
        assert_eq!(choices.find(SUBJECT).as_deref(), Some("ab"));
        assert_eq!(choices.find("a card\nanother product"), None);
        let text = std::fs::read_to_string(choices.path(SUBJECT)).unwrap();
        assert!(text.contains("\na card\na product\n  1.0 us  t\nchoice ab\nchecksum "), "{text}");
    }

    #[test]
    fn damaged_and_foreign_files_are_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let choices = Choices::at(folder.path());
        choices.lock(SUBJECT, Duration::ZERO).unwrap().write("", "abc").unwrap();
        let path = choices.path(SUBJECT);
        let good = std::fs::read(&path).unwrap();
        let mut damaged: Vec<Vec<u8>> = vec![good[..10].into(), good[..good.len() - 1].into(), vec![0xff]];
        for at in [0, 40, good.len() - 2] {
            let mut flipped = good.clone();
            flipped[at] ^= 1;
            damaged.push(flipped);
        }
        // A whole file under the name of another.
        choices.lock("other", Duration::ZERO).unwrap().write("", "abc").unwrap();
        damaged.push(std::fs::read(choices.path("other")).unwrap());
        for bytes in damaged {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(choices.find(SUBJECT), None);
            let mut locked = choices.lock(SUBJECT, Duration::ZERO).unwrap();
            assert_eq!(locked.read().unwrap(), Contents::Damaged);
            locked.write("", "abc").unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), good);
        }
    }

    #[test]
    fn one_process_at_a_time_has_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let choices = Choices::at(folder.path());
        let mut first = choices.lock(SUBJECT, Duration::ZERO).unwrap();
        assert_eq!(choices.lock(SUBJECT, Duration::ZERO).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(choices.lock("another subject", Duration::ZERO).unwrap());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| choices.lock(SUBJECT, Duration::from_secs(300)).unwrap().read().unwrap());
            first.write("", "abc").unwrap();
            drop(first);
            assert_eq!(waits.join().unwrap(), Contents::Choice("abc".into()));
        });
    }

    #[test]
    fn unwritable_folder_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(Choices::at(file.path()).lock(SUBJECT, Duration::ZERO).is_err());
    }
}
