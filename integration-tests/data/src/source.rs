//! The source of training data, as a run names it.

use std::path::PathBuf;

/// The source of training data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DataSource {
    /// A file or folder; `None` for the text of the current folder.
    pub path: Option<PathBuf>,
    /// A tokenizer for text: a Hugging Face `tokenizer.json`, GPT-2's `vocab.json` or `merges.txt`,
    /// or a folder with either; `None` for one token per byte. Not used for token files.
    pub tokenizer: Option<PathBuf>,
    /// The files of the folder `path` that are data.
    pub files: FolderFiles,
    /// The folder where the tokens of long texts are kept for later runs; `None` for nowhere.
    pub token_cache: Option<PathBuf>,
    /// Threads that tokenize; `None` for one for each core. The tokens do not depend on it.
    pub threads: Option<usize>,
}

/// The files of a folder that are data; of the current folder as the default, always
/// [`FolderFiles::AsDefault`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FolderFiles {
    /// All text files.
    #[default]
    All,
    /// Those of the default folder: not hidden, git-ignored, in a build folder or above 1 MiB.
    AsDefault,
}

impl DataSource {
    /// A file or folder, text as bytes.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self {
            path: Some(path.into()),
            ..Self::default()
        }
    }

    /// Sets the tokenizer for text.
    pub fn with_tokenizer(self, tokenizer: impl Into<PathBuf>) -> Self {
        Self {
            tokenizer: Some(tokenizer.into()),
            ..self
        }
    }
}
