//! Folders of GPT-2 weights: Hugging Face's, with `config.json` and safetensors files, and
//! checkpoints.
//!
//! A **Hugging Face folder** holds `config.json` and either `model.safetensors` or several such
//! files with `model.safetensors.index.json`. Weights are F32, F16 or BF16. Parameters have this
//! project's names (`transformer.wte.weight`); the prefix `transformer.` is optional in files.
//!
//! [`HfFolder::open`] checks all names, shapes and types against the configuration before anything
//! is allocated. [`HfFolder::read`] reads any range of a parameter, so that a rank reads its own
//! shard only. Checkpoints are exported to such folders by `zero_ckpt::Reader::export`. A folder of
//! checkpoints (`zero ckpt import`, or a run's) gives the master weights of its newest whole
//! checkpoint.
//!
//! Not supported: downloads, pickled files (`pytorch_model.bin`), architectures other than GPT-2.

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
use zero_ckpt::{
    CkptError, MANIFEST_NAME, Reader, Resolved, StateDtype, TensorFolder, has_checkpoints, resolve,
};

use crate::{ConfigError, ModelConfig};

/// A folder that cannot be read.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum HfError {
    /// The path is not a folder.
    #[error("{}: the model folder does not exist or is not a folder", path.display())]
    NoFolder { path: PathBuf },
    /// `config.json` could not be read.
    #[error("{}: failed to read the file: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// `config.json` does not describe a supported GPT-2.
    #[error("{}: {source}", path.display())]
    Config { path: PathBuf, source: ConfigError },
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
    /// A tensor of the model is in no file.
    #[error("{}: tensor {name:?} of shape {expected:?} is missing", path.display())]
    MissingTensor {
        /// The only file, or the index.
        path: PathBuf,
        name: String,
        /// Its shape by the configuration.
        expected: Vec<u64>,
    },
    /// A tensor's shape differs from the configuration.
    #[error("{}: tensor {name:?} has shape {got:?}; config.json requires {expected:?}", path.display())]
    Shape {
        path: PathBuf,
        name: String,
        /// Its shape by the configuration.
        expected: Vec<u64>,
        /// Its shape in the file.
        got: Vec<u64>,
    },
    /// A tensor has an unsupported type.
    #[error("{}: tensor {name:?} has type {got}; supported are F32, F16 and BF16", path.display())]
    TensorType {
        path: PathBuf,
        name: String,
        got: String,
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
    /// The model has no such parameter.
    #[error("the model has no parameter {name:?}")]
    UnknownParameter { name: String },
}

/// An open model folder, of which all tensors exist with the shapes of its configuration.
pub struct HfFolder {
    path: PathBuf,
    config: ModelConfig,
    warnings: Vec<String>,
    source: Source,
}

enum Source {
    /// Hugging Face's files, and the tensor name there of each parameter.
    Files {
        weights: TensorFolder,
        stored: HashMap<String, String>,
    },
    Checkpoint(Box<Reader>),
}

/// The state of a checkpoint that holds the weights.
const MASTER: &str = "master";

/// The matrix of an untied head.
const HEAD: &str = "lm_head.weight";

impl HfFolder {
    /// Opens a Hugging Face folder, a folder of checkpoints or one checkpoint, and checks its
    /// configuration and all tensors of the model.
    ///
    /// # Errors
    /// The first missing or invalid file or tensor.
    pub fn open(path: &Path) -> Result<Self, HfError> {
        if !path.is_dir() {
            return Err(HfError::NoFolder {
                path: path.to_owned(),
            });
        }

        let config_path = path.join("config.json");
        let is_checkpoint = path.join(MANIFEST_NAME).is_file() || has_checkpoints(path)?;
        if is_checkpoint && !config_path.exists() {
            return Self::open_checkpoint(path);
        }
        let text = fs::read_to_string(&config_path).map_err(|source| HfError::Read {
            path: config_path.clone(),
            source,
        })?;

        let (config, mut warnings) =
            ModelConfig::from_hf_json(&text).map_err(|source| HfError::Config {
                path: config_path,
                source,
            })?;

        if !path.join("model.safetensors").is_file()
            && !path.join("model.safetensors.index.json").is_file()
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
        let mut stored = HashMap::new();
        for param in config.units().into_iter().flat_map(|u| u.params) {
            let name = param.name;
            let expected = param.shape;
            let Some((tensor, file)) = find(&weights, config.prefix(), &name) else {
                return Err(HfError::MissingTensor {
                    path: weights.path().to_owned(),
                    name,
                    expected,
                });
            };
            if tensor.shape != expected {
                return Err(HfError::Shape {
                    path: file.to_owned(),
                    name,
                    expected,
                    got: tensor.shape.clone(),
                });
            }
            if StateDtype::from_name(&tensor.dtype).is_none() {
                return Err(HfError::TensorType {
                    path: file.to_owned(),
                    name,
                    got: tensor.dtype.clone(),
                });
            }
            stored.insert(name, tensor.name.clone());
        }

        warnings.extend(unused(&weights, &config, &stored));
        if config.tied_head()
            && let Some(path) = untied_head(&weights, &stored[config.embedding_name()])?
        {
            return Err(HfError::UntiedHead { path });
        }

        Ok(Self {
            path: path.to_owned(),
            config,
            warnings,
            source: Source::Files { weights, stored },
        })
    }

    fn open_checkpoint(path: &Path) -> Result<Self, HfError> {
        let Resolved {
            reader,
            passed_over,
            ..
        } = resolve(path)?;

        let file = reader.path().join(MANIFEST_NAME);
        let text = reader.manifest().model_config.to_string();
        let (config, mut warnings) =
            ModelConfig::from_hf_json(&text).map_err(|source| HfError::Config {
                path: file.clone(),
                source,
            })?;

        warnings.extend(
            passed_over
                .into_iter()
                .map(|(name, why)| format!("{name} is damaged and passed over: {why}")),
        );
        let mut shapes: HashMap<_, _> = reader
            .params()
            .map(|p| (p.name.as_str(), &p.shape))
            .collect();

        for param in config.units().into_iter().flat_map(|u| u.params) {
            let name = param.name;
            let expected = param.shape;
            match shapes.remove(name.as_str()) {
                Some(shape) if *shape == expected => {}
                Some(shape) => {
                    return Err(HfError::Shape {
                        path: file,
                        name,
                        expected,
                        got: shape.clone(),
                    });
                }
                None => {
                    return Err(HfError::MissingTensor {
                        path: file,
                        name,
                        expected,
                    });
                }
            }
        }

        Ok(Self {
            path: path.to_owned(),
            config,
            warnings,
            source: Source::Checkpoint(Box::new(reader)),
        })
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

    /// The folder's tokenizer, if it has one.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        let folder = match &self.source {
            Source::Files { .. } => &self.path,
            Source::Checkpoint(reader) => reader.path(),
        };
        tokenizer_files::tokenizer_in(folder)
    }

    /// Reads elements `range` of parameter `name` to `out`.
    ///
    /// # Errors
    /// No such parameter, a range outside it, another length of `out`, a failed read, or a value
    /// that is not finite.
    pub fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<(), HfError> {
        let start = range.start;
        match &self.source {
            Source::Files { weights, stored } => {
                let stored = stored.get(name).ok_or_else(|| HfError::UnknownParameter {
                    name: name.to_owned(),
                })?;
                weights.read(stored, range, out)?;
            }
            Source::Checkpoint(reader) => reader.read_param(MASTER, name, range, out)?,
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
            Source::Files { weights, .. } => find(weights, self.config.prefix(), name)
                .map_or(&*self.path, |(_, file)| file)
                .to_owned(),
            Source::Checkpoint(reader) => reader.path().to_owned(),
        }
    }
}

/// Elements of a part of the weights that one rank hashes.
const HASHED_ELEMS: u64 = 1 << 20;

impl HfFolder {
    /// Equal for folders of the same files on the same machine, and for the same checkpoint
    /// anywhere. Folders with other identities may have equal weights too.
    pub fn identity(&self) -> u64 {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        match &self.source {
            Source::Checkpoint(reader) => digest.update(&reader.selection().crc64.to_le_bytes()),
            Source::Files { weights, .. } => {
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

/// Finds a parameter, stored with or without the prefix.
fn find<'a>(
    weights: &'a TensorFolder,
    prefix: &str,
    name: &str,
) -> Option<(&'a zero_ckpt::TensorEntry, &'a Path)> {
    let bare = name.strip_prefix(prefix).unwrap_or(name);
    weights.tensor(name).or_else(|| weights.tensor(bare))
}

/// The file of a head that differs from the `embedding`.
fn untied_head(weights: &TensorFolder, embedding: &str) -> Result<Option<PathBuf>, CkptError> {
    /// Elements that are compared at a time.
    const CHUNK_ELEMS: u64 = 1 << 16;
    let (Some((head, file)), Some((tied, _))) = (weights.tensor(HEAD), weights.tensor(embedding))
    else {
        return Ok(None);
    };

    if head.shape != tied.shape || StateDtype::from_name(&head.dtype).is_none() {
        return Ok(Some(file.to_owned()));
    }
    let mut ours = vec![0.0; CHUNK_ELEMS as usize];
    let mut theirs = vec![0.0; CHUNK_ELEMS as usize];

    for start in (0..tied.elems()).step_by(CHUNK_ELEMS as usize) {
        let end = tied.elems().min(start + CHUNK_ELEMS);
        let n = (end - start) as usize;
        weights.read(HEAD, start..end, &mut ours[..n])?;
        weights.read(embedding, start..end, &mut theirs[..n])?;
        if ours[..n]
            .iter()
            .zip(&theirs[..n])
            .any(|(a, b)| a.to_bits() != b.to_bits())
        {
            return Ok(Some(file.to_owned()));
        }
    }

    Ok(None)
}

/// A warning that names tensors unknown to the model. The attention masks of older files and the
/// repeated head of a tied model are ignored.
fn unused(
    weights: &TensorFolder,
    config: &ModelConfig,
    stored: &HashMap<String, String>,
) -> Option<String> {
    let used: std::collections::HashSet<&String> = stored.values().collect();
    let unused: Vec<&str> = weights
        .tensors()
        .filter(|t| !used.contains(&t.name))
        .map(|t| t.name.as_str())
        .collect();
    let is_mask = |name: &str| name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
    let mut unused = unused
        .into_iter()
        .filter(|name| !(is_mask(name) || *name == HEAD && config.tied_head()));
    let first = unused.next()?;
    let path = weights.path().display();
    let count = 1 + unused.count();
    Some(format!(
        "{path}: {count} tensors do not belong to the model and are ignored, the first is {first:?}"
    ))
}

#[cfg(test)]
pub(crate) mod tests;
