//! The exchange of bytes between ranks: each rank writes a file under a common name and waits for
//! those of the others.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The folder that a communicator's ranks share, in memory if the system has such a folder.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    folder: PathBuf,
    pub(crate) rank: usize,
    pub(crate) n: usize,
    pub(crate) aborted: Arc<AtomicBool>,
}

/// The communicator was aborted.
#[derive(Debug)]
pub(crate) struct Aborted;

impl Exchange {
    pub(crate) fn new(name: &str, rank: usize, n: usize) -> Self {
        let memory = Path::new("/dev/shm");
        let base = if memory.is_dir() {
            memory.to_owned()
        } else {
            std::env::temp_dir()
        };
        Self {
            folder: base.join(format!("zero-nccl-stand-in-{name}")),
            rank,
            n,
            aborted: Arc::default(),
        }
    }

    /// The exchange of some of these ranks.
    pub(crate) fn part(&self, name: &str, rank: usize, n: usize) -> Self {
        let mut folder = self.folder.clone().into_os_string();
        folder.push(format!("-{name}"));
        Self {
            folder: folder.into(),
            rank,
            n,
            aborted: Arc::default(),
        }
    }

    /// The name of the communicator, the same on its ranks.
    pub(crate) fn name(&self) -> String {
        let name = self.folder.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    fn file(&self, name: &str, rank: usize) -> PathBuf {
        self.folder.join(format!("{name}.{rank}"))
    }

    fn check(&self) -> Result<(), Aborted> {
        if self.aborted.load(Ordering::Acquire) {
            Err(Aborted)
        } else {
            Ok(())
        }
    }

    /// Returns only after an abort.
    pub(crate) fn hang(&self) -> Aborted {
        while self.check().is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Aborted
    }

    /// Publishes `bytes` under `name`, and waits for the bytes of all ranks, in rank order.
    pub(crate) fn meet(&self, name: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Aborted> {
        let part = self.folder.join(format!("{name}.{}.part", self.rank));
        let whole = self.file(name, self.rank);
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
                match fs::read(self.file(name, rank)) {
                    Ok(bytes) => break bytes,
                    Err(_) => std::thread::sleep(Duration::from_micros((20 * turn).min(1000))),
                }
                turn += 1;
            });
        }

        Ok(all)
    }

    /// Removes this rank's bytes of `name`, which all ranks have read.
    pub(crate) fn remove(&self, name: &str) {
        let _ = fs::remove_file(self.file(name, self.rank));
    }

    /// Waits until all ranks finalize; false if another rank removed the folder or this one is
    /// aborted.
    pub(crate) fn finalize(&self) -> bool {
        let written = fs::write(self.file("finalized", self.rank), []).is_ok();
        while written && !(0..self.n).all(|rank| self.file("finalized", rank).exists()) {
            if self.check().is_err() || !self.folder.exists() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        written
    }

    /// Ends this rank's reads. The last rank removes the folder.
    pub(crate) fn leave(&self) {
        let _ = fs::write(self.file("left", self.rank), []);
        if (0..self.n).all(|rank| self.file("left", rank).exists()) {
            self.destroy();
        }
    }

    /// Removes the folder, so that no rank can finish an operation.
    pub(crate) fn destroy(&self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
