//! The files of a tokenizer in the folder of a model.

use std::path::{Path, PathBuf};

use zero_ckpt::files;

use super::HfError;

/// Hugging Face's tokenizer in one file.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// Vocabulary and merges of GPT-2, as Hugging Face and as OpenAI name them.
pub const GPT2_FILES: [[&str; 2]; 2] =
    [["vocab.json", "merges.txt"], ["encoder.json", "vocab.bpe"]];

/// The folder, in that of the files that are kept beside checkpoints, of a tokenizer that is not
/// the model's own.
pub const OTHER_TOKENIZER: &str = "tokenizer";

/// The tokenizer in a folder of files that are kept beside checkpoints.
///
/// # Errors
/// The folder cannot be searched.
pub fn tokenizer_of_kept(dir: &Path) -> Result<Option<PathBuf>, HfError> {
    match tokenizer_in(&dir.join(OTHER_TOKENIZER))? {
        None => tokenizer_in(dir),
        found => Ok(found),
    }
}

/// The tokenizer in the folder of a model: its `tokenizer.json`, or else the folder if it has
/// GPT-2's two files. They may be unreadable, which is found when they are read.
///
/// # Errors
/// The folder cannot be searched.
pub fn tokenizer_in(dir: &Path) -> Result<Option<PathBuf>, HfError> {
    let file = dir.join(TOKENIZER_FILE);
    if is_present(&file)? {
        return Ok(Some(file));
    }
    Ok(gpt2_files(dir)?.map(|_| dir.to_owned()))
}

/// GPT-2's vocabulary and merges in a folder.
///
/// # Errors
/// The folder cannot be searched.
pub fn gpt2_files(dir: &Path) -> Result<Option<(PathBuf, PathBuf)>, HfError> {
    for [vocab, merges] in GPT2_FILES {
        let vocab = dir.join(vocab);
        let merges = dir.join(merges);
        if is_present(&vocab)? && is_present(&merges)? {
            return Ok(Some((vocab, merges)));
        }
    }
    Ok(None)
}

/// Whether a folder has an entry of that name: also one that cannot be read, such as a link without
/// a target.
///
/// # Errors
/// The folder cannot be searched.
pub fn is_present(path: &Path) -> Result<bool, HfError> {
    files::is_present(path).map_err(|source| HfError::Read {
        path: path.to_owned(),
        source,
    })
}
