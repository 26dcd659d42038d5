//! The files of a model beside its weights: its tokenizer, chat templates and settings of
//! generation.
//!
//! A run keeps them beside its checkpoints (`zero_ckpt::ModelFiles`), so that a resume, an export
//! and `zero generate` need no path of the machine that it was made on. Checkpoints of older
//! versions have none: their files are in the folders that `run.json` names, if these exist.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use zero_ckpt::{ModelFiles, Reader, StateDtype};
use zero_models::ModelConfig;
use zero_models::hf::companions::{self, read_json};
use zero_models::hf::{HfFolder, kept_files};
use zero_models::lora;

use crate::error::CliError;
use crate::settings::record::RunRecord;

/// The files of a run to keep: those of the folder of its model and of its tokenizer.
///
/// # Errors
/// A file cannot be read.
pub(crate) fn to_keep(
    model: Option<&Path>,
    tokenizer: Option<&Path>,
) -> Result<ModelFiles, CliError> {
    let sources = companions::files_to_keep(model, tokenizer).map_err(CliError::usage)?;
    ModelFiles::read(sources).map_err(CliError::usage)
}

/// The folder of the model of a run of an older version, if it exists here.
pub(crate) fn recorded_folder(run: &RunRecord) -> Option<PathBuf> {
    let folder = PathBuf::from(&run.model.weights);
    folder.is_dir().then_some(folder)
}

/// The files that are exported with the weights of a checkpoint.
pub(crate) struct Exported {
    pub(crate) files: ModelFiles,
    pub(crate) config: Value,
    /// Shortcomings of the export, a line each.
    pub(crate) lacks: Vec<String>,
}

impl Exported {
    /// Finds the files of a checkpoint, whose weights are exported in `dtype`.
    ///
    /// # Errors
    /// Files that are there, and damaged or unreadable.
    pub(crate) fn of(
        reader: &Reader,
        run: Option<&RunRecord>,
        dtype: StateDtype,
    ) -> Result<Self, CliError> {
        let (kept, missing) = kept_files(reader).map_err(CliError::failure)?;
        let mut lacks: Vec<String> = missing.into_iter().collect();
        let (files, folder) = match (kept, run) {
            (Some(folder), _) => {
                let files = reader.model_files().map_err(CliError::failure)?;
                (files, Some(folder))
            }
            (None, Some(run)) => {
                let folder = recorded_folder(run);
                let tokenizer = run.data.tokenizer.as_deref().map(Path::new);
                let gone = gone(run);
                lacks.extend(
                    gone.iter()
                        .map(|path| format!("{path} does not exist here")),
                );
                let tokenizer = tokenizer.filter(|path| path.exists());
                (Some(to_keep(folder.as_deref(), tokenizer)?), folder)
            }
            (None, None) => (None, None),
        };

        let files = match files {
            Some(files) => files,
            None => ModelFiles::read([]).map_err(CliError::failure)?,
        };
        let names: Vec<String> = files.files().map(|(name, _)| name.to_owned()).collect();
        let files = files
            .renamed(|name| companions::exported_name(name, &names))
            .map_err(CliError::failure)?;
        if !companions::have_tokenizer(files.files().map(|(name, _)| name)) {
            lacks.insert(0, without_tokenizer(run, !lacks.is_empty()));
        }

        let original = match folder {
            Some(folder) => read_json(&folder.join("config.json")).map_err(CliError::failure)?,
            None => None,
        };
        let mut own = with_dtype(reader.manifest().model_config.clone(), dtype);
        // Merged adapters are no part of the model.
        if let Value::Object(keys) = &mut own {
            keys.remove(lora::KEY);
        }
        let config = match original.map(|original| with_dtype(original, dtype)) {
            Some(original) => merged(original, &own).unwrap_or_else(|| {
                lacks.push(
                    "config.json has only the keys that describe the model, since that of its folder describes \
                     another one"
                        .to_owned(),
                );
                own
            }),
            None => own,
        };
        Ok(Self {
            files,
            config,
            lacks,
        })
    }
}

/// The base of adapters in a checkpoint: the folder `named`, or the one that its run recorded.
///
/// # Errors
/// It cannot be opened, or is not the base of the run.
pub(crate) fn base_of(
    reader: &Reader,
    named: Option<&Path>,
    flag: &str,
) -> Result<HfFolder, CliError> {
    let path = reader.path().display();
    let model = RunRecord::of(reader)?.map(|record| record.model);
    let recorded = model.as_ref().filter(|model| model.base_checksum.is_some());
    let Some(folder) = named.or(recorded.map(|model| Path::new(&model.weights))) else {
        return Err(usage!(
            "{path} has adapters of a base that was drawn or is not recorded: pass its folder with {flag}"
        ));
    };
    let base = HfFolder::open(folder)
        .map_err(|error| usage!("the base of {path}: {error}; pass its folder with {flag}"))?;
    let checksum = base.checksum(0, 1).map_err(CliError::failure)?;
    let was = recorded.and_then(|model| model.base_checksum.as_deref());
    match was.filter(|was| *was != format!("{checksum:016x}")) {
        None => Ok(base),
        Some(was) => Err(usage!(
            "{}: the adapters of {path} were trained on another base (checksum {was}; this one has {checksum:016x}): \
             pass its folder with {flag}",
            folder.display()
        )),
    }
}

/// The recorded paths of a run that do not exist.
fn gone(run: &RunRecord) -> Vec<&str> {
    let weights = Some(run.model.weights.as_str()).filter(|path| Path::new(path).is_absolute());
    let tokenizer = run.data.tokenizer.as_deref();
    let paths = [weights, tokenizer].into_iter().flatten();
    paths.filter(|path| !Path::new(path).exists()).collect()
}

fn without_tokenizer(run: Option<&RunRecord>, has_reason: bool) -> String {
    let remedy = "copy the tokenizer's files into it before transformers reads it";
    match run {
        _ if has_reason => format!("no tokenizer; {remedy}:"),
        Some(run) if run.data.tokenizer.is_none() && recorded_folder(run).is_none() => {
            "no tokenizer: the run had none, its tokens are bytes or come from a file of tokens"
                .to_owned()
        }
        Some(_) => format!("no tokenizer: the model's folder had none; {remedy}"),
        None => format!("no tokenizer: the checkpoint has none; {remedy}"),
    }
}

/// A configuration with another type of the weights, in the spelling that it has.
fn with_dtype(mut config: Value, dtype: StateDtype) -> Value {
    let name = match dtype {
        StateDtype::BF16 => "bfloat16",
        StateDtype::F16 => "float16",
        _ => "float32",
    };
    if let Value::Object(keys) = &mut config {
        let key = match keys.contains_key("dtype") {
            true => "dtype",
            false => "torch_dtype",
        };
        keys.insert(key.to_owned(), name.into());
        // One key of two would contradict the other.
        if key == "dtype" {
            keys.remove("torch_dtype");
        }
    }
    config
}

/// Probabilities that a run may change.
const DROPOUTS: [&str; 4] = [
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
];

/// The configuration of a model's folder with what the run has changed; `None` if it describes
/// another model than `own`, that of the checkpoint.
fn merged(original: Value, own: &Value) -> Option<Value> {
    let mut keys: Map<String, Value> = original.as_object()?.clone();
    for key in DROPOUTS {
        let number = |value: Option<&Value>| value.and_then(Value::as_f64);
        if let Some(value) = own
            .get(key)
            .filter(|own| number(Some(own)) != number(keys.get(key)))
        {
            keys.insert(key.to_owned(), value.clone());
        }
    }

    let merged = Value::Object(keys);
    let model = |config: &Value| ModelConfig::from_hf_json(&config.to_string());
    let (merged_model, _) = model(&merged).ok()?;
    let (own_model, _) = model(own).ok()?;
    (merged_model.with_special_tokens_of(&own_model) == own_model).then_some(merged)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn configuration_of_the_folder_is_kept() {
        let original = json!({"model_type": "gpt2", "vocab_size": 11, "n_positions": 6, "n_embd": 4, "n_layer": 2,
            "n_head": 2, "n_inner": null, "dtype": "float64", "torch_dtype": "float64", "attn_pdrop": 0,
            "resid_pdrop": 0.1, "embd_pdrop": 0.1, "eos_token_id": 151_645, "pad_token_id": 3, "use_cache": true,
            "task_specific_params": {"a": 1}});
        let (model, _) = ModelConfig::from_hf_json(&original.to_string()).unwrap();
        let model = model.with_dropout(0.0);
        let own: Value = serde_json::from_str(&model.to_hf_json("float32")).unwrap();

        let got = merged(with_dtype(original.clone(), StateDtype::BF16), &own).unwrap();
        let mut expected = original.clone();
        expected.as_object_mut().unwrap().remove("torch_dtype");
        expected["dtype"] = "bfloat16".into();
        expected["resid_pdrop"] = 0.0.into();
        expected["embd_pdrop"] = 0.0.into();
        assert_eq!(got, expected);

        // Of an older version, which wrote other special tokens.
        let mut older = own.clone();
        older["eos_token_id"] = 10.into();
        assert_eq!(
            merged(original.clone(), &older).unwrap()["eos_token_id"],
            151_645
        );

        let mut other = original;
        other["n_layer"] = 3.into();
        assert_eq!(merged(other, &own), None);
        assert_eq!(merged(json!([]), &own), None);
        assert_eq!(merged(json!({"model_type": "t5"}), &own), None);
    }
}
