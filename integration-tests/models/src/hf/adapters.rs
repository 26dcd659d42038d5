//! Adapters of a model: those of a folder of Hugging Face's PEFT, and those of a checkpoint.
//!
//! A PEFT folder has `adapter_config.json` and `adapter_model.safetensors`. A key of its
//! configuration with more than LoRA on linear layers of blocks is refused.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use zero_ckpt::{Reader, TensorFolder};
use zero_shard::ParamSpec;

use super::{DefectKind, HfError, MASTER, TensorDefect};
use crate::config::json::decimal;
use crate::lora::{self, LoraConfig};
use crate::ops::linear::MatrixOrder;
use crate::{ConfigError, ModelConfig};

/// The configuration of a PEFT folder.
const CONFIG: &str = "adapter_config.json";

/// The adapters of a PEFT folder.
const TENSORS: &str = "adapter_model.safetensors";

/// The method of [`Adapters`] in a configuration.
const METHOD: &str = "LORA";

/// Keys of a configuration that change no number, or are read; any other may only be off.
const KEYS: [&str; 18] = [
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
];

/// Open adapters, all of which have the shapes of their model.
pub struct Adapters {
    path: PathBuf,
    /// The model with adapters.
    config: ModelConfig,
    source: Source,
}

enum Source {
    Folder(TensorFolder),
    Checkpoint(Box<Reader>),
}

impl Adapters {
    /// Opens a PEFT folder of adapters for the model `base`.
    ///
    /// # Errors
    /// A missing or invalid file, a key of its configuration that is not supported, or adapters that
    /// the model does not have.
    pub fn open(path: &Path, base: &ModelConfig) -> Result<Self, HfError> {
        let file = path.join(CONFIG);
        let read = zero_ckpt::files::read_text(&file, zero_ckpt::files::SMALL_FILE_BYTES);
        let text = read.map_err(|source| HfError::Read {
            path: file.clone(),
            source,
        })?;
        let refused = |source| HfError::Config {
            path: file.clone(),
            source,
        };
        let lora = lora_of(&text, base).map_err(refused)?;
        let config = base.clone().with_lora(Some(lora)).map_err(refused)?;
        let tensors = TensorFolder::open(path.join(TENSORS))?;
        check_tensors(&tensors, &config)?;
        Ok(Self {
            path: path.to_owned(),
            config,
            source: Source::Folder(tensors),
        })
    }

    /// The adapters of the model `config`, which is [`adapted_model`], in a checkpoint.
    pub fn of_checkpoint(config: ModelConfig, reader: Reader) -> Self {
        Self {
            path: reader.path().to_owned(),
            config,
            source: Source::Checkpoint(Box::new(reader)),
        }
    }

    /// The folder or the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model with the adapters.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Reads elements `range` of the matrix `name` of an adapter to `out`.
    ///
    /// # Errors
    /// No such matrix, a range outside it, or a failed read.
    pub fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<(), HfError> {
        match &self.source {
            Source::Folder(tensors) => tensors.read(name, range, out)?,
            Source::Checkpoint(reader) => reader.read_param(MASTER, name, range, out)?,
        }
        Ok(())
    }

    /// Adds the adapter of the parameter `name` of the model, `scale B A`, to its elements `range`,
    /// if it has one.
    ///
    /// # Errors
    /// A failed read.
    pub(super) fn merge(
        &self,
        name: &str,
        range: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), HfError> {
        let Some(module) = name.strip_suffix(".weight") else {
            return Ok(());
        };
        let matrix = |matrix| format!("{}{module}.{matrix}.weight", lora::PREFIX);
        let [a, b] = ["lora_A", "lora_B"].map(|name| self.config.param(&matrix(name)));
        let (Some(a), Some(b), Some(lora)) = (a, b, self.config.lora()) else {
            return Ok(());
        };
        let [a, b] = [self.whole(&a)?, self.whole(&b)?];
        let r = lora.r;
        // The rows of the matrix are products of rows of `left` and columns of `right`, both with r
        // as their first dimension.
        let (left, right) = match self.config.decoder().order {
            MatrixOrder::OutputsFirst => (transposed(&b, r), a),
            MatrixOrder::InputsFirst => (a, transposed(&b, r)),
        };
        let [rows, cols] = [left.len() / r, right.len() / r];
        let mut sums = vec![0.0; cols];
        let [start, end] = [range.start as usize, range.end as usize];
        for row in start / cols..end.div_ceil(cols) {
            sums.fill(0.0);
            for k in 0..r {
                let factor = left[k * rows + row];
                let right = &right[k * cols..(k + 1) * cols];
                sums.iter_mut()
                    .zip(right)
                    .for_each(|(sum, x)| *sum += factor * x);
            }
            let part = start.max(row * cols)..end.min((row + 1) * cols);
            let sums = &sums[part.start - row * cols..part.end - row * cols];
            let out = &mut out[part.start - start..part.end - start];
            let scale = lora.scale();
            out.iter_mut()
                .zip(sums)
                .for_each(|(out, sum)| *out += scale * sum);
        }
        Ok(())
    }

    fn whole(&self, param: &ParamSpec) -> Result<Vec<f32>, HfError> {
        let elems: u64 = param.shape.iter().product();
        let mut values = vec![0.0; elems as usize];
        self.read(&param.name, 0..elems, &mut values)?;
        Ok(values)
    }
}

/// The model of a checkpoint with its adapters; `None` if its run had none. That may be any model,
/// also one without a configuration.
///
/// # Errors
/// Its configuration is invalid.
pub fn adapted_model(reader: &Reader) -> Result<Option<ModelConfig>, HfError> {
    let model_config = &reader.manifest().model_config;
    match model_config.get(lora::KEY) {
        Some(_) => super::config_of(reader).map(|(config, _)| Some(config)),
        None => Ok(None),
    }
}

/// The transpose of `[rows, cols]`.
fn transposed(x: &[f32], cols: usize) -> Vec<f32> {
    let columns = (0..cols).flat_map(|col| x.iter().skip(col).step_by(cols));
    columns.copied().collect()
}

/// The adapters that a configuration describes.
fn lora_of(text: &str, base: &ModelConfig) -> Result<LoraConfig, ConfigError> {
    let keys: Map<String, Value> =
        serde_json::from_str(text).map_err(|e| ConfigError::Json(e.to_string()))?;
    let get = |key: &str| keys.get(key).filter(|value| !value.is_null());
    let unsupported = |key: &str, supported: &str| {
        let got = keys.get(key).unwrap_or(&Value::Null);
        ConfigError::Lora(format!(
            "the key {key:?} is {got}, which this trainer does not support; it supports {supported}"
        ))
    };
    let expect = |key: &str, ok: &dyn Fn(&Value) -> bool, supported: &str| match get(key) {
        Some(value) if !ok(value) => Err(unsupported(key, supported)),
        _ => Ok(()),
    };

    if get("peft_type").is_none_or(|method| method != METHOD) {
        return Err(unsupported("peft_type", "\"LORA\""));
    }
    expect("bias", &|v| v == "none", "\"none\"")?;
    expect("task_type", &|v| v == "CAUSAL_LM", "\"CAUSAL_LM\"")?;
    // Others change the base.
    let keeps_base = ["gaussian", "eva", "orthogonal"];
    expect(
        "init_lora_weights",
        &|v| v.is_boolean() || keeps_base.iter().any(|name| v == name),
        "true, false, \"gaussian\", \"eva\" and \"orthogonal\"",
    )?;
    for (key, value) in &keys {
        let is_off = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(values) => values.is_empty(),
            Value::Object(values) => values.is_empty(),
            _ => false,
        };
        if !is_off && !KEYS.contains(&key.as_str()) {
            return Err(unsupported(
                key,
                "adapters without it: null, false or empty",
            ));
        }
    }

    let number = |key: &str, default: f64| match get(key) {
        None => Ok(default),
        Some(value) => value.as_f64().ok_or_else(|| unsupported(key, "numbers")),
    };
    let r = get("r").map_or(Some(lora::DEFAULT_R as u64), Value::as_u64);
    let names = |value: &Value| {
        if value == lora::ALL_LINEAR {
            return Some(vec![lora::ALL_LINEAR.to_owned()]);
        }
        let names = value.as_array()?.iter();
        let names = names.map(|name| name.as_str().map(str::to_owned));
        names.collect::<Option<Vec<_>>>()
    };
    let targets = get("target_modules").map_or_else(|| Some(base.default_lora_targets()), names);
    let mut targets =
        targets.ok_or_else(|| unsupported("target_modules", "a list of names of modules"))?;
    // PEFT's order is that of a set.
    targets.sort();
    Ok(LoraConfig {
        r: r.ok_or_else(|| unsupported("r", "whole numbers"))? as usize,
        alpha: number("lora_alpha", lora::DEFAULT_ALPHA)?,
        dropout: number("lora_dropout", 0.0)? as f32,
        rslora: get("use_rslora").is_some_and(|v| v == true),
        targets,
    })
}

/// The `adapter_config.json` of the adapters of a model, if it has some.
pub fn peft_config(config: &ModelConfig, base: &str) -> Option<Value> {
    let lora = config.lora()?;
    let has_conv1d = config.decoder().order == MatrixOrder::InputsFirst;
    // PEFT writes a whole alpha as an integer.
    let alpha = match lora.alpha.fract() == 0.0 {
        true => json!(lora.alpha as i64),
        false => json!(lora.alpha),
    };
    Some(json!({
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": has_conv1d,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": alpha,
        "lora_dropout": decimal(lora.dropout),
        "peft_type": METHOD,
        "r": lora.r,
        "target_modules": lora.targets,
        "task_type": "CAUSAL_LM",
        "use_rslora": lora.rslora,
    }))
}

/// Checks that the file has the adapters of `config`, and no other tensor.
fn check_tensors(tensors: &TensorFolder, config: &ModelConfig) -> Result<(), HfError> {
    let units = config.units().into_iter().take(config.adapter_units());
    let params: Vec<_> = units.flat_map(|unit| unit.params).collect();
    let defect = |param: &ParamSpec| {
        let kind = match tensors.tensor(&param.name) {
            None => DefectKind::Missing,
            Some((tensor, _)) if tensor.shape != param.shape => {
                DefectKind::Shape(tensor.shape.clone())
            }
            Some((tensor, _)) if !tensor.is_readable() => DefectKind::Type(tensor.dtype.clone()),
            Some(_) => return None,
        };
        Some(TensorDefect {
            path: tensors.path().to_owned(),
            name: param.name.clone(),
            expected: param.shape.clone(),
            kind,
        })
    };
    let defects: Vec<_> = params.iter().filter_map(defect).collect();
    if !defects.is_empty() {
        return Err(HfError::Tensors {
            defects,
            hint: String::new(),
        });
    }
    let is_other = |name: &&str| !params.iter().any(|param| param.name == **name);
    let mut names = tensors.tensors().map(|tensor| tensor.name.as_str());
    match names.find(is_other) {
        None => Ok(()),
        Some(name) => Err(HfError::Config {
            path: tensors.path().to_owned(),
            source: ConfigError::Lora(format!(
                "the tensor {name:?} is no adapter of the modules of {CONFIG}; remove it, or correct target_modules"
            )),
        }),
    }
}
