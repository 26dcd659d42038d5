//! Reading a model folder.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::Deserialize;

use super::tensor_file::{CHUNK_ELEMS, TensorFile};
use super::{HfError, read_error};
use crate::model::config::GptConfig;

/// An open model folder, whose tensors are all there with the shapes that its configuration asks for.
pub struct HfFolder {
    path: PathBuf,
    config: GptConfig,
    warnings: Vec<String>,
    files: Vec<TensorFile>,
    tensors: HashMap<String, Located>,
}

/// Where a parameter's values are.
struct Located {
    file: usize,
    info: TensorInfo,
    numel_elems: u64,
}

/// The matrix of the embedding, which a tied head shares.
const EMBEDDING: &str = "transformer.wte.weight";
/// A head's own matrix.
const HEAD: &str = "lm_head.weight";

/// Whether values of this type are read.
fn is_read(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

impl HfFolder {
    /// Opens the folder and checks its configuration and all tensors of the model.
    ///
    /// # Errors
    /// The first thing that is missing or does not fit, with its file.
    pub fn open(path: &Path) -> Result<Self, HfError> {
        if !path.is_dir() {
            return Err(HfError::NoFolder { path: path.to_owned() });
        }
        let config_path = path.join("config.json");
        let text = fs::read_to_string(&config_path).map_err(read_error(&config_path))?;
        let (config, mut warnings) =
            GptConfig::from_hf_json(&text).map_err(|source| HfError::Config { path: config_path, source })?;

        let weights = Weights::open(path)?;
        let mut tensors = HashMap::new();
        for param in config.units().into_iter().flat_map(|u| u.params) {
            let missing = || HfError::MissingTensor {
                path: weights.named_by.clone(),
                name: param.name.clone(),
                expected: param.shape.clone(),
            };
            let (file, info) = weights.find(&param.name).ok_or_else(missing)?;
            let file_path = || weights.files[file].path.clone();
            let got: Vec<u64> = info.shape.iter().map(|n| *n as u64).collect();
            if got != param.shape {
                let (name, expected) = (param.name, param.shape);
                return Err(HfError::Shape { path: file_path(), name, expected, got });
            }
            if !is_read(info.dtype) {
                let (name, got) = (param.name, format!("{:?}", info.dtype));
                return Err(HfError::TensorType { path: file_path(), name, got });
            }
            let located = Located { file, info: info.clone(), numel_elems: param.shape.iter().product() };
            tensors.insert(param.name, located);
        }
        warnings.extend(weights.unused(&config));
        if config.tied_head
            && let Some(head) = weights.own_head(&tensors[EMBEDDING])?
        {
            return Err(HfError::UntiedHead { path: head });
        }
        Ok(Self { path: path.to_owned(), config, warnings, files: weights.files, tensors })
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's shape.
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// What the folder has or asks for that is not used, a line each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Path of the folder's `tokenizer.json`, where it has one.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        Some(self.path.join("tokenizer.json")).filter(|p| p.is_file())
    }

    /// Reads elements `range` of parameter `name` to `out`.
    ///
    /// # Errors
    /// A name that the model has not, a range outside the parameter or of another length than `out`, or a
    /// file that cannot be read.
    pub fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<(), HfError> {
        let tensor = self.tensors.get(name).ok_or_else(|| HfError::UnknownParameter { name: name.to_owned() })?;
        let numel = tensor.numel_elems;
        if range.start > range.end || range.end > numel || range.end - range.start != out.len() as u64 {
            let (start, end, len) = (range.start, range.end, out.len());
            return Err(HfError::BadRange { name: name.to_owned(), start, end, numel, len });
        }
        let file = &self.files[tensor.file];
        file.read(&tensor.info, range.start, out).map_err(read_error(&file.path))
    }
}

/// The files with weights, and which tensor is in which.
struct Weights {
    files: Vec<TensorFile>,
    /// Tensor name as in the file, to the file.
    file_of: HashMap<String, usize>,
    /// The file that says where tensors are: the only one, or the index.
    named_by: PathBuf,
}

/// What is used of `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

impl Weights {
    fn open(dir: &Path) -> Result<Self, HfError> {
        let single = dir.join("model.safetensors");
        if single.is_file() {
            let file = TensorFile::open(&single)?;
            let file_of = file.names().into_iter().map(|name| (name, 0)).collect();
            return Ok(Self { files: vec![file], file_of, named_by: single });
        }
        let index = dir.join("model.safetensors.index.json");
        if index.is_file() {
            return Self::open_sharded(dir, index);
        }
        let hint = if dir.join("pytorch_model.bin").is_file() {
            "; pytorch_model.bin is not read: save the model with safe_serialization=True"
        } else {
            ""
        };
        Err(HfError::NoWeights { path: dir.to_owned(), hint })
    }

    fn open_sharded(dir: &Path, index: PathBuf) -> Result<Self, HfError> {
        let wrong = |message: String| HfError::Index { path: index.clone(), message };
        let text = fs::read_to_string(&index).map_err(read_error(&index))?;
        let parsed: Index = serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
        let mut names: Vec<&String> = parsed.weight_map.values().collect();
        names.sort_unstable();
        names.dedup();
        let mut files = Vec::with_capacity(names.len());
        let mut number = HashMap::new();
        for name in names {
            // A file of this folder, and no way out of it.
            let mut components = Path::new(name).components();
            if !matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) {
                return Err(wrong(format!("{name:?} is not the name of a file in the folder")));
            }
            number.insert(name.as_str(), files.len());
            files.push(TensorFile::open(&dir.join(name))?);
        }
        let mut file_of = HashMap::with_capacity(parsed.weight_map.len());
        for (tensor, name) in &parsed.weight_map {
            let file = number[name.as_str()];
            if files[file].info(tensor).is_none() {
                return Err(wrong(format!("it places tensor {tensor:?} in {name}, which does not have it")));
            }
            file_of.insert(tensor.clone(), file);
        }
        Ok(Self { files, file_of, named_by: index })
    }

    /// A parameter by its name here, stored with or without the prefix `transformer.`.
    fn find(&self, name: &str) -> Option<(usize, &TensorInfo)> {
        let bare = name.strip_prefix("transformer.").unwrap_or(name);
        [name, bare].into_iter().find_map(|stored| {
            let file = *self.file_of.get(stored)?;
            Some((file, self.files[file].info(stored)?))
        })
    }

    /// The file of a head that is stored beside the `embedding` and differs from it.
    fn own_head(&self, embedding: &Located) -> Result<Option<PathBuf>, HfError> {
        let Some((head, info)) = self.find(HEAD) else { return Ok(None) };
        let (head, tied) = (&self.files[head], &self.files[embedding.file]);
        if info.shape != embedding.info.shape || !is_read(info.dtype) {
            return Ok(Some(head.path.clone()));
        }
        let (mut ours, mut theirs) = (vec![0.0; CHUNK_ELEMS], vec![0.0; CHUNK_ELEMS]);
        for start in (0..embedding.numel_elems).step_by(CHUNK_ELEMS) {
            let len = (embedding.numel_elems - start).min(CHUNK_ELEMS as u64) as usize;
            head.read(info, start, &mut ours[..len]).map_err(read_error(&head.path))?;
            tied.read(&embedding.info, start, &mut theirs[..len]).map_err(read_error(&tied.path))?;
            if ours[..len].iter().zip(&theirs[..len]).any(|(a, b)| a.to_bits() != b.to_bits()) {
                return Ok(Some(head.path.clone()));
            }
        }
        Ok(None)
    }

    /// A warning that names the stored tensors that the model does not use.
    ///
    /// Attention masks are buffers that older files carry, and the head of a tied model repeats the
    /// embedding: those are passed over in silence.
    fn unused(&self, config: &GptConfig) -> Option<String> {
        let known: Vec<String> = config.units().into_iter().flat_map(|u| u.params).map(|p| p.name).collect();
        let mut unused: Vec<&str> = self.file_of.keys().map(String::as_str).collect();
        unused.retain(|stored| {
            let full = format!("transformer.{stored}");
            let is_mask = stored.ends_with(".attn.bias") || stored.ends_with(".attn.masked_bias");
            let is_tied_head = *stored == HEAD && config.tied_head;
            !is_mask && !is_tied_head && !known.iter().any(|k| k == stored || *k == full)
        });
        unused.sort_unstable();
        let (first, count) = (unused.first()?, unused.len());
        let path = self.named_by.display();
        Some(format!("{path}: {count} tensors are not of the model and not read, the first is {first:?}"))
    }
}
