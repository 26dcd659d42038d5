//! The files of a tokenizer in the folder of a model.

use std::path::{Path, PathBuf};

/// Hugging Face's tokenizer in one file.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// Vocabulary and merges of GPT-2, as Hugging Face and as OpenAI name them.
pub const GPT2_FILES: [[&str; 2]; 2] =
    [["vocab.json", "merges.txt"], ["encoder.json", "vocab.bpe"]];
/// The tokenizer in the folder of a model: its `tokenizer.json`, or else the folder if it has GPT-2's two files.
pub fn tokenizer_in(dir: &Path) -> Option<PathBuf> {
    let file = dir.join(TOKENIZER_FILE);
    if file.is_file() {
        Some(file)
    } else {
        gpt2_files(dir).map(|_| dir.to_owned())
    }
}

/// GPT-2's vocabulary and merges in a folder.
pub fn gpt2_files(dir: &Path) -> Option<(PathBuf, PathBuf)> {
    let pairs = GPT2_FILES.map(|[vocab, merges]| (dir.join(vocab), dir.join(merges)));
    pairs
        .into_iter()
        .find(|(vocab, merges)| vocab.is_file() && merges.is_file())
}
