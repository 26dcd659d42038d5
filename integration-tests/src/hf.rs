//! Hugging Face GPT-2 folders: `config.json` and weights in safetensors, read and written.
//!
//! Words: a **folder** holds `config.json` and either `model.safetensors` or several such files with
//! `model.safetensors.index.json`; a **tensor** is one parameter in such a file, of type F32, F16 or BF16.
//! Names are this project's (`transformer.wte.weight`), with or without `transformer.` in the file.
//!
//! [`HfFolder::open`] checks all names, shapes and types against the configuration, so that nothing is
//! allocated for a folder that does not fit. [`HfFolder::read`] reads any range of a parameter, so that a
//! rank reads its own shard only; [`FolderWriter`] takes parameters in parts. Both hold one small buffer,
//! whatever the size of the model.
//!
//! ```
//! use integration_tests::hf::{FolderWriter, HfFolder};
//! use integration_tests::model::config::GptConfig;
//! use zero_alloc::device::DType;
//!
//! let dir = tempfile::tempdir().unwrap();
//! let config = GptConfig { vocab_size: 16, n_positions: 8, n_embd: 4, n_layer: 1, n_head: 1, n_inner: 16,
//!     ..GptConfig::preset("nano").unwrap() };
//! let mut writer = FolderWriter::create(dir.path(), &config, DType::F32).unwrap();
//! for param in config.units().iter().flat_map(|u| &u.params) {
//!     writer.write(&param.name, &vec![0.5; param.shape.iter().product::<u64>() as usize]).unwrap();
//! }
//! writer.finish().unwrap();
//!
//! let folder = HfFolder::open(dir.path()).unwrap();
//! let mut part = [0.0; 3];
//! folder.read("transformer.wte.weight", 5..8, &mut part).unwrap();
//! assert_eq!(part, [0.5; 3]);
//! ```
//!
//! What it does not do: fetch from the network, read pickled files (`pytorch_model.bin`), or read
//! architectures other than GPT-2.

mod read;
mod tensor_file;
mod write;

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

pub use read::HfFolder;
pub use write::{FolderWriter, write_folder};

use crate::model::config::ConfigError;

/// Why a folder cannot be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HfError {
    /// The folder is not there, or is not a folder.
    #[error("{}: no model folder here", path.display())]
    NoFolder {
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
    /// A file could not be written (a full disk, for one).
    #[error("{}: cannot write: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// `config.json` is not a GPT-2 that this trainer computes.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: ConfigError,
    },
    /// The folder has no weights in safetensors.
    #[error("{}: neither model.safetensors nor model.safetensors.index.json is there{hint}", path.display())]
    NoWeights {
        /// The folder.
        path: PathBuf,
        /// What to do, where the folder has weights of another kind; else empty.
        hint: &'static str,
    },
    /// A safetensors file is cut short or not one.
    #[error("{}: not a whole safetensors file: {message}", path.display())]
    TensorFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The index of a folder with several files is wrong.
    #[error("{}: not an index of safetensors files: {message}", path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// A tensor of the model is in no file.
    #[error("{}: tensor {name:?} of shape {expected:?} is missing", path.display())]
    MissingTensor {
        /// The file that should have it (or the index).
        path: PathBuf,
        /// Its name.
        name: String,
        /// Its shape by the configuration.
        expected: Vec<u64>,
    },
    /// A tensor has another shape than the configuration says.
    #[error("{}: tensor {name:?} has shape {got:?}; config.json asks for {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// Its name.
        name: String,
        /// Its shape by the configuration.
        expected: Vec<u64>,
        /// Its shape in the file.
        got: Vec<u64>,
    },
    /// A tensor has a type that is not read here.
    #[error("{}: tensor {name:?} has type {got}; F32, F16 and BF16 are read", path.display())]
    TensorType {
        /// The file.
        path: PathBuf,
        /// Its name.
        name: String,
        /// Its type in the file.
        got: String,
    },
    /// The configuration ties the head to the embedding, and the weights have another head.
    #[error(
        "{}: lm_head.weight is not the embedding, to which config.json ties it: \
         say \"tie_word_embeddings\": false there, or take the tensor out", path.display()
    )]
    UntiedHead {
        /// The file with the head.
        path: PathBuf,
    },
    /// A parameter that the model does not have.
    #[error("the model has no parameter {name:?}")]
    UnknownParameter {
        /// The name asked for.
        name: String,
    },
    /// A range outside the parameter, or of another length than the buffer.
    #[error("elements {start}..{end} of {name:?} ({numel} elements) do not fit a buffer of {len}")]
    BadRange {
        /// The parameter.
        name: String,
        /// First element asked for.
        start: u64,
        /// End of the elements asked for.
        end: u64,
        /// Elements that the parameter has.
        numel: u64,
        /// Elements that the buffer has.
        len: usize,
    },
    /// A type that model folders are not written in.
    #[error("weights are written as fp32, fp16 or bf16, not as {got}")]
    WriteType {
        /// The type asked for.
        got: zero_alloc::device::DType,
    },
    /// More values were written than the parameter has elements.
    #[error("{got} values written to {name:?}, which has {numel} elements")]
    TooManyValues {
        /// The parameter.
        name: String,
        /// Elements that it has.
        numel: u64,
        /// Values written with this call.
        got: u64,
    },
    /// The folder was finished while a parameter lacked values.
    #[error("parameter {name:?} has {got} of its {numel} values; the folder is not written")]
    Incomplete {
        /// The parameter.
        name: String,
        /// Elements that it has.
        numel: u64,
        /// Values written.
        got: u64,
    },
}

fn read_error(path: &Path) -> impl FnOnce(io::Error) -> HfError + '_ {
    move |source| HfError::Read { path: path.to_owned(), source }
}

fn write_error(path: &Path) -> impl FnOnce(io::Error) -> HfError + '_ {
    move |source| HfError::Write { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests;
