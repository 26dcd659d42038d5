//! Training data: tokens from a file of tokens, a text, or a folder of texts.
//!
//! A **data set** is a sequence of tokens. A **row** is `seq_len` of its tokens and, as targets,
//! the same shifted by one. A **micro-batch** is the rows of one forward and backward pass of a
//! rank. The start of a row is a pure function of step, micro-batch and row (and, for text, the
//! seed), so a resumed run reads the same rows.
//!
//! | source (`kind.rs`) | tokens | rows |
//! |---|---|---|
//! | a file of tokens (`token_format.rs`) | little-endian u16 or u32, read on demand | consecutive, wrapping at the end |
//! | a text file | its bytes, or by a tokenizer | random windows |
//! | a folder | all its text files, by path, without what runs write | random windows |
//!
//! A tokenizer puts its own tokens before a text (such as `<s>`), and the end token of its model
//! behind each file of a folder. What it makes of a long text is kept in a folder of token files.
//!
//! A folder that the user names is read whole, and [`Dataset::notices`] names the files that are
//! not text. The current folder, which is the default, is read without hidden, git-ignored, built
//! and large files.
//!
//! ```
//! use zero_data::{DataSource, Dataset};
//! use zero_trainer::{Batch, BatchAt};
//!
//! let dir = tempfile::tempdir().unwrap();
//! let path = dir.path().join("text.txt");
//! std::fs::write(&path, "to be or not to be, that is the question").unwrap();
//! let data = Dataset::open(&DataSource::at(&path)).unwrap();
//! data.validate(256, 8).unwrap();
//!
//! let mut batch = Batch::zeros(16);
//! let at = BatchAt { step: 0, micro_batch_index: 0, grad_accum: 1, rank: 0, world_size: 1,
//!     micro_batch: 2, seq_len: 8, seed: 1 };
//! data.batch(at, &mut batch).unwrap();
//! assert_eq!(batch.inputs[1..8], batch.targets[..7]);
//! println!("{}; a unigram model's loss is {:.3}", data.describe(), data.unigram_loss());
//! ```
//!
//! Not supported: shuffling of whole epochs, downloads.

mod corpus;
mod error;
mod examples;
mod folder;
mod foreign;
mod kind;
mod order;
pub mod output;
mod outputs;
mod place;
mod source;
mod start;
mod text_file;
mod token_cache;
mod token_format;
mod tokenize;
mod tokens;

#[cfg(test)]
mod tests;

use std::fmt;
use std::num::NonZero;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use indicatif::HumanCount;
use zero_ckpt::files;
use zero_trainer::{Batch, BatchAt, ModelError, ValidationData};

pub use error::DataError;
pub use examples::{
    EncoderSource, Example, ExampleRows, Examples, RowData, RowOptions, TrainingData, render_apart,
    serve_templates,
};
pub use kind::{DataKind, has_tokens};
pub use place::{DataPosition, Pace};
pub use source::{DataSource, FolderFiles};
pub use token_cache::default_folder as default_token_cache;
pub use tokenize::{TextTokenizer, check_tokenizer, tokenizer_checksum};

use corpus::{Corpus, TextFile};
use folder::Documents;
use kind::Content;
use order::Order;
use text_file::Scope;
use token_cache::Tokenized;
use token_format::TokenFormat;
use tokens::{TokenStats, Tokens};

/// Minimum text in the current folder for it to be the default data.
pub const MIN_DEFAULT_BYTES: u64 = 1 << 16;

/// Most files of the current folder for it to be the default data: a home folder has more, and
/// takes minutes to read.
const MAX_DEFAULT_FILES: usize = 100_000;

/// The largest vocabulary of a model that may be trained on bytes: 256, and special tokens or
/// padding.
pub const MAX_BYTE_VOCAB: usize = 512;

/// Open data before its statistics are computed.
struct Opened {
    tokens: Arc<Tokens>,
    order: Order,
    /// The path, for error messages.
    name: String,
    description: String,
    /// Of a folder, the first token of each file, in order.
    files: Vec<(u64, PathBuf)>,
    /// The files left out of the data.
    notices: Vec<String>,
}

impl Opened {
    fn new(tokens: Tokens, order: Order, path: &Path, description: String) -> Self {
        let name = path.display().to_string();
        Self {
            tokens: Arc::new(tokens),
            order,
            name,
            description,
            files: Vec::new(),
            notices: Vec::new(),
        }
    }

    /// The data set of the tokens in `range`.
    fn part(
        &self,
        range: Range<u64>,
        name: String,
        description: String,
    ) -> Result<Dataset, DataError> {
        let TokenStats {
            counts,
            fingerprint,
        } = self.tokens.stats(range.clone())?;
        Ok(Dataset {
            tokens: Arc::clone(&self.tokens),
            range,
            order: self.order,
            counts,
            fingerprint,
            name,
            description,
            files: self.files.clone(),
            notices: self.notices.clone(),
        })
    }
}

/// An open data set.
pub struct Dataset {
    tokens: Arc<Tokens>,
    /// The tokens of this data set among all that were opened.
    range: Range<u64>,
    order: Order,
    /// Occurrences of each token, up to the largest that occurs.
    counts: Vec<u64>,
    fingerprint: u64,
    /// The path, for error messages.
    name: String,
    /// Of a folder, the first token of each file, in order.
    files: Vec<(u64, PathBuf)>,
    description: String,
    /// The files left out of the data.
    notices: Vec<String>,
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dataset({})", self.description)
    }
}

impl Dataset {
    /// Opens the data and reads all of it once to count its tokens.
    ///
    /// # Errors
    /// Missing, unreadable, empty or malformed data; see [`DataError`].
    pub fn open(source: &DataSource) -> Result<Self, DataError> {
        Self::open_as(source, DataKind::of(source)?)
    }

    /// As [`Self::open`], of data whose kind is known.
    pub(crate) fn open_as(source: &DataSource, kind: DataKind) -> Result<Self, DataError> {
        let all = Self::read(source, kind)?;
        all.part(
            0..all.tokens.len(),
            all.name.clone(),
            all.description.clone(),
        )
    }

    /// Opens the data and splits its tokens, as [`Self::open`]: the last `validation` of them, a
    /// fraction from 0 to 1, are validation data, and the others training data. Returns both,
    /// training data first.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_split(source: &DataSource, validation: f64) -> Result<(Self, Self), DataError> {
        Self::split_as(source, DataKind::of(source)?, validation)
    }

    /// As [`Self::open_split`], of data whose kind is known.
    pub(crate) fn split_as(
        source: &DataSource,
        kind: DataKind,
        validation: f64,
    ) -> Result<(Self, Self), DataError> {
        let all = Self::read(source, kind)?;
        let len = all.tokens.len();
        // nanoGPT's rounding; rounding up to a float cannot pass the end.
        let split = ((len as f64 * (1.0 - validation)) as u64).min(len);
        let [first, last] = [split, len - split].map(HumanCount);
        let training = all.part(
            0..split,
            format!("{}, the part to train on", all.name),
            format!("{}; trained on the first {first} tokens", all.description),
        )?;
        let name = format!("{}, the part for validation", all.name);
        let validation = all.part(
            split..len,
            name,
            format!("the last {last} tokens of {}", all.name),
        )?;
        Ok((training, validation))
    }

    fn read(source: &DataSource, kind: DataKind) -> Result<Opened, DataError> {
        let path = source.path.as_deref().unwrap_or(Path::new("."));
        let tokenizer = || {
            let path = source.tokenizer.as_deref();
            path.map(TextTokenizer::open).transpose()
        };

        let opened = match kind.content {
            Content::Examples(_) => Err(DataError::Examples {
                path: path.to_owned(),
            }),
            Content::Tokens(format) => read_tokens(path, format),
            Content::Texts => read_folder(path, source, tokenizer()?.as_ref()),
            Content::Text => match tokenizer()? {
                Some(tokenizer) => read_text(path, source, &tokenizer),
                None => read_bytes(path),
            },
        }?;
        Ok(Opened {
            notices: [kind.notices, opened.notices].concat(),
            ..opened
        })
    }

    /// Whether rows are in the order of the tokens.
    pub(crate) fn is_in_order(&self) -> bool {
        matches!(self.order, Order::InOrder(_))
    }

    /// Begins the run's steps at `from`. Random windows have no place.
    pub(crate) fn begin_at(&mut self, from: DataPosition) {
        if let Order::InOrder(place) = &mut self.order {
            *place = from;
        }
    }

    /// The files left out of the data, one line each; empty unless the data is a folder that the
    /// user named.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Number of tokens.
    pub fn len_tokens(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// The CRC-64 of all tokens; detects data that changed since a checkpoint.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// One line of text: the source, its size and its order.
    pub fn describe(&self) -> &str {
        &self.description
    }

    /// Checks that a model of `vocab_size` tokens can be trained on rows of `seq_len` tokens.
    ///
    /// # Errors
    /// [`DataError::TooShort`], [`DataError::NoTokenizer`], or [`DataError::OutsideVocabulary`] for
    /// the first such token.
    pub fn validate(&self, vocab_size: usize, seq_len: usize) -> Result<(), DataError> {
        let tokens = self.len_tokens();
        if tokens <= seq_len as u64 {
            return Err(DataError::TooShort {
                name: self.name.clone(),
                tokens,
                seq_len,
            });
        }

        if matches!(*self.tokens, Tokens::Bytes(_)) && vocab_size > MAX_BYTE_VOCAB {
            let vocab_size = HumanCount(vocab_size as u64);
            return Err(DataError::NoTokenizer {
                name: self.name.clone(),
                vocab_size,
            });
        }

        if self.counts.len() > vocab_size {
            let bound = u32::try_from(vocab_size).unwrap_or(u32::MAX);
            if let Some((token, position)) =
                self.tokens.first_at_least(bound, self.range.clone())?
            {
                let file = self.files.iter().rfind(|(first, _)| *first <= position);
                let (name, position) = match file {
                    Some((first, path)) => (path.display().to_string(), position - first),
                    None => (self.name.clone(), position),
                };
                return Err(DataError::OutsideVocabulary {
                    name,
                    token,
                    position,
                    vocab_size,
                });
            }
        }

        Ok(())
    }

    /// Cross entropy, in nats per token, of a unigram model of the data.
    pub fn unigram_loss(&self) -> f64 {
        let total = self.len_tokens() as f64;
        let seen = self.counts.iter().filter(|c| **c > 0);
        seen.map(|c| *c as f64 / total)
            .map(|p| p * (1.0 / p).ln())
            .sum()
    }

    /// Writes the micro-batch at `at` to `batch`, whose buffers are `[micro_batch, seq_len]`.
    ///
    /// # Errors
    /// Buffers of the wrong size, an invalid position, data shorter than a row, or a failed read.
    pub fn batch(&self, at: BatchAt, batch: &mut Batch) -> Result<(), DataError> {
        let Batch {
            inputs, targets, ..
        } = batch;
        let seq_len = at.seq_len;
        let expected = at.micro_batch.checked_mul(seq_len);
        if seq_len == 0 || Some(inputs.len()) != expected || inputs.len() != targets.len() {
            let (i, t) = (inputs.len(), targets.len());
            let what = format!(
                "{} x {seq_len} tokens do not fit {i} inputs and {t} targets",
                at.micro_batch
            );
            return Err(DataError::BadBatch { what });
        }

        let mut row_tokens = vec![0; seq_len + 1];
        let rows = inputs
            .chunks_exact_mut(seq_len)
            .zip(targets.chunks_exact_mut(seq_len));

        for (row, (inputs, targets)) in rows.enumerate() {
            let start = self
                .order
                .start(&at, row, self.len_tokens())
                .ok_or_else(|| {
                    let (n, name) = (self.len_tokens(), &self.name);
                    DataError::BadBatch {
                        what: format!("{at:?} is not a position in the {n} tokens of {name}"),
                    }
                })?;
            self.tokens
                .read(self.range.start + start, &mut row_tokens)?;
            inputs.copy_from_slice(&row_tokens[..seq_len]);
            targets.copy_from_slice(&row_tokens[1..]);
        }

        Ok(())
    }

    /// Number of consecutive windows of `seq_len` tokens that have a next token.
    pub fn windows(&self, seq_len: usize) -> u64 {
        self.len_tokens()
            .saturating_sub(1)
            .checked_div(seq_len as u64)
            .unwrap_or(0)
    }

    /// Writes window `window`, of [`Self::windows`], to `inputs`, and the tokens that follow them
    /// to `targets`. Both have the length of a window.
    ///
    /// # Errors
    /// There is no such window, or a failed read.
    pub fn window(
        &self,
        window: u64,
        inputs: &mut [u32],
        targets: &mut [u32],
    ) -> Result<(), DataError> {
        let (seq_len, windows) = (inputs.len(), self.windows(inputs.len()));
        if window >= windows || targets.len() != seq_len {
            let what = format!(
                "window {window} of {windows} windows of {seq_len} tokens, {} targets",
                targets.len()
            );
            return Err(DataError::BadBatch { what });
        }
        let start = self.range.start + window * seq_len as u64;
        self.tokens.read(start, inputs)?;
        self.tokens.read(start + 1, targets)
    }
}

fn read_tokens(path: &Path, format: TokenFormat) -> Result<Opened, DataError> {
    let by = format.by;
    let tokens = Tokens::open(path, format)?;
    let len = HumanCount(tokens.len());
    let text = format!("{}: {len} tokens, in order, {by}", path.display());
    let order = Order::InOrder(DataPosition::default());
    Ok(Opened::new(tokens, order, path, text))
}

/// Opens a text file whose bytes are the tokens.
fn read_bytes(path: &Path) -> Result<Opened, DataError> {
    let content = files::read(path, u64::MAX).map_err(|source| DataError::Read {
        path: path.to_owned(),
        source,
    })?;
    let bytes = content.len() as u64;
    let tokens = Tokens::Bytes(content);
    let description = describe_text(path, "text", bytes, &tokens);
    Ok(Opened::new(tokens, Order::Random, path, description))
}

/// Reads the texts of a folder, which may be the default.
fn read_folder(
    path: &Path,
    source: &DataSource,
    tokenizer: Option<&TextTokenizer>,
) -> Result<Opened, DataError> {
    let is_default = source.path.is_none();
    let scope = match source.files {
        _ if is_default => Scope::Default {
            most_files: MAX_DEFAULT_FILES,
        },
        FolderFiles::AsDefault => Scope::Default {
            most_files: usize::MAX,
        },
        FolderFiles::All => Scope::Whole,
    };

    match tokenizer {
        None => {
            let mut documents = allow_none(folder::read(path, scope), is_default)?;
            let notice = check_documents(&mut documents, path, scope)?;
            let bytes = documents.texts.iter().map(|(_, text)| text.len() as u64);
            let bytes = bytes.sum();
            let (what, mut notices) = describe_folder(path, scope, bytes, documents.counted(path))?;
            notices.extend(notice);
            let (tokens, files) = concatenated(documents.texts);
            let description = describe_text(path, &what, bytes, &tokens);
            Ok(Opened {
                files,
                notices,
                ..Opened::new(tokens, Order::Random, path, description)
            })
        }
        Some(tokenizer) => {
            let mut documents = allow_none(folder::scan(path, scope), is_default)?;
            let notice = check_documents(&mut documents, path, scope)?;
            let bytes = documents.texts.iter().map(|(_, text)| text.bytes).sum();
            let (what, notices) = describe_folder(path, scope, bytes, documents.counted(path))?;
            let corpus = Corpus {
                files: documents.texts,
                separate: true,
            };
            let opened = read_corpus(path, &what, corpus, source, tokenizer)?;
            let notices = notices.into_iter().chain(notice).chain(opened.notices);
            Ok(Opened {
                notices: notices.collect(),
                ..opened
            })
        }
    }
}

/// A notice about the texts of a folder, if the user named it.
///
/// # Errors
/// They are not data.
fn check_documents<T>(
    documents: &mut Documents<T>,
    path: &Path,
    scope: Scope,
) -> Result<Option<String>, DataError> {
    let notice = documents.check(path)?;
    Ok(notice.filter(|_| scope == Scope::Whole))
}

/// The texts of a folder, of which the default folder may have none or too many.
fn allow_none<T>(
    documents: Result<Documents<T>, DataError>,
    is_default: bool,
) -> Result<Documents<T>, DataError> {
    match documents {
        Err(DataError::NoText { .. }) if is_default => Ok(Documents::default()),
        Err(DataError::TooManyHere { limit, .. }) => Err(DataError::TooManyHere {
            path: current_folder(),
            limit,
        }),
        other => other,
    }
}

fn current_folder() -> PathBuf {
    std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."))
}

/// The number of files of a folder as text, and notices about the others.
///
/// # Errors
/// The default folder has too little text.
fn describe_folder(
    path: &Path,
    scope: Scope,
    bytes: u64,
    (texts, left_out, notices): (usize, usize, Vec<String>),
) -> Result<(String, Vec<String>), DataError> {
    let is_default = matches!(scope, Scope::Default { most_files } if most_files != usize::MAX);
    if is_default && bytes < MIN_DEFAULT_BYTES {
        return Err(DataError::TooLittleHere {
            path: if path == Path::new(".") {
                current_folder()
            } else {
                path.to_owned()
            },
            bytes,
            needed: MIN_DEFAULT_BYTES,
            left_out: notices.into_iter().next(),
        });
    }

    let mut what = output::counted(texts as u64, "text file");
    if left_out > 0 {
        what = format!("{what} ({} left out)", HumanCount(left_out as u64));
    }
    let is_whole = scope == Scope::Whole;
    Ok((what, if is_whole { notices } else { Vec::new() }))
}

/// The bytes of a folder's texts, and the first of each.
fn concatenated(texts: Vec<(PathBuf, String)>) -> (Tokens, Vec<(u64, PathBuf)>) {
    let (mut bytes, mut files) = (Vec::new(), Vec::with_capacity(texts.len()));
    for (path, text) in texts {
        files.push((bytes.len() as u64, path));
        bytes.extend(text.into_bytes());
    }
    (Tokens::Bytes(bytes), files)
}

/// Opens a text file through a tokenizer.
fn read_text(
    path: &Path,
    source: &DataSource,
    tokenizer: &TextTokenizer,
) -> Result<Opened, DataError> {
    let scanned = TextFile::scan(path)?;
    if scanned.bytes == 0 {
        return Err(DataError::Empty {
            path: path.to_owned(),
        });
    }
    let corpus = Corpus {
        files: vec![(path.to_owned(), scanned)],
        separate: false,
    };
    let opened = read_corpus(path, "text", corpus, source, tokenizer)?;
    Ok(Opened {
        files: Vec::new(),
        ..opened
    })
}

/// Tokenizes texts, or reads their kept tokens.
fn read_corpus(
    path: &Path,
    what: &str,
    corpus: Corpus,
    source: &DataSource,
    tokenizer: &TextTokenizer,
) -> Result<Opened, DataError> {
    let cores = || thread::available_parallelism().map_or(1, NonZero::get);
    let threads = source.threads.unwrap_or_else(cores);
    let cache = source.token_cache.as_deref();
    let Tokenized {
        tokens,
        files,
        notice,
    } = token_cache::tokens(&corpus, tokenizer, threads, cache)?;

    let description = describe_text(path, what, corpus.bytes(), &tokens);
    let paths = corpus.files.into_iter().map(|(path, _)| path);
    Ok(Opened {
        files: files.into_iter().zip(paths).collect(),
        notices: notice.into_iter().collect(),
        ..Opened::new(tokens, Order::Random, path, description)
    })
}

/// One line of text about texts of `bytes` bytes.
fn describe_text(path: &Path, what: &str, bytes: u64, tokens: &Tokens) -> String {
    let by = match tokens {
        Tokens::Bytes(_) => "read as bytes".to_owned(),
        other => format!("{} tokens", HumanCount(other.len())),
    };
    format!(
        "{}: {what}, {} bytes, {by}",
        path.display(),
        HumanCount(bytes)
    )
}

impl ValidationData for Dataset {
    fn fingerprint(&self) -> u64 {
        self.fingerprint()
    }

    fn describe(&self) -> &str {
        self.describe()
    }

    fn windows(&self, seq_len: usize) -> u64 {
        self.windows(seq_len)
    }

    fn window(
        &self,
        index: u64,
        inputs: &mut [u32],
        targets: &mut [u32],
    ) -> Result<(), ModelError> {
        Ok(self.window(index, inputs, targets)?)
    }
}
