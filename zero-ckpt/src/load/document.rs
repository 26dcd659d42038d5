//! Documents of a checkpoint, such as the state of a trainer.

use std::io::Read as _;

use crate::CkptError;
use crate::format::manifest::DocumentRecord;
use crate::io::counts;
use crate::io::dir::Dir;
use crate::load::shard_file::{check_bytes, open_checked};

/// Reads a document and verifies it.
pub(crate) fn read_document(dir: &Dir, record: &DocumentRecord) -> Result<Vec<u8>, CkptError> {
    let path = dir.path().join(&record.name);
    let mut bytes = Vec::new();
    let file = open_checked(dir, &record.name, record.bytes, false)?;
    file.take(record.bytes)
        .read_to_end(&mut bytes)
        .map_err(CkptError::io("read", &path))?;
    counts::read(bytes.len());
    check_bytes(&path, 0, &bytes, record.crc64).map(|()| bytes)
}
