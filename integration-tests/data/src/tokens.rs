//! Storage of tokens, and statistics of all of them.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crc_fast::{CrcAlgorithm, Digest};
use zero_ckpt::files;

use super::DataError;
use super::token_format::TokenFormat;

/// Bytes of a file that are read at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// Tokens from here on are counted as one: no vocabulary is so large, and a file that is no file of
/// u32 has any.
const HIGHEST_COUNTED: usize = 1 << 22;

/// The tokens of a data set.
pub(super) enum Tokens {
    /// A file of tokens, read on demand: it may be larger than memory.
    File {
        path: PathBuf,
        file: File,
        format: TokenFormat,
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
    /// Opens a file of tokens.
    pub(super) fn open(path: &Path, format: TokenFormat) -> Result<Self, DataError> {
        let (file, _) = files::open(path).map_err(|source| DataError::Read {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self::File {
            path: path.to_owned(),
            file,
            format,
        })
    }

    pub(super) fn len(&self) -> u64 {
        match self {
            Self::File { format, .. } => format.len_tokens,
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Ids(ids) => ids.len() as u64,
        }
    }

    /// Reads the tokens from `start` into `out`; the range must be valid.
    pub(super) fn read(&self, start: u64, out: &mut [u32]) -> Result<(), DataError> {
        match self {
            Self::File { path, file, format } => {
                let width = format.width;
                let mut bytes = vec![0; out.len() * width.bytes() as usize];
                file.read_exact_at(&mut bytes, format.position(start))
                    .map_err(|source| DataError::Read {
                        path: path.clone(),
                        source,
                    })?;
                width.each(&bytes, |i, token| {
                    out[i] = token;
                    false
                });
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
            let i = (token as usize).min(HIGHEST_COUNTED);
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
            Self::File { format, .. } => self.each_chunk(range, |_, bytes| {
                crc.update(bytes);
                format.width.each(bytes, |_, token| {
                    count(token);
                    false
                })
            })?,
        }

        Ok(TokenStats {
            counts,
            fingerprint: crc.finalize(),
        })
    }

    /// The CRC-64 of all tokens, without counting them.
    pub(super) fn checksum(&self) -> Result<u64, DataError> {
        let mut crc = Digest::new(CrcAlgorithm::Crc64Nvme);
        match self {
            Self::Bytes(bytes) => crc.update(bytes),
            Self::Ids(ids) => ids.iter().for_each(|id| crc.update(&id.to_le_bytes())),
            Self::File { .. } => self.each_chunk(0..self.len(), |_, bytes| {
                crc.update(bytes);
                false
            })?,
        }
        Ok(crc.finalize())
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
            Self::File { format, .. } => self.each_chunk(range, |start, bytes| {
                format.width.each(bytes, |i, token| {
                    if token >= bound {
                        found = Some((token, start + i as u64));
                    }
                    found.is_some()
                })
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
        let Self::File { path, file, format } = self else {
            return Ok(());
        };
        let width = format.width.bytes();
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut done = range.start * width;
        let end = range.end * width;
        while done < end {
            let n = CHUNK_BYTES.min((end - done) as usize);
            file.read_exact_at(&mut buffer[..n], format.position(0) + done)
                .map_err(|source| DataError::Read {
                    path: path.clone(),
                    source,
                })?;
            if f(done / width, &buffer[..n]) {
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
