//! The beginning of a file, by which its kind is known.

use std::io::Read;
use std::path::Path;

use zero_ckpt::files;

use super::DataError;

/// Bytes of a file that decide its kind.
const START_BYTES: u64 = 1 << 18;

/// The beginning of a file.
#[derive(Debug)]
pub(super) struct Start {
    pub(super) bytes: Vec<u8>,
    /// The length of the file.
    pub(super) file_bytes: u64,
}

impl Start {
    /// # Errors
    /// The file cannot be read.
    pub(super) fn read(path: &Path) -> Result<Self, DataError> {
        let failed = |source| DataError::Read {
            path: path.to_owned(),
            source,
        };
        let (file, file_bytes) = files::open(path).map_err(failed)?;
        let mut bytes = Vec::new();
        file.take(START_BYTES)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        Ok(Self { bytes, file_bytes })
    }
}
