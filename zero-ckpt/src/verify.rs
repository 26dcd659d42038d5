//! Checking all of a checkpoint: every file, every byte.

use crate::shard_file::ShardFile;
use crate::{CkptError, Reader};

/// What [`Reader::verify`] found.
#[derive(Debug, Default)]
#[must_use = "the problems found are in here"]
pub struct Verified {
    /// Files whose every byte has its checksum.
    pub good_files: usize,
    /// Bytes of those.
    pub good_bytes: u64,
    /// The first problem of each other file; it names the file and the place.
    pub problems: Vec<CkptError>,
}

impl Reader {
    /// Reads every byte of every file and compares the checksums. Coverage of all elements was checked when the
    /// checkpoint was opened. Needs memory for one file's front and a few chunks.
    pub fn verify(&self) -> Verified {
        let mut report = Verified::default();
        for (index, record) in self.manifest.files.iter().enumerate() {
            let checked =
                ShardFile::open(&self.dir, &self.manifest, index).and_then(|f| f.verify(&self.dir, self.io));
            match checked {
                Ok(()) => {
                    report.good_files += 1;
                    report.good_bytes += record.bytes;
                }
                Err(e) => report.problems.push(e),
            }
        }
        report
    }
}
