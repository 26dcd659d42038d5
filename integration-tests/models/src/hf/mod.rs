//! Folders of weights: Hugging Face's, with `config.json` and safetensors files, and
//! checkpoints.
//!
//! A **Hugging Face folder** holds `config.json` and either `model.safetensors` or several such
//! files with `model.safetensors.index.json`. Weights are F32, F16, BF16 or F64, which is rounded
//! to fp32. Parameters have Hugging Face's names; the prefix of the model without its head
//! (`transformer.`, `model.`) is optional in files. A prefix that all tensors carry, as wrappers of
//! a model add it (`module.`, `_orig_mod.`), is left out, with a warning.
//!
//! [`HfFolder::open`] checks all names, shapes and types against the configuration before anything
//! is allocated. [`HfFolder::read`] reads any range of a parameter, so that a rank reads its own
//! shard only. Checkpoints are exported to such folders by `zero_ckpt::Reader::export`. A folder of
//! checkpoints (`zero ckpt import`, or a run's) gives the master weights of its newest whole
//! checkpoint.
//!
//! Not supported: downloads, pickled files (`pytorch_model.bin`).

pub mod adapters;
mod bitsandbytes;
pub mod companions;
mod tensors;
pub mod tokenizer_files;

use std::collections::HashMap;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crc_fast::{CrcAlgorithm, Digest};
use thiserror::Error;
use zero_ckpt::files::{self, SMALL_FILE_BYTES};
use zero_ckpt::{
    CkptError, MANIFEST_NAME, Reader, Resolved, StateDtype, TensorFolder, has_checkpoints, resolve,
};

use adapters::Adapters;
use tensors::StoredNames;
pub use tensors::{DefectKind, TensorDefect};
use tokenizer_files::is_present;

use crate::{ConfigError, ModelConfig};
use companions::COMPANIONS;

/// A folder that cannot be read.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum HfError {
    /// The path is not a folder.
    #[error("{}: the model folder does not exist or is not a folder", path.display())]
    NoFolder { path: PathBuf },
    /// A matrix in 4 bits is damaged.
    #[error("{}: tensor {name:?} of bitsandbytes: {why}; save the model again", path.display())]
    Packed {
        path: PathBuf,
        name: String,
        why: String,
    },
    /// `config.json` could not be read.
    #[error("{}: failed to read the file: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// `config.json` does not describe a supported model.
    #[error("{}: {source}", path.display())]
    Config { path: PathBuf, source: ConfigError },
    /// A small file of the folder is not JSON.
    #[error("{}: not JSON: {message}; correct the file, or remove it", path.display())]
    Json { path: PathBuf, message: String },
    /// `eos_token_id` names no token.
    #[error("{}: eos_token_id is {value}; expected a token or a list of tokens", path.display())]
    EndToken { path: PathBuf, value: String },
    /// The folder has no weights in safetensors files.
    #[error("{}: neither model.safetensors nor model.safetensors.index.json exists{hint}", path.display())]
    NoWeights {
        path: PathBuf,
        /// A remedy if the folder has weights of another kind; otherwise empty.
        hint: &'static str,
    },
    /// A file with weights is invalid or could not be read, or an argument of a read is out of
    /// range.
    #[error(transparent)]
    Weights(#[from] CkptError),
    /// Tensors of the model that are missing, or have another shape or type.
    #[error("{}{hint}", tensors::list(defects))]
    Tensors {
        defects: Vec<TensorDefect>,
        /// The content of the files instead, and the remedy; empty if that is not known.
        hint: String,
    },
    /// The configuration ties the head to the embedding, but the weights have a different head.
    #[error(
        "{}: lm_head.weight differs from the embedding, to which config.json ties it: \
         set \"tie_word_embeddings\": false there, or remove the tensor", path.display()
    )]
    UntiedHead {
        /// The file with the head.
        path: PathBuf,
    },
    /// A weight is not a finite number, so that no loss would be.
    #[error(
        "{}: tensor {name:?} has {value} at element {at}: these weights cannot be trained; use another copy or an earlier \
         checkpoint", path.display()
    )]
    NotFinite {
        /// The file, or the checkpoint.
        path: PathBuf,
        name: String,
        /// The position in the tensor.
        at: u64,
        value: f32,
    },
    /// A checkpoint with nothing but adapters is opened as a model.
    #[error(
        "{}: the checkpoint has adapters only (--lora): export it by `zero ckpt export`, then pass the folder of its \
         base as --model and the exported folder as --lora; or export it with --merge", path.display()
    )]
    OnlyAdapters { path: PathBuf },
    /// The model has no such parameter.
    #[error("the model has no parameter {name:?}")]
    UnknownParameter { name: String },
}

/// An open model folder, of which all tensors exist with the shapes of its configuration.
pub struct HfFolder {
    path: PathBuf,
    config: ModelConfig,
    warnings: Vec<String>,
    source: TensorSource,
    /// Those that are merged into what is read.
    adapters: Option<Adapters>,
}

enum TensorSource {
    /// Hugging Face's files, and the names of the parameters there.
    Files {
        weights: TensorFolder,
        stored: StoredNames,
    },
    /// A checkpoint, and the folder with the files of its model.
    Checkpoint {
        reader: Box<Reader>,
        kept: Option<PathBuf>,
    },
}

/// The configuration of a model.
const CONFIG_FILE: &str = "config.json";

/// The state of a checkpoint that holds the weights.
const MASTER: &str = "master";

impl HfFolder {
    /// Opens a Hugging Face folder, a folder of checkpoints or one checkpoint, and checks its
    /// configuration and all tensors of the model.
    ///
    /// # Errors
    /// The first missing or invalid file or tensor.
    pub fn open(path: &Path) -> Result<Self, HfError> {
        if is_of_checkpoints(path)? {
            return Self::open_checkpoint(path);
        }
        check_companions(path)?;
        let (config, mut warnings) = read_config(path)?;

        if !is_present(&path.join("model.safetensors"))?
            && !is_present(&path.join("model.safetensors.index.json"))?
        {
            let hint = match path.join("pytorch_model.bin").is_file() {
                true => {
                    "; pytorch_model.bin is not supported: save the model with safe_serialization=True"
                }
                false => "",
            };
            return Err(HfError::NoWeights {
                path: path.to_owned(),
                hint,
            });
        }

        let weights = TensorFolder::open(path)?;
        let stored = StoredNames::find(&weights, &config)?;
        warnings.extend(stored.notice(&weights));
        warnings.extend(stored.unused(&weights, &config));
        if config.tied_head()
            && let Some(path) = stored.untied_head(&weights, config.embedding_name())?
        {
            return Err(HfError::UntiedHead { path });
        }

        Ok(Self {
            path: path.to_owned(),
            config,
            warnings,
            source: TensorSource::Files { weights, stored },
            adapters: None,
        })
    }

    /// The configuration of a folder that [`Self::open`] opens, and warnings about it. No weights
    /// need to be there, so a model can be planned before it is downloaded.
    ///
    /// # Errors
    /// There is no `config.json` and no checkpoint, or it does not describe a supported model.
    pub fn config_in(path: &Path) -> Result<(ModelConfig, Vec<String>), HfError> {
        if !is_of_checkpoints(path)? {
            return read_config(path);
        }
        config_of(&Reader::open(path)?)
    }

    /// Opens the checkpoint of the lowest validation loss in a folder of checkpoints.
    ///
    /// # Errors
    /// As [`Self::open`], or no checkpoint is named so.
    pub fn open_best(path: &Path) -> Result<Self, HfError> {
        Self::of_checkpoint(path, Reader::open_best(path)?, Vec::new())
    }

    fn open_checkpoint(path: &Path) -> Result<Self, HfError> {
        let Resolved {
            reader,
            passed_over,
            ..
        } = resolve(path)?;
        Self::of_checkpoint(path, reader, passed_over)
    }

    fn of_checkpoint(
        path: &Path,
        reader: Reader,
        passed_over: Vec<(String, String)>,
    ) -> Result<Self, HfError> {
        let file = reader.path().join(MANIFEST_NAME);
        let (config, mut warnings) = config_of(&reader)?;
        if config.lora().is_some() {
            return Err(HfError::OnlyAdapters {
                path: reader.path().to_owned(),
            });
        }
        let (kept, missing) = kept_files(&reader)?;
        warnings.extend(missing);

        warnings.extend(
            passed_over
                .into_iter()
                .map(|(name, why)| format!("{name} is damaged and passed over: {why}")),
        );
        let shapes: HashMap<_, _> = reader
            .params()
            .map(|p| (p.name.as_str(), &p.shape))
            .collect();
        let params = config.units().into_iter().flat_map(|unit| unit.params);
        let defects = params.filter_map(|param| {
            let kind = match shapes.get(param.name.as_str()) {
                Some(shape) if **shape == param.shape => return None,
                Some(shape) => DefectKind::Shape((*shape).clone()),
                None => DefectKind::Missing,
            };
            Some(TensorDefect {
                path: file.clone(),
                name: param.name,
                expected: param.shape,
                kind,
            })
        });
        let defects: Vec<_> = defects.collect();
        if !defects.is_empty() {
            return Err(HfError::Tensors {
                defects,
                hint: String::new(),
            });
        }

        Ok(Self {
            path: path.to_owned(),
            config,
            warnings,
            source: TensorSource::Checkpoint {
                reader: Box::new(reader),
                kept,
            },
            adapters: None,
        })
    }

    /// The same model with `adapters` merged into its weights, wherever they are read.
    #[must_use]
    pub fn with_merged(self, adapters: Adapters) -> Self {
        Self {
            adapters: Some(adapters),
            ..self
        }
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Unused tensors and configuration keys, a line each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The checkpoint, if the weights are those of one.
    pub fn checkpoint(&self) -> Option<&Reader> {
        match &self.source {
            TensorSource::Files { .. } => None,
            TensorSource::Checkpoint { reader, .. } => Some(reader),
        }
    }

    /// The folder with the tokenizer, the chat template and the settings of generation; `None` for
    /// a checkpoint without them.
    pub fn companions(&self) -> Option<&Path> {
        match &self.source {
            TensorSource::Files { .. } => Some(&self.path),
            TensorSource::Checkpoint { kept, .. } => kept.as_deref(),
        }
    }

    /// Whether all weights are stored in bf16, so that holding them in it rounds nothing.
    pub fn is_bf16(&self) -> bool {
        match &self.source {
            TensorSource::Files { weights, stored } => stored
                .tensors()
                .filter_map(|name| weights.tensor(name))
                .all(|(tensor, _)| tensor.dtype == StateDtype::BF16.name()),
            TensorSource::Checkpoint { .. } => false,
        }
    }

    /// The tokens that end a text; empty if the folder names none.
    ///
    /// # Errors
    /// A file that would name them cannot be used.
    pub fn end_tokens(&self) -> Result<Vec<u32>, HfError> {
        if let Some(dir) = self.companions() {
            let ends = companions::end_tokens_in(dir)?;
            if !ends.is_empty() {
                return Ok(ends);
            }
        }
        let configured = self
            .checkpoint()
            .map(|reader| &reader.manifest().model_config);
        Ok(configured
            .and_then(companions::end_tokens_of)
            .unwrap_or_default())
    }

    /// The unit and the name of the parameter that a tensor of the files is, if the model has it.
    pub fn unit_and_param(&self, tensor: &str) -> Option<(String, String)> {
        let tensor = match &self.source {
            TensorSource::Files { stored, .. } => stored.without_wrapper(tensor)?,
            TensorSource::Checkpoint { .. } => tensor,
        };
        let prefixed = format!("{}{tensor}", self.config.prefix());
        let mut units = self.config.units().into_iter();
        units.find_map(|unit| {
            let is_it = |name: &str| name == tensor || name == prefixed;
            let param = unit.params.iter().find(|param| is_it(&param.name))?;
            Some((unit.name.clone(), param.name.clone()))
        })
    }

    /// The folder's tokenizer, if it has one.
    ///
    /// # Errors
    /// The folder cannot be searched.
    pub fn tokenizer(&self) -> Result<Option<PathBuf>, HfError> {
        match &self.source {
            TensorSource::Files { .. } => tokenizer_files::tokenizer_in(&self.path),
            TensorSource::Checkpoint {
                kept: Some(kept), ..
            } => tokenizer_files::tokenizer_of_kept(kept),
            // Older versions imported the tokenizer into the checkpoint.
            TensorSource::Checkpoint { reader, .. } => tokenizer_files::tokenizer_in(reader.path()),
        }
    }

    /// Reads elements `range` of parameter `name` to `out`.
    ///
    /// # Errors
    /// No such parameter, a range outside it, another length of `out`, a failed read, or a value
    /// that is not finite.
    pub fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<(), HfError> {
        let start = range.start;
        let merged = range.clone();
        match &self.source {
            TensorSource::Files { weights, stored } => {
                let read = stored.read(weights, name, range, out);
                read.ok_or_else(|| HfError::UnknownParameter {
                    name: name.to_owned(),
                })??;
            }
            TensorSource::Checkpoint { reader, .. } => {
                reader.read_param(MASTER, name, range, out)?
            }
        }
        if let Some(adapters) = &self.adapters {
            adapters.merge(name, merged, out)?;
        }
        match out.iter().position(|value| !value.is_finite()) {
            None => Ok(()),
            Some(at) => Err(HfError::NotFinite {
                path: self.file_of(name),
                name: name.to_owned(),
                at: start + at as u64,
                value: out[at],
            }),
        }
    }

    /// The file of a parameter, or the checkpoint.
    fn file_of(&self, name: &str) -> PathBuf {
        match &self.source {
            TensorSource::Files { weights, stored } => stored
                .get(name)
                .and_then(|stored| weights.tensor(stored))
                .map_or(&*self.path, |(_, file)| file)
                .to_owned(),
            TensorSource::Checkpoint { reader, .. } => reader.path().to_owned(),
        }
    }
}

/// The folder with the files of a checkpoint's model, and a warning if it should be there and is
/// not.
///
/// # Errors
/// The files are damaged or cannot be read.
pub fn kept_files(reader: &Reader) -> Result<(Option<PathBuf>, Option<String>), HfError> {
    match reader.model_files() {
        Ok(None) => Ok((None, None)),
        Ok(Some(files)) => Ok((Some(files.folder_in(&reader.store_dir()?)), None)),
        Err(missing @ CkptError::NoModelFiles { .. }) => Ok((None, Some(missing.to_string()))),
        Err(error) => Err(error.into()),
    }
}

/// Whether a folder is a checkpoint or holds some, and no model of Hugging Face's layout.
fn is_of_checkpoints(path: &Path) -> Result<bool, HfError> {
    if !path.is_dir() {
        return Err(HfError::NoFolder {
            path: path.to_owned(),
        });
    }
    let has_some = path.join(MANIFEST_NAME).is_file() || has_checkpoints(path)?;
    Ok(has_some && !is_present(&path.join(CONFIG_FILE))?)
}

/// Reads the `config.json` of a folder.
fn read_config(dir: &Path) -> Result<(ModelConfig, Vec<String>), HfError> {
    let path = dir.join(CONFIG_FILE);
    let text = files::read_text(&path, SMALL_FILE_BYTES).map_err(|source| HfError::Read {
        path: path.clone(),
        source,
    })?;
    let config = ModelConfig::from_hf_json(text.trim_start_matches('\u{feff}'));
    config.map_err(|source| HfError::Config { path, source })
}

/// The configuration of a checkpoint.
fn config_of(reader: &Reader) -> Result<(ModelConfig, Vec<String>), HfError> {
    let text = reader.manifest().model_config.to_string();
    ModelConfig::from_hf_json(&text).map_err(|source| HfError::Config {
        path: reader.path().join(MANIFEST_NAME),
        source,
    })
}

/// Checks that the files beside the weights that are there can be opened, also those that no one
/// needs now: a run without them would be another run.
fn check_companions(dir: &Path) -> Result<(), HfError> {
    for name in COMPANIONS {
        let path = dir.join(name);
        if is_present(&path)? {
            files::open_content(&path).map_err(|source| HfError::Read { path, source })?;
        }
    }
    Ok(())
}

/// Elements of a part of the weights that one rank hashes.
const HASHED_ELEMS: u64 = 1 << 20;

impl HfFolder {
    /// Equal for folders of the same files on the same machine, and for the same checkpoint
    /// anywhere. Folders with other identities may have equal weights too.
    pub fn identity(&self) -> u64 {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        match &self.source {
            TensorSource::Checkpoint { reader, .. } => {
                digest.update(&reader.selection().crc64.to_le_bytes())
            }
            TensorSource::Files { weights, .. } => {
                digest.update(&machine());
                for metadata in weights.files().filter_map(|file| fs::metadata(file).ok()) {
                    let numbers = [metadata.dev(), metadata.ino(), metadata.len()];
                    digest.update(bytemuck::cast_slice(&numbers));
                    digest.update(bytemuck::cast_slice(&[
                        metadata.mtime(),
                        metadata.mtime_nsec(),
                    ]));
                }
            }
        }
        digest.finalize()
    }

    /// The checksum of part `part` of `parts` of the weights, as fp32 in the order of the model.
    /// Their wrapping sum is that of all weights, in any division.
    ///
    /// # Errors
    /// A failed read.
    pub fn checksum(&self, part: usize, parts: usize) -> Result<u64, HfError> {
        let mut values = Vec::new();
        let mut checksum: u64 = 0;
        for (index, (name, range)) in self.chunks().enumerate() {
            if index % parts != part {
                continue;
            }
            values.resize((range.end - range.start) as usize, 0.0_f32);
            self.read(&name, range, &mut values)?;
            let crc64 = crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytemuck::cast_slice(&values));
            checksum = checksum.wrapping_add(placed(index as u64, crc64));
        }
        Ok(checksum)
    }

    /// Ranges of the parameters that cover all of them, in order.
    fn chunks(&self) -> impl Iterator<Item = (String, Range<u64>)> {
        self.config
            .units()
            .into_iter()
            .flat_map(|unit| unit.params)
            .flat_map(|param| {
                let elems: u64 = param.shape.iter().product();
                let starts = (0..elems).step_by(HASHED_ELEMS as usize);
                starts
                    .map(move |start| (param.name.clone(), start..elems.min(start + HASHED_ELEMS)))
            })
    }
}

/// Bytes that differ between machines, and on a machine between boots.
fn machine() -> Vec<u8> {
    let random = || {
        RandomState::new()
            .hash_one(std::process::id())
            .to_le_bytes()
            .to_vec()
    };
    // Without it, no other process is known to be on this machine.
    fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_else(|_| random())
}

/// Mixes the checksum of a chunk with its place (the finalizer of SplitMix64). A CRC is linear:
/// without it, two chunks that change places, or the same bits of two chunks that change, would
/// leave the sum as it is.
fn placed(index: u64, crc64: u64) -> u64 {
    let mut mixed = crc64.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
pub(crate) mod tests;
