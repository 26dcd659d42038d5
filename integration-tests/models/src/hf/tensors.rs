//! The tensors of a Hugging Face folder beside those of its configuration.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use zero_ckpt::{CkptError, TensorEntry, TensorFolder};

use super::HfError;
use super::bitsandbytes::{PackedMatrix, is_beside_matrix};
use crate::ModelConfig;

/// The matrix of an untied head.
const HEAD: &str = "lm_head.weight";

/// Defects that a message lists.
const LISTED: usize = 3;

/// A tensor that the model cannot use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorDefect {
    /// The file; of a tensor that is in none, the only file or the index.
    pub path: PathBuf,
    /// The parameter's name.
    pub name: String,
    /// Its shape by the configuration.
    pub expected: Vec<u64>,
    /// What differs.
    pub kind: DefectKind,
}

/// How a tensor differs from the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DefectKind {
    /// It is in no file.
    Missing,
    /// It has this shape.
    Shape(Vec<u64>),
    /// It has this type, which is not supported.
    Type(String),
}

impl fmt::Display for TensorDefect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, expected, .. } = self;
        match &self.kind {
            DefectKind::Missing => write!(f, "tensor {name:?} of shape {expected:?} is missing"),
            DefectKind::Shape(got) => write!(
                f,
                "tensor {name:?} has shape {got:?}; config.json requires {expected:?}"
            ),
            DefectKind::Type(got) => write!(
                f,
                "tensor {name:?} has type {got}; supported are F32, F16, BF16 and F64"
            ),
        }
    }
}

/// The defects in one line, each file named once.
pub(super) fn list(defects: &[TensorDefect]) -> String {
    let mut text = String::new();
    let mut file = None;
    for defect in defects.iter().take(LISTED) {
        if !text.is_empty() {
            text += "; ";
        }
        if file != Some(&defect.path) {
            text += &format!("{}: ", defect.path.display());
            file = Some(&defect.path);
        }
        text += &defect.to_string();
    }
    match defects.len().saturating_sub(LISTED) {
        0 => text,
        more => format!("{text}; and {more} more"),
    }
}

/// The names of the parameters in the files of a folder.
pub(super) struct StoredNames {
    /// The prefix of the names of all tensors, such as `module.` of a wrapper; may be empty.
    wrapper: String,
    /// The tensor of each parameter.
    of_param: HashMap<String, String>,
    /// The parameters in 4 bits.
    packed: HashMap<String, PackedMatrix>,
}

impl StoredNames {
    /// Finds all parameters.
    ///
    /// # Errors
    /// [`HfError::Tensors`] with each that cannot be used.
    pub(super) fn find(weights: &TensorFolder, config: &ModelConfig) -> Result<Self, HfError> {
        let wrappers = wrappers(weights, config);
        let wrapper = match &wrappers[..] {
            [only] if weights.tensors().all(|t| t.name.starts_with(only)) => only.clone(),
            _ => String::new(),
        };

        let mut of_param = HashMap::new();
        let mut packed = HashMap::new();
        let mut defects = Vec::new();
        for param in config.units().into_iter().flat_map(|unit| unit.params) {
            let found = find(weights, &wrapper, config.prefix(), &param.name);
            let matrix = match found {
                Some((tensor, _)) => PackedMatrix::open(weights, &tensor.name)?,
                None => None,
            };
            let kind = match found {
                None => DefectKind::Missing,
                Some((tensor, _)) if matrix.as_ref().is_some_and(|m| m.shape == param.shape) => {
                    of_param.insert(param.name.clone(), tensor.name.clone());
                    packed.extend(matrix.map(|matrix| (param.name, matrix)));
                    continue;
                }
                Some((tensor, _)) if tensor.shape != param.shape => {
                    DefectKind::Shape(tensor.shape.clone())
                }
                Some((tensor, _)) if !tensor.is_readable() => {
                    DefectKind::Type(tensor.dtype.clone())
                }
                Some((tensor, _)) => {
                    of_param.insert(param.name, tensor.name.clone());
                    continue;
                }
            };
            defects.push(TensorDefect {
                path: found.map_or(weights.path(), |(_, file)| file).to_owned(),
                name: param.name,
                expected: param.shape,
                kind,
            });
        }

        if defects.is_empty() {
            return Ok(Self {
                wrapper,
                of_param,
                packed,
            });
        }
        let is_missing = defects.iter().any(|d| d.kind == DefectKind::Missing);
        let hint = if is_missing {
            hint(weights, &wrappers, &wrapper)
        } else {
            String::new()
        };
        Err(HfError::Tensors { defects, hint })
    }

    /// Reads elements `range` of a parameter; `None` if there is no such parameter.
    pub(super) fn read(
        &self,
        weights: &TensorFolder,
        param: &str,
        range: Range<u64>,
        out: &mut [f32],
    ) -> Option<Result<(), HfError>> {
        let tensor = self.get(param)?;
        Some(match self.packed.get(param) {
            Some(matrix) => matrix.read(weights, tensor, range, out),
            None => weights.read(tensor, range, out).map_err(HfError::from),
        })
    }

    /// The tensor of a parameter.
    pub(super) fn get(&self, param: &str) -> Option<&str> {
        self.of_param.get(param).map(String::as_str)
    }

    /// The tensors of all parameters.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &str> {
        self.of_param.values().map(String::as_str)
    }

    /// The name of a tensor without what stands before all names.
    pub(super) fn without_wrapper<'a>(&self, tensor: &'a str) -> Option<&'a str> {
        tensor.strip_prefix(&self.wrapper)
    }

    /// A warning about what stands before the names.
    pub(super) fn notice(&self, weights: &TensorFolder) -> Option<String> {
        let path = weights.path().display();
        let wrapper = Some(&self.wrapper).filter(|wrapper| !wrapper.is_empty())?;
        Some(format!(
            "{path}: the names of all tensors start with {wrapper:?}, which is left out"
        ))
    }

    /// The file of a head that differs from the embedding.
    pub(super) fn untied_head(
        &self,
        weights: &TensorFolder,
        embedding: &str,
    ) -> Result<Option<PathBuf>, CkptError> {
        let head = format!("{}{HEAD}", self.wrapper);
        match self.get(embedding) {
            Some(embedding) => differing(weights, &head, embedding),
            None => Ok(None),
        }
    }

    /// A warning that names tensors unknown to the model. The attention masks of older files and
    /// the repeated head of a tied model are ignored.
    pub(super) fn unused(&self, weights: &TensorFolder, config: &ModelConfig) -> Option<String> {
        let used: HashSet<&str> = self.tensors().collect();
        let names = weights.tensors().map(|tensor| tensor.name.as_str());
        let is_mask =
            |name: &str| name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
        let is_head = |name: &str| self.without_wrapper(name) == Some(HEAD);
        let mut unused = names.filter(|name| {
            let is_beside = is_beside_matrix(weights, name);
            !(used.contains(name)
                || is_mask(name)
                || is_beside
                || is_head(name) && config.tied_head())
        });
        let first = unused.next()?;
        let path = weights.path().display();
        let count = 1 + unused.count();
        Some(format!(
            "{path}: {count} tensors do not belong to the model and are ignored, the first is {first:?}"
        ))
    }
}

/// The prefix of the embedding's name in the files, if the embedding is not there by its
/// own name: `module.` of DistributedDataParallel, `_orig_mod.` of torch.compile, ...
fn wrappers(weights: &TensorFolder, config: &ModelConfig) -> Vec<String> {
    let embedding = config.embedding_name();
    if find(weights, "", config.prefix(), embedding).is_some() {
        return Vec::new();
    }
    let bare = embedding.strip_prefix(config.prefix()).unwrap_or(embedding);
    let wrapper = |name: &str| {
        let wrapper = name
            .strip_suffix(embedding)
            .or_else(|| name.strip_suffix(bare))?;
        wrapper.ends_with('.').then(|| wrapper.to_owned())
    };
    weights
        .tensors()
        .filter_map(|tensor| wrapper(&tensor.name))
        .collect()
}

/// The content of the files in place of missing tensors, and the remedy.
fn hint(weights: &TensorFolder, wrappers: &[String], wrapper: &str) -> String {
    let is_adapter = |tensor: &TensorEntry| tensor.name.contains(".lora_");
    if weights.tensors().any(is_adapter) {
        return "; the files hold an adapter (LoRA): pass its model as --model, and this folder as --lora"
            .to_owned();
    }
    match wrappers.iter().find(|found| *found != wrapper) {
        None => String::new(),
        Some(found) => format!(
            "; the files have such tensors under names that start with {found:?}, and others: save the model's tensors \
             alone and without it, as {{name.removeprefix({found:?}): t for name, t in tensors.items() if \
             name.startswith({found:?})}}"
        ),
    }
}

/// Finds a parameter behind `wrapper`, stored with or without the prefix of the model.
fn find<'a>(
    weights: &'a TensorFolder,
    wrapper: &str,
    prefix: &str,
    name: &str,
) -> Option<(&'a TensorEntry, &'a Path)> {
    let bare = name.strip_prefix(prefix).unwrap_or(name);
    weights
        .tensor(&format!("{wrapper}{name}"))
        .or_else(|| weights.tensor(&format!("{wrapper}{bare}")))
}

/// The file of `head_name`, if it has other values than `embedding`.
fn differing(
    weights: &TensorFolder,
    head_name: &str,
    embedding: &str,
) -> Result<Option<PathBuf>, CkptError> {
    /// Elements that are compared at a time.
    const CHUNK_ELEMS: u64 = 1 << 16;
    let (Some((head, file)), Some((tied, _))) =
        (weights.tensor(head_name), weights.tensor(embedding))
    else {
        return Ok(None);
    };

    if head.shape != tied.shape || !head.is_readable() {
        return Ok(Some(file.to_owned()));
    }
    let mut ours = vec![0.0; CHUNK_ELEMS as usize];
    let mut theirs = vec![0.0; CHUNK_ELEMS as usize];

    for start in (0..tied.elems()).step_by(CHUNK_ELEMS as usize) {
        let end = tied.elems().min(start + CHUNK_ELEMS);
        let n = (end - start) as usize;
        weights.read(head_name, start..end, &mut ours[..n])?;
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
