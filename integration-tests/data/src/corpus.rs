//! Texts for a tokenizer: scanned once for their checksums, then read again part by part.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crc_fast::{CrcAlgorithm, Digest};
use zero_ckpt::files;

use super::DataError;
use super::tokenize::stream::{Pieces, ReadFailure};
use super::tokenize::{DocumentEnds, TextTokenizer};

/// Bytes of a file that are read at a time.
const BLOCK_BYTES: usize = 1 << 20;

/// What a scan finds in a text file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TextFile {
    pub(super) bytes: u64,
    /// The CRC-64 of its bytes.
    pub(super) checksum: u64,
    /// Whether all of it is white space.
    pub(super) is_blank: bool,
}

impl TextFile {
    /// Reads all of a file.
    ///
    /// # Errors
    /// It cannot be read, or is not UTF-8.
    pub(super) fn scan(path: &Path) -> Result<Self, DataError> {
        let failed = |source| DataError::Read {
            path: path.to_owned(),
            source,
        };
        let (mut file, _) = files::open(path).map_err(failed)?;
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        let (mut bytes, mut is_blank) = (0, true);
        // What is left of the last block is the start of a character.
        let mut block = Vec::new();
        loop {
            let kept = block.len();
            let limit = BLOCK_BYTES as u64;
            let read = file.by_ref().take(limit).read_to_end(&mut block);
            let read = read.map_err(failed)?;
            digest.update(&block[kept..]);

            let (text, rest) = valid_text(&block);
            if rest.is_some_and(|invalid| invalid || read == 0) {
                return Err(DataError::NotUtf8 {
                    path: path.to_owned(),
                    at: bytes as usize - kept + text.len(),
                });
            }
            is_blank = is_blank && text.trim().is_empty();
            let text_len = text.len();
            block.drain(..text_len);
            bytes += read as u64;
            if read == 0 {
                break;
            }
        }
        Ok(Self {
            bytes,
            checksum: digest.finalize(),
            is_blank,
        })
    }
}

/// The text at the start of `bytes`. If more follows, whether it is no text, rather than the start
/// of a character.
fn valid_text(bytes: &[u8]) -> (&str, Option<bool>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (text, None),
        Err(error) => {
            let valid = &bytes[..error.valid_up_to()];
            let text = std::str::from_utf8(valid).unwrap_or_default();
            (text, Some(error.error_len().is_some()))
        }
    }
}

/// The texts of a data set.
#[derive(Debug)]
pub(super) struct Corpus {
    pub(super) files: Vec<(PathBuf, TextFile)>,
    /// Whether each file is a document of its own, with a line break and an end token at its end.
    pub(super) separate: bool,
}

impl Corpus {
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, file)| file.bytes).sum()
    }

    /// The checksum of the contents, without the paths.
    pub(super) fn checksum(&self) -> u64 {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(&[u8::from(self.separate)]);
        for (_, file) in &self.files {
            digest.update(&file.bytes.to_le_bytes());
            digest.update(&file.checksum.to_le_bytes());
        }
        digest.finalize()
    }

    /// # Errors
    /// A file that may name the end token cannot be used.
    pub(super) fn ends(&self, tokenizer: &TextTokenizer) -> Result<DocumentEnds, DataError> {
        tokenizer.document_ends(self.separate)
    }

    /// Pushes all texts in order.
    pub(super) fn push(
        &self,
        tokenizer: &TextTokenizer,
        pieces: &mut Pieces,
    ) -> Result<(), ReadFailure> {
        for (path, scanned) in &self.files {
            let (file, _) = files::open(path).map_err(|source| DataError::Read {
                path: path.clone(),
                source,
            })?;
            let mut input = Counted::new(file);
            tokenizer.push_document(&mut input, path, self.separate, pieces)?;
            if input.bytes != scanned.bytes || input.digest.finalize() != scanned.checksum {
                return Err(DataError::Changed { path: path.clone() }.into());
            }
        }
        Ok(())
    }
}

/// A file whose bytes are counted as they are read.
struct Counted {
    file: File,
    bytes: u64,
    digest: Digest,
}

impl Counted {
    fn new(file: File) -> Self {
        Self {
            file,
            bytes: 0,
            digest: Digest::new(CrcAlgorithm::Crc64Nvme),
        }
    }
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(buffer)?;
        self.digest.update(&buffer[..n]);
        self.bytes += n as u64;
        Ok(n)
    }
}
