//! What can be wrong with training data.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why data cannot be trained on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// Nothing at the path.
    #[error("{}: no such file or folder", path.display())]
    Missing {
        /// The path given.
        path: PathBuf,
    },
    /// A pipe or a device, which has no length and is read once.
    #[error("{}: neither a file nor a folder; write what it gives into a file", path.display())]
    NoFile {
        /// The path given.
        path: PathBuf,
    },
    /// A file could not be read.
    #[error("{}: cannot read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file without content.
    #[error("{}: the data file is empty", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A token file that does not hold whole tokens.
    #[error("{}: {bytes} bytes are not a whole number of 2-byte tokens", path.display())]
    OddLength {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
    },
    /// A folder without text files.
    #[error("{}: no text file in this folder (hidden, git-ignored, binary and large files are passed over)", path.display())]
    NoText {
        /// The folder.
        path: PathBuf,
    },
    /// The current folder, taken because no data was named, has too little text to learn from.
    #[error(
        "no --data was given and the current folder {} has only {bytes} bytes of text \
         ({needed} needed): pass --data with a text file, a folder or tokens.bin", path.display()
    )]
    TooLittleHere {
        /// The current folder.
        path: PathBuf,
        /// Bytes of text in it.
        bytes: u64,
        /// Bytes that are taken for enough.
        needed: u64,
    },
    /// Text for a tokenizer that is not UTF-8.
    #[error("{}: not UTF-8 text at byte {at}; a tokenizer needs UTF-8", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The first byte that is wrong.
        at: usize,
    },
    /// `tokenizer.json` is not one, or failed on the text.
    #[error("{}: {message}", path.display())]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// Fewer tokens than one row needs.
    #[error("{name}: {tokens} tokens are too few for sequences of {seq_len}: {} are needed", seq_len + 1)]
    TooShort {
        /// The data.
        name: String,
        /// Tokens that it has.
        tokens: u64,
        /// Tokens of a row.
        seq_len: usize,
    },
    /// A token that the model has no embedding for.
    #[error("{name}: token {token} at position {position} is outside the model's vocabulary of {vocab_size}")]
    OutsideVocabulary {
        /// The data.
        name: String,
        /// The token.
        token: u32,
        /// Tokens before it.
        position: u64,
        /// Tokens that the model knows.
        vocab_size: usize,
    },
    /// A batch was asked for that is no place in training, or in buffers of another size.
    #[error("no batch {what}")]
    BadBatch {
        /// What is wrong.
        what: String,
    },
}
