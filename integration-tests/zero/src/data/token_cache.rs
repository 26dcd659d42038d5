//! The tokens of texts, kept as files from one run to the next.
//!
//! A folder has two files for each text and tokenizer, named by a key of their contents:
//! `KEY.u32.bin` with the tokens, a token file as any other, and `KEY.json`, which describes it. The
//! description is written last, so that without it there are no tokens. Both are written beside
//! their names and renamed. Processes of a machine that want the same tokens wait for the first of
//! them at a lock, `KEY.lock`.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use bytemuck::cast_slice;
use crc_fast::{CrcAlgorithm, Digest};
use indicatif::HumanCount;
use serde::{Deserialize, Serialize};
use zero_ckpt::files::{self, SMALL_FILE_BYTES};

use super::DataError;
use super::corpus::Corpus;
use super::tokenize::stream::BatchTokens;
use super::tokenize::{DocumentEnds, TextTokenizer, tokenizer_checksum};
use super::tokens::Tokens;
use crate::output::{bytes, print_note, progress_bar};

/// Raised when the same text and tokenizer give other tokens.
const FORMAT: u32 = 1;

/// Less text is tokenized at each start, without a bar.
const MIN_BYTES: u64 = 1 << 20;

/// What decides the tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Identity {
    format: u32,
    /// Of the files of the tokenizer, in hexadecimal, as the next.
    tokenizer: String,
    texts: String,
    text_bytes: u64,
    before: Vec<u32>,
    after: Vec<u32>,
}

/// `KEY.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Description {
    identity: Identity,
    tokens: u64,
    /// The CRC-64 of the file of tokens, in hexadecimal.
    checksum: String,
    /// The first token of each file.
    files: Vec<u64>,
}

/// Tokens of a corpus.
pub(super) struct Tokenized {
    pub(super) tokens: Tokens,
    /// The first token of each file.
    pub(super) files: Vec<u64>,
    /// What the user should know about the cache.
    pub(super) notice: Option<String>,
}

/// The tokens of `corpus`: from the folder `cache` if they are there, or else made and kept there.
///
/// # Errors
/// A failed read or tokenizer. A folder that cannot be written to is no error: the tokens are kept in memory.
pub(super) fn tokens(
    corpus: &Corpus,
    tokenizer: &TextTokenizer,
    threads: usize,
    cache: Option<&Path>,
) -> Result<Tokenized, DataError> {
    let job = Job {
        corpus,
        tokenizer,
        threads,
        ends: corpus.ends(tokenizer)?,
    };
    let Some(folder) = cache.filter(|_| corpus.bytes() >= MIN_BYTES) else {
        return job.in_memory(None);
    };

    let entry = Entry::new(folder, job.identity()?);
    if let Some(found) = entry.open() {
        return Ok(found);
    }
    match entry.make(&job) {
        Ok(made) => Ok(made),
        Err(Failure::Data(error)) => Err(error),
        Err(Failure::Cache(error)) => job.in_memory(Some(format!(
            "the tokens are kept in memory, since the cache {} failed: {error}; set ZERO_TOKEN_CACHE to another folder, or \
             pass --no-token-cache{}",
            folder.display(),
            files::remedy(&error)
        ))),
    }
}

/// Why no file of tokens was made.
enum Failure {
    Data(DataError),
    Cache(io::Error),
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        Self::Data(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Cache(error)
    }
}

/// Tokenization of a corpus.
struct Job<'a> {
    corpus: &'a Corpus,
    tokenizer: &'a TextTokenizer,
    threads: usize,
    ends: DocumentEnds,
}

impl Job<'_> {
    fn identity(&self) -> Result<Identity, DataError> {
        Ok(Identity {
            format: FORMAT,
            tokenizer: hexadecimal(tokenizer_checksum(self.tokenizer.path())?),
            texts: hexadecimal(self.corpus.checksum()),
            text_bytes: self.corpus.bytes(),
            before: self.ends.before.clone(),
            after: self.ends.after.clone(),
        })
    }

    fn in_memory(&self, notice: Option<String>) -> Result<Tokenized, DataError> {
        let mut ids = Vec::new();
        let files = self.run(|tokens| {
            ids.extend_from_slice(tokens);
            Ok(())
        })?;
        Ok(Tokenized {
            tokens: Tokens::Ids(ids),
            files,
            notice,
        })
    }

    /// Tokenizes all; returns the first token of each file.
    fn run(
        &self,
        mut keep: impl FnMut(&[u32]) -> Result<(), DataError>,
    ) -> Result<Vec<u64>, DataError> {
        let bar = (self.corpus.bytes() >= MIN_BYTES).then(|| progress_bar(self.corpus.bytes()));
        let (mut files, mut len) = (Vec::new(), 0);
        let collect = |batch: BatchTokens| {
            keep(&batch.tokens)?;
            files.extend(batch.files.iter().map(|first| len + *first as u64));
            len += batch.tokens.len() as u64;
            if let Some(bar) = &bar {
                bar.inc(batch.bytes);
                let [done, all] = [bar.position(), self.corpus.bytes()].map(bytes);
                bar.set_message(format!(
                    "tokenizing: {done} of {all}, {} tokens",
                    HumanCount(len)
                ));
            }
            Ok(())
        };
        let push = |pieces: &mut _| self.corpus.push(self.tokenizer, pieces);
        let result = self
            .tokenizer
            .tokenize(self.threads, &self.ends, push, collect);
        if let Some(bar) = &bar {
            bar.finish_and_clear();
        }
        result.map(|()| files)
    }
}

/// The files of one key.
struct Entry<'a> {
    folder: &'a Path,
    key: String,
    identity: Identity,
}

impl<'a> Entry<'a> {
    fn new(folder: &'a Path, identity: Identity) -> Self {
        let text = serde_json::to_string(&identity).unwrap_or_default();
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(text.as_bytes());
        Self {
            folder,
            key: hexadecimal(digest.finalize()),
            identity,
        }
    }

    fn path(&self, extension: &str) -> PathBuf {
        self.folder.join(format!("{}.{extension}", self.key))
    }

    /// The kept tokens, if all of them are as their description says.
    fn open(&self) -> Option<Tokenized> {
        let description = files::read(&self.path("json"), SMALL_FILE_BYTES).ok()?;
        let description: Description = serde_json::from_slice(&description).ok()?;
        if description.identity != self.identity {
            return None;
        }
        let path = self.path("u32.bin");
        let tokens = Tokens::open(&path).ok()?;
        let is_whole = tokens.len() == description.tokens
            && hexadecimal(tokens.checksum().ok()?) == description.checksum;
        if !is_whole {
            print_note(format_args!(
                "{}: not what was written; the text is tokenized again",
                path.display()
            ));
            return None;
        }
        let path = path.display();
        Some(Tokenized {
            tokens,
            files: description.files,
            notice: Some(format!("tokens read from {path}")),
        })
    }

    /// Makes the tokens and keeps them, unless another process does so first.
    fn make(&self, job: &Job<'_>) -> Result<Tokenized, Failure> {
        fs::create_dir_all(self.folder)?;
        let lock = File::create(self.path("lock"))?;
        if lock.try_lock().is_err() {
            print_note("waiting for another process, which tokenizes the same text");
            lock.lock()?;
        }
        if let Some(found) = self.open() {
            return Ok(found);
        }

        // Removed unless it is renamed.
        let part = tempfile::Builder::new()
            .prefix(&self.key)
            .suffix(".part")
            .tempfile_in(self.folder)?;
        let mut out = BufWriter::with_capacity(1 << 20, part.as_file());
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        let mut tokens = 0;
        let mut failed = None;
        let files = job.run(|batch| {
            let batch: Vec<u32> = batch.iter().map(|token| token.to_le()).collect();
            digest.update(cast_slice(&batch));
            tokens += batch.len() as u64;
            out.write_all(cast_slice(&batch)).map_err(|error| {
                failed = Some(error);
                DataError::Missing {
                    path: self.folder.to_owned(),
                }
            })
        });
        if let Some(error) = failed {
            return Err(error.into());
        }
        let files = files?;
        out.flush()?;
        drop(out);
        part.as_file().sync_all()?;

        let path = self.path("u32.bin");
        part.persist(&path).map_err(|error| error.error)?;
        let description = Description {
            identity: self.identity.clone(),
            tokens,
            checksum: hexadecimal(digest.finalize()),
            files,
        };
        self.describe(&description)?;
        Ok(Tokenized {
            tokens: Tokens::open(&path)?,
            files: description.files,
            notice: Some(format!(
                "tokens kept in {} for the next run; --no-token-cache keeps none",
                path.display()
            )),
        })
    }

    fn describe(&self, description: &Description) -> io::Result<()> {
        let mut part = tempfile::Builder::new()
            .prefix(&self.key)
            .suffix(".part")
            .tempfile_in(self.folder)?;
        serde_json::to_writer(&mut part, description)?;
        part.as_file().sync_all()?;
        part.persist(self.path("json"))
            .map_err(|error| error.error)?;
        Ok(())
    }
}

/// The folder of kept tokens: `ZERO_TOKEN_CACHE`, or `zero-tokens` in the user's cache folder.
pub(crate) fn default_folder() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(folder) = folder("ZERO_TOKEN_CACHE") {
        return Some(folder.into());
    }
    let cache = folder("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute());
    let cache = cache.or_else(|| Some(PathBuf::from(folder("HOME")?).join(".cache")))?;
    Some(cache.join("zero-tokens"))
}

fn hexadecimal(n: u64) -> String {
    format!("{n:016x}")
}
