//! The tokens of texts, kept as files from one run to the next.
//!
//! A folder has two files for each text and tokenizer, named by a key of their contents:
//! `KEY.u32.bin` with the tokens, a token file as any other, and `KEY.json`, which describes it. The
//! description is written last, so that without it there are no tokens. Both are written beside
//! their names, as `KEY` with six random letters and digits and `.part`, and renamed. Processes of
//! a machine that want the same tokens wait for the first of them at a lock, `KEY.lock`.
//!
//! A process that is killed leaves parts, or tokens without a description. Each use of the folder
//! removes those whose lock no process holds; see [`remove_leftovers`].

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use bytemuck::cast_slice;
use crc_fast::{CrcAlgorithm, Digest};
use indicatif::HumanCount;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;
use zero_ckpt::files::{self, SMALL_FILE_BYTES};

use super::DataError;
use super::corpus::Corpus;
use super::token_format::TokenFormat;
use super::tokenize::stream::BatchTokens;
use super::tokenize::{DocumentEnds, TextTokenizer, tokenizer_checksum};
use super::tokens::Tokens;
use crate::output::{bytes, print_note, progress_bar};

/// Raised when the same text and tokenizer give other tokens.
const FORMAT: u32 = 1;

/// Less text is tokenized at each start, without a bar.
const MIN_BYTES: u64 = 1 << 20;

/// The digits of a key.
const KEY_LEN: usize = 16;
/// The random letters and digits in the name of a part.
const RANDOM_LEN: usize = 6;

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

    remove_leftovers(folder, None);
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
        let tokens = open_tokens(&path).ok()?;
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
        remove_leftovers(self.folder, Some(&self.key));
        if let Some(found) = self.open() {
            return Ok(found);
        }

        let part = self.part()?;
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
            tokens: open_tokens(&path)?,
            files: description.files,
            notice: Some(format!(
                "tokens kept in {} for the next run; --no-token-cache keeps none",
                path.display()
            )),
        })
    }

    /// A new file beside the others, which is removed unless it is renamed.
    fn part(&self) -> io::Result<NamedTempFile> {
        tempfile::Builder::new()
            .prefix(&self.key)
            .rand_bytes(RANDOM_LEN)
            .suffix(".part")
            .tempfile_in(self.folder)
    }

    fn describe(&self, description: &Description) -> io::Result<()> {
        let mut part = self.part()?;
        serde_json::to_writer(&mut part, description)?;
        part.as_file().sync_all()?;
        part.persist(self.path("json"))
            .map_err(|error| error.error)?;
        Ok(())
    }
}

fn open_tokens(path: &Path) -> Result<Tokens, DataError> {
    let opened = files::open(path).map_err(|source| DataError::Read {
        path: path.to_owned(),
        source,
    });
    let (_, bytes) = opened?;
    Tokens::open(path, TokenFormat::by_name(path, bytes)?)
}

/// Removes what killed processes left in `folder`: files whose name is that of a leftover, whose
/// lock exists, as this program creates it first, and is held by no process. `held` is the key
/// whose lock this call's caller holds. A failure leaves the file for the next run.
fn remove_leftovers(folder: &Path, held: Option<&str>) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let leftover = name.to_str().and_then(Leftover::parse);
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        let Some(leftover) = leftover.filter(|_| is_file) else {
            continue;
        };

        // Locked until the file is removed, so that no process writes it meanwhile.
        let lock = (held != Some(leftover.key())).then(|| try_lock(folder, leftover.key()));
        if matches!(lock, Some(None)) || leftover.is_whole(folder) {
            continue;
        }
        let _ignored = fs::remove_file(entry.path());
    }
}

/// Locks the key, if its lock exists and no process holds it. Creates nothing.
fn try_lock(folder: &Path, key: &str) -> Option<File> {
    let path = folder.join(format!("{key}.lock"));
    let is_file = fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_file());
    let lock = File::open(path).ok().filter(|_| is_file)?;
    lock.try_lock().ok().map(|()| lock)
}

/// A file that a killed process may have left, by its name.
#[derive(Debug, PartialEq)]
enum Leftover<'a> {
    /// A file that is written before it is renamed.
    Part { key: &'a str },
    /// Tokens, which are whole when their description exists.
    Tokens { key: &'a str },
}

impl<'a> Leftover<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        let (key, rest) = name.split_at_checked(KEY_LEN)?;
        let is_key = key
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if !is_key {
            return None;
        }
        if rest == ".u32.bin" {
            return Some(Self::Tokens { key });
        }
        let random = rest.strip_suffix(".part")?;
        let is_random =
            random.len() == RANDOM_LEN && random.bytes().all(|byte| byte.is_ascii_alphanumeric());
        is_random.then_some(Self::Part { key })
    }

    fn key(&self) -> &'a str {
        match self {
            Self::Part { key } | Self::Tokens { key } => key,
        }
    }

    /// Whether the file is complete. A description that cannot be looked up counts.
    fn is_whole(&self, folder: &Path) -> bool {
        match self {
            Self::Part { .. } => false,
            Self::Tokens { key } => folder
                .join(format!("{key}.json"))
                .try_exists()
                .unwrap_or(true),
        }
    }
}

/// The folder of kept tokens: `ZERO_TOKEN_CACHE`, or `zero-tokens` in the user's cache folder.
pub fn default_folder() -> Option<PathBuf> {
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

#[cfg(test)]
mod tests {
    use integration_tests::{Files, Folder};

    use super::*;

    #[test]
    fn leftovers_are_known_by_name() {
        let key = hexadecimal(0xabc);
        assert_eq!(key.len(), KEY_LEN);
        let identity = Identity {
            format: FORMAT,
            tokenizer: String::new(),
            texts: String::new(),
            text_bytes: 0,
            before: Vec::new(),
            after: Vec::new(),
        };
        let folder = &Folder::on_disk();
        let entry = Entry::new(folder, identity);
        let part = entry.part().unwrap();
        let name = part.path().file_name().unwrap().to_str().unwrap();
        assert_eq!(
            Leftover::parse(name),
            Some(Leftover::Part { key: &entry.key })
        );
        assert_eq!(
            Leftover::parse(&format!("{key}.u32.bin")),
            Some(Leftover::Tokens { key: &key })
        );

        let others = [
            String::new(),
            "notes.part".to_owned(),
            "0123456789abcdeé.part".to_owned(),
            format!("{key}.json"),
            format!("{key}.lock"),
            format!("{key}.part"),
            format!("{key}abcde.part"),
            format!("{key}abcdefg.part"),
            format!("{key}ab-def.part"),
            format!("{key}.u32.bin.old"),
            format!("{}abcdef.part", key.to_uppercase()),
        ];
        for name in others {
            assert_eq!(Leftover::parse(&name), None, "{name}");
        }
    }

    /// The names of the files that remain in `folder`.
    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn leftovers_of_living_processes_stay() {
        let folder = &Folder::on_disk();
        let [dead, living, no_lock] = [1, 2, 3].map(hexadecimal);
        let at = |key: &str, rest: &str| folder.join(format!("{key}{rest}"));
        for key in [&dead, &living, &no_lock] {
            for rest in ["abcdef.part", "ABC123.part", ".u32.bin"] {
                fs::write(at(key, rest), b"tokens").unwrap();
            }
        }
        fs::write(at(&dead, ".lock"), b"").unwrap();
        let lock = File::create(at(&living, ".lock")).unwrap();
        lock.lock().unwrap();

        // Neither folders, links nor names of others are this program's.
        fs::create_dir(at(&dead, "folder.part")).unwrap();
        folder.write("notes.part", b"mine");
        #[cfg(unix)]
        std::os::unix::fs::symlink(folder.join("notes.part"), at(&dead, "linked.part")).unwrap();

        let mut expected = names(folder);
        expected.retain(|name| {
            let rest = name.strip_prefix(&dead);
            rest.is_none_or(|rest| !["abcdef.part", "ABC123.part", ".u32.bin"].contains(&rest))
        });
        remove_leftovers(folder, None);
        assert_eq!(names(folder), expected);

        // The holder of the lock may remove its own, and whole tokens stay.
        fs::write(at(&living, ".json"), b"{}").unwrap();
        remove_leftovers(folder, Some(&living));
        let own: Vec<String> = names(folder)
            .into_iter()
            .filter(|name| name.starts_with(&living))
            .collect();
        assert_eq!(
            own,
            [".json", ".lock", ".u32.bin"].map(|rest| format!("{living}{rest}"))
        );

        drop(lock);
        fs::remove_file(at(&living, ".json")).unwrap();
        remove_leftovers(folder, None);
        assert!(!at(&living, ".u32.bin").exists());
        remove_leftovers(&folder.join("no folder"), None);
    }
}
