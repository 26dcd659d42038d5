//! Storage of tokens, and statistics of all of them.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crc_fast::{CrcAlgorithm, Digest};

use super::DataError;

/// Bytes of a file that are read at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// The tokens of a data set.
pub(super) enum Tokens {
    /// A file of u16 tokens, read on demand: it may be larger than memory.
    File {
        path: PathBuf,
        file: File,
        len_tokens: u64,
    },
    /// Text, one token per byte.
    Bytes(Vec<u8>),
    /// The output of a tokenizer.
    Ids(Vec<u32>),
}

/// Statistics of all tokens.
pub(super) struct TokenStats {
    /// Occurrences of each token, up to the largest that occurs.
    pub(super) counts: Vec<u64>,
    /// CRC-64 of the tokens.
    pub(super) fingerprint: u64,
}

impl Tokens {
    /// Opens a file of little-endian u16 tokens.
    pub(super) fn open(path: &Path) -> Result<Self, DataError> {
        let read = |source| DataError::Read {
            path: path.to_owned(),
            source,
        };

        let file = File::open(path).map_err(read)?;
        let bytes = file.metadata().map_err(read)?.len();
        if bytes == 0 {
            return Err(DataError::Empty {
                path: path.to_owned(),
            });
        }

        if !bytes.is_multiple_of(2) {
            return Err(DataError::OddLength {
                path: path.to_owned(),
                bytes,
            });
        }

        Ok(Self::File {
            path: path.to_owned(),
            file,
            len_tokens: bytes / 2,
        })
    }

    pub(super) fn len(&self) -> u64 {
        match self {
            Self::File { len_tokens, .. } => *len_tokens,
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Ids(ids) => ids.len() as u64,
        }
    }

    /// Reads the tokens from `start` into `out`; the range must be valid.
    pub(super) fn read(&self, start: u64, out: &mut [u32]) -> Result<(), DataError> {
        match self {
            Self::File { path, file, .. } => {
                let mut bytes = vec![0; out.len() * 2];
                file.read_exact_at(&mut bytes, start * 2)
                    .map_err(|source| DataError::Read {
                        path: path.clone(),
                        source,
                    })?;
                for (o, token) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *o = u32::from(u16::from_le_bytes(*token));
                }
            }
            Self::Bytes(bytes) => {
                for (o, token) in out.iter_mut().zip(&bytes[start as usize..]) {
                    *o = u32::from(*token);
                }
            }
            Self::Ids(ids) => {
                for (o, token) in out.iter_mut().zip(&ids[start as usize..]) {
                    *o = *token;
                }
            }
        }

        Ok(())
    }

    /// Computes the statistics of the tokens in `range` in one pass; the range must be valid.
    pub(super) fn stats(&self, range: Range<u64>) -> Result<TokenStats, DataError> {
        let mut counts = Vec::new();
        let mut crc = Digest::new(CrcAlgorithm::Crc64Nvme);
        let mut count = |token: u32| {
            let i = token as usize;
            if i >= counts.len() {
                counts.resize(i + 1, 0);
            }
            counts[i] += 1;
        };

        match self {
            Self::Bytes(bytes) => {
                let bytes = &bytes[index(&range)];
                crc.update(bytes);
                bytes.iter().for_each(|b| count(u32::from(*b)));
            }
            Self::Ids(ids) => ids[index(&range)].iter().for_each(|id| {
                crc.update(&id.to_le_bytes());
                count(*id);
            }),
            Self::File { .. } => self.each_chunk(range, |_, bytes| {
                crc.update(bytes);
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .for_each(|t| count(u32::from(u16::from_le_bytes(*t))));
                false
            })?,
        }

        Ok(TokenStats {
            counts,
            fingerprint: crc.finalize(),
        })
    }

    /// The first token of at least `bound` in `range`, with its position among all tokens.
    pub(super) fn first_at_least(
        &self,
        bound: u32,
        range: Range<u64>,
    ) -> Result<Option<(u32, u64)>, DataError> {
        let mut found = None;
        match self {
            Self::Bytes(bytes) => {
                let mut tokens = index(&range).map(|i| (u32::from(bytes[i]), i as u64));
                found = tokens.find(|(token, _)| *token >= bound);
            }
            Self::Ids(ids) => {
                let mut tokens = index(&range).map(|i| (ids[i], i as u64));
                found = tokens.find(|(token, _)| *token >= bound);
            }
            Self::File { .. } => self.each_chunk(range, |start, bytes| {
                let mut tokens = bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|t| u32::from(u16::from_le_bytes(*t)));
                found = tokens
                    .clone()
                    .position(|t| t >= bound)
                    .and_then(|i| Some((tokens.nth(i)?, start + i as u64)));
                found.is_some()
            })?,
        }

        Ok(found)
    }

    /// Calls `f(position of the first token, bytes)` for each chunk of a token file in `range`
    /// until it returns true.
    fn each_chunk(
        &self,
        range: Range<u64>,
        mut f: impl FnMut(u64, &[u8]) -> bool,
    ) -> Result<(), DataError> {
        let Self::File { path, file, .. } = self else {
            return Ok(());
        };
        let mut buffer = vec![0; CHUNK_BYTES];
        let (mut done, end) = (range.start * 2, range.end * 2);
        while done < end {
            let n = CHUNK_BYTES.min((end - done) as usize);
            file.read_exact_at(&mut buffer[..n], done)
                .map_err(|source| DataError::Read {
                    path: path.clone(),
                    source,
                })?;
            if f(done / 2, &buffer[..n]) {
                break;
            }
            done += n as u64;
        }
        Ok(())
    }
}

fn index(range: &Range<u64>) -> Range<usize> {
    range.start as usize..range.end as usize
}
