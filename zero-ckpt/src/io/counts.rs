//! Counts of file accesses, for tests; nothing is counted without the feature `testing`.

#[cfg(any(test, feature = "testing"))]
mod counted {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    /// Accesses of this process to checkpoints since it started.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct IoCounts {
        /// Files and directories opened or created.
        pub opens: u64,
        /// Bytes read from files.
        pub read_bytes: u64,
        /// Bytes written to files.
        pub written_bytes: u64,
        /// Directories synced.
        pub dir_syncs: u64,
        /// Files linked or copied into a checkpoint and synced.
        pub file_syncs: u64,
    }

    impl std::ops::Sub for IoCounts {
        type Output = Self;

        fn sub(self, earlier: Self) -> Self {
            Self {
                opens: self.opens - earlier.opens,
                read_bytes: self.read_bytes - earlier.read_bytes,
                written_bytes: self.written_bytes - earlier.written_bytes,
                dir_syncs: self.dir_syncs - earlier.dir_syncs,
                file_syncs: self.file_syncs - earlier.file_syncs,
            }
        }
    }

    static COUNTS: [AtomicU64; 5] = [const { AtomicU64::new(0) }; 5];

    pub(crate) fn add(index: usize, n: u64) {
        COUNTS[index].fetch_add(n, Relaxed);
    }

    /// The file accesses of this process so far.
    pub fn io_counts() -> IoCounts {
        let counts = COUNTS.each_ref().map(|count| count.load(Relaxed));
        let [opens, read_bytes, written_bytes, dir_syncs, file_syncs] = counts;
        IoCounts {
            opens,
            read_bytes,
            written_bytes,
            dir_syncs,
            file_syncs,
        }
    }
}

#[cfg(feature = "testing")]
pub use counted::{IoCounts, io_counts};

#[cfg(any(test, feature = "testing"))]
use counted::add;

#[cfg(not(any(test, feature = "testing")))]
fn add(_: usize, _: u64) {}

pub(crate) fn opened() {
    add(0, 1);
}

pub(crate) fn read(bytes: usize) {
    add(1, bytes as u64);
}

pub(crate) fn wrote(bytes: usize) {
    add(2, bytes as u64);
}

pub(crate) fn synced_dir() {
    add(3, 1);
}

pub(crate) fn synced_file() {
    add(4, 1);
}
