//! Errors of training data.

use std::io;
use std::path::PathBuf;

use indicatif::HumanCount;
use thiserror::Error;
use zero_models::hf::HfError;

use super::examples::FORMS;

/// Data that cannot be trained on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// The path does not exist.
    #[error("{}: no such file or folder", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// A pipe or a device, which has no length.
    #[error("{}: neither a file nor a folder; copy its content to a file", path.display())]
    NoFile {
        /// The path.
        path: PathBuf,
    },
    /// A file could not be read.
    #[error("{}: failed to read the file: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A small file of a model's folder cannot be used.
    #[error(transparent)]
    Folder(HfError),
    /// An empty file.
    #[error("{}: the data file is empty", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A token file that ends within a token.
    #[error("{}: {} bytes are not a whole number of {width}-byte tokens", path.display(), HumanCount(*bytes))]
    OddLength {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// Bytes of a token.
        width: u64,
    },
    /// A text changed between the scan of its content and its tokenization.
    #[error("{}: the file changed while it was read: start again when nothing writes to it", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// A file or folder of a data folder could not be read: on one machine of several the data
    /// would differ.
    #[error(
        "{}: failed to read: {source}; a run reads all of a data folder: make this readable, move it out of the folder, or \
         pass other --data",
        path.display()
    )]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A symbolic link of a data folder to a file that does not exist.
    #[error(
        "{}: a symbolic link to a file that does not exist here: restore the file, or remove the link", path.display()
    )]
    DanglingLink {
        /// The link.
        path: PathBuf,
    },
    /// A folder without text files.
    #[error(
        "{}: no text file in this folder{}", path.display(), left_out.iter().map(|s| format!("; {s}")).collect::<String>()
    )]
    NoText {
        /// The folder.
        path: PathBuf,
        /// The largest file that is not text, and why.
        left_out: Option<String>,
    },
    /// The user named no data, and the current folder has too little text.
    #[error(
        "the current folder {} has only {} bytes of text ({} needed){}: pass --data with a text file, a folder or tokens.bin",
        path.display(), HumanCount(*bytes), HumanCount(*needed), left_out.as_ref().map(|line| format!("; {line}")).unwrap_or_default()
    )]
    TooLittleHere {
        /// The current folder.
        path: PathBuf,
        /// Bytes of text in it.
        bytes: u64,
        /// Required bytes.
        needed: u64,
        /// The largest file that is left out.
        left_out: Option<String>,
    },
    /// The user named no data, and the current folder has too many files.
    #[error(
        "the current folder {} has more than {} files: pass --data with a text file, a folder or tokens.bin",
        path.display(), HumanCount(*limit as u64)
    )]
    TooManyHere {
        /// The current folder.
        path: PathBuf,
        /// The most files.
        limit: usize,
    },
    /// Text for a tokenizer that is not UTF-8.
    #[error("{}: not UTF-8 text at byte {at}; a tokenizer needs UTF-8", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The first invalid byte.
        at: usize,
    },
    /// The tokenizer's file is invalid, or it failed on a text.
    #[error("{}: {message}", path.display())]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// The tokenizer's error.
        message: String,
    },
    /// A file that is no data to train on, such as an archive.
    #[error("{}: {what}, which is not read as data; {remedy}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Its kind, with an article.
        what: String,
        /// The remedy.
        remedy: String,
    },
    /// A file of tokens that is not what its header or its name says.
    #[error("{}: {message}", path.display())]
    Tokens {
        /// The file.
        path: PathBuf,
        /// The defect, and what to do.
        message: String,
    },
    /// A folder with files of examples and other files, either of which may be meant.
    #[error(
        "{}: the folder has files of examples ({rows}) and other data ({other}): pass the file {rows}, or a folder of \
         examples alone, or one of texts alone",
        path.display()
    )]
    MixedFolder {
        /// The folder.
        path: PathBuf,
        /// The first file of examples.
        rows: String,
        /// The first other file.
        other: String,
    },
    /// Files of examples in the folders of a folder, beside which there is nothing else.
    #[error(
        "{}: the only data here are files of examples ({}): pass one of them, or a folder of them alone, with --data",
        path.display(), rows.display()
    )]
    NestedRows {
        /// The folder.
        path: PathBuf,
        /// The first file of rows.
        rows: PathBuf,
    },
    /// A folder whose only texts describe data that is not read.
    #[error(
        "{}: no data but {only} is text in this folder; {left_out}; pass the file or the folder of the data, or {only} itself",
        path.display()
    )]
    OnlyDescription {
        /// The folder.
        path: PathBuf,
        /// The text.
        only: String,
        /// The largest file that is not text, and why.
        left_out: String,
    },
    /// Examples where a stream of tokens is expected.
    #[error("{}: examples, and must be text or tokens", path.display())]
    Examples {
        /// The data.
        path: PathBuf,
    },
    /// A parquet file, which this build does not read.
    #[error(
        "{}: this program was built without parquet: build it with `--features zero/parquet`, or write the data as lines of JSON",
        path.display()
    )]
    NoParquet {
        /// The file.
        path: PathBuf,
    },
    /// A parquet file that cannot be used.
    #[error("{}: {message}", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The defect, as a sentence.
        message: String,
    },
    /// A tokenizer that is not that of the model's weights.
    #[error(
        "{}: {token}, but {own}: the model's weights were not trained with this tokenizer; {remedy}",
        path.display()
    )]
    OtherTokenizer {
        /// The tokenizer's file or folder.
        path: PathBuf,
        /// A token and its text in it.
        token: String,
        /// The same of the model's folder.
        own: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// Fewer tokens than one row requires.
    #[error("{name}: {tokens} tokens are too few for --seq-len {seq_len}: {} are needed", seq_len + 1)]
    TooShort {
        /// The data.
        name: String,
        /// Its tokens.
        tokens: u64,
        /// Tokens of a row.
        seq_len: usize,
    },
    /// Text without a tokenizer for a model whose tokens are not bytes.
    #[error(
        "{name}: text without a tokenizer is read as bytes, but the model's vocabulary has {vocab_size} tokens: pass \
         --tokenizer FILE with its tokenizer.json, or a folder with GPT-2's vocab.json and merges.txt"
    )]
    NoTokenizer {
        /// The data.
        name: String,
        /// Tokens of the model's vocabulary.
        vocab_size: HumanCount,
    },
    /// A token without an embedding in the model.
    #[error(
        "{name}: token {token} at position {position} is outside the model's vocabulary of {vocab_size}: the model and \
         the tokens must be of the same tokenizer: pass the model's with --tokenizer, or tokens made by it"
    )]
    OutsideVocabulary {
        /// The data.
        name: String,
        /// The token.
        token: u32,
        /// Its position in the file.
        position: u64,
        /// Tokens of the model's vocabulary.
        vocab_size: usize,
    },
    /// A line of examples that cannot be used.
    #[error("{}, line {line}: {message}", path.display())]
    Example {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u32,
        /// The defect, and what to do.
        message: String,
    },
    /// A chat template that is not valid.
    #[error("{}: the chat template is not valid: {message}", path.display())]
    Template {
        /// The file.
        path: PathBuf,
        /// The defect.
        message: String,
    },
    /// `--pack` without examples.
    #[error(
        "{}: --pack needs examples, one a line of a .jsonl file with {FORMS}; leave out --pack for other data",
        path.display()
    )]
    NothingToPack {
        /// The data.
        path: PathBuf,
    },
    /// No example has a token that is trained.
    #[error(
        "{name}: {examples} examples, and none has a trained token within --seq-len {seq_len}: pass a larger --seq-len, \
         or data with completions"
    )]
    NothingTrained {
        /// The data.
        name: String,
        /// Its examples.
        examples: HumanCount,
        /// Tokens of a row.
        seq_len: usize,
    },
    /// The requested batch is not a position in training, or the buffers have the wrong size.
    #[error("invalid batch: {what}")]
    BadBatch {
        /// The defect.
        what: String,
    },
}
