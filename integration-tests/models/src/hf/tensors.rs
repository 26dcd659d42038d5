//! The tensors of a Hugging Face folder beside those of its configuration.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};

use zero_ckpt::{CkptError, StateDtype, TensorEntry, TensorFolder};

use super::HfError;
use crate::ModelConfig;

/// The matrix of an untied head.
const HEAD: &str = "lm_head.weight";

/// Defects that a message lists.
const LISTED: usize = 20;

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
                "tensor {name:?} has type {got}; supported are F32, F16 and BF16"
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

/// The name in the files of each parameter, if all can be used.
pub(super) fn stored_names(
    weights: &TensorFolder,
    config: &ModelConfig,
) -> Result<HashMap<String, String>, HfError> {
    let mut stored = HashMap::new();
    let mut defects = Vec::new();
    for param in config.units().into_iter().flat_map(|unit| unit.params) {
        let found = find(weights, config.prefix(), &param.name);
        let kind = match found {
            None => DefectKind::Missing,
            Some((tensor, _)) if tensor.shape != param.shape => {
                DefectKind::Shape(tensor.shape.clone())
            }
            Some((tensor, _)) if StateDtype::from_name(&tensor.dtype).is_none() => {
                DefectKind::Type(tensor.dtype.clone())
            }
            Some((tensor, _)) => {
                stored.insert(param.name, tensor.name.clone());
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
    match defects.is_empty() {
        true => Ok(stored),
        false => Err(HfError::Tensors(defects)),
    }
}

/// Finds a parameter, stored with or without the prefix.
pub(super) fn find<'a>(
    weights: &'a TensorFolder,
    prefix: &str,
    name: &str,
) -> Option<(&'a TensorEntry, &'a Path)> {
    let bare = name.strip_prefix(prefix).unwrap_or(name);
    weights.tensor(name).or_else(|| weights.tensor(bare))
}

/// The file of a head that differs from the `embedding`.
pub(super) fn untied_head(
    weights: &TensorFolder,
    embedding: &str,
) -> Result<Option<PathBuf>, CkptError> {
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
pub(super) fn unused(
    weights: &TensorFolder,
    config: &ModelConfig,
    stored: &HashMap<String, String>,
) -> Option<String> {
    let used: HashSet<&String> = stored.values().collect();
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
