//! Verification of every byte of a checkpoint.

use crate::load::document::read_document;
use crate::load::shard_file::ShardFile;
use crate::{CkptError, Reader};

/// The result of [`Reader::verify`].
#[derive(Debug, Default)]
#[must_use = "the report lists the problems"]
#[non_exhaustive]
pub struct VerifyReport {
    /// Files of which every byte matches its checksum.
    pub good_files: usize,
    /// Bytes of those files.
    pub good_bytes: u64,
    /// The first problem of each other file, with its position.
    pub problems: Vec<CkptError>,
}

impl Reader {
    /// Reads every byte of every file and compares the checksums. Memory use: one file's front and
    /// a few chunks.
    pub fn verify(&self) -> VerifyReport {
        let mut report = VerifyReport::default();
        let mut count = |bytes: u64, checked: Result<(), CkptError>| match checked {
            Ok(()) => {
                report.good_files += 1;
                report.good_bytes += bytes;
            }
            Err(e) => report.problems.push(e),
        };
        for (index, record) in self.manifest.files.iter().enumerate() {
            let file = ShardFile::open(&self.dir, &self.manifest, &self.layout, index);
            count(record.bytes, file.and_then(|f| f.verify(&self.dir)));
        }
        for record in &self.manifest.documents {
            count(record.bytes, read_document(&self.dir, record).map(drop));
        }
        report
    }
}
