//! How ranks pass each other bytes: each writes a file under a name that all know, and waits for those of the others.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What a communicator's ranks share: a folder, in memory where the system has one.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    folder: PathBuf,
    pub(crate) rank: usize,
    pub(crate) n: usize,
    pub(crate) aborted: Arc<AtomicBool>,
}

/// It was aborted.
#[derive(Debug)]
pub(crate) struct Aborted;

impl Exchange {
    pub(crate) fn new(name: &str, rank: usize, n: usize) -> Self {
        let memory = Path::new("/dev/shm");
        let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        Self { folder: base.join(format!("zero-nccl-stand-in-{name}")), rank, n, aborted: Arc::default() }
    }

    /// The folder of a part of these ranks.
    pub(crate) fn part(&self, name: &str, rank: usize, n: usize) -> Self {
        let mut folder = self.folder.clone().into_os_string();
        folder.push(format!("-{name}"));
        Self { folder: folder.into(), rank, n, aborted: Arc::default() }
    }

    fn file(&self, what: &str, rank: usize) -> PathBuf {
        self.folder.join(format!("{what}.{rank}"))
    }

    fn check(&self) -> Result<(), Aborted> {
        if self.aborted.load(Ordering::Acquire) { Err(Aborted) } else { Ok(()) }
    }

    /// Never returns but by an abort.
    pub(crate) fn hang(&self) -> Aborted {
        while self.check().is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Aborted
    }

    /// Gives `bytes` for `what`, and waits for what all ranks give, in rank order.
    pub(crate) fn meet(&self, what: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Aborted> {
        let (part, whole) = (self.folder.join(format!("{what}.{}.part", self.rank)), self.file(what, self.rank));
        let written = fs::create_dir_all(&self.folder)
            .and_then(|()| fs::write(&part, bytes))
            .and_then(|()| fs::rename(&part, &whole));
        if written.is_err() {
            return Err(self.hang());
        }
        let mut all = Vec::with_capacity(self.n);
        for rank in 0..self.n {
            let mut turn = 0u64;
            all.push(loop {
                self.check()?;
                match fs::read(self.file(what, rank)) {
                    Ok(bytes) => break bytes,
                    Err(_) => std::thread::sleep(Duration::from_micros((20 * turn).min(1000))),
                }
                turn += 1;
            });
        }
        Ok(all)
    }

    /// Takes back what this rank gave for `what`; all ranks have read it.
    pub(crate) fn forget(&self, what: &str) {
        let _ = fs::remove_file(self.file(what, self.rank));
    }

    /// Waits until all ranks want to part; false where one has ended what they share, or this one is aborted.
    pub(crate) fn part_in_peace(&self) -> bool {
        let said = fs::write(self.file("parts", self.rank), []).is_ok();
        while said && !(0..self.n).all(|rank| self.file("parts", rank).exists()) {
            if self.check().is_err() || !self.folder.exists() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        said
    }

    /// This rank has read all that it will ever read. The last one to say so takes the folder away.
    pub(crate) fn leave(&self) {
        let _ = fs::write(self.file("left", self.rank), []);
        if (0..self.n).all(|rank| self.file("left", rank).exists()) {
            self.destroy();
        }
    }

    /// Takes the folder away at once: nobody will finish anything.
    pub(crate) fn destroy(&self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
