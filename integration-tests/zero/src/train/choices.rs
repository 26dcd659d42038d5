//! The model and the data of a run: those of the flags, or of the resumed run.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use zero_data::{
    DataPosition, DataSource, FolderFiles, RowOptions, TrainingData, check_tokenizer,
    default_token_cache, has_tokens, tokenizer_checksum,
};
use zero_models::ModelConfig;
use zero_models::hf::HfFolder;
use zero_models::hf::adapters::Adapters;
use zero_models::hf::tokenizer_files::tokenizer_of_kept;
use zero_shard::{Layout, LayoutOptions, ParamSpec, UnitSpec};
use zero_trainer::SHARD_ALIGN_ELEMS;

use super::resume::Resumed;
use crate::error::CliError;
use crate::flags::find_model;
use crate::paths::absolute;
use crate::settings::args::TrainArgs;
use crate::settings::epochs;
use crate::settings::record::{DataRecord, ModelRecord, RunRecord};
use crate::settings::resolve::RunShape;
use crate::settings::sources::{Conditions, RunSources};
use crate::settings::validation;

/// The model without `--model`.
const DEFAULT_MODEL: &str = "nano";

/// The model of a run.
pub(crate) struct ChosenModel {
    /// The preset or the folder.
    pub(crate) name: String,
    pub(crate) config: ModelConfig,
    /// The folder of the initial weights, if they are not drawn.
    pub(crate) folder: Option<HfFolder>,
    /// The initial adapters, if they are not drawn.
    pub(crate) adapters: Option<Adapters>,
    /// The checksum of the folder's weights, if they are frozen.
    base_checksum: Option<String>,
    pub(crate) layout: Layout,
}

impl ChosenModel {
    /// The model of `--model`, of the resumed run, or the default. Its layout is that of a part of
    /// the parameters, over the ranks that have the same.
    ///
    /// # Errors
    /// It does not exist, or is not that of the checkpoint.
    pub(crate) fn find(
        args: &TrainArgs,
        resumed: Option<&Resumed>,
        ranks: usize,
        tensor_ranks: usize,
        notices: &mut Vec<String>,
    ) -> Result<Self, CliError> {
        let recorded = resumed.and_then(Resumed::model);
        let lora = resumed.and_then(Resumed::lora);
        let (name, config, folder) = match (&args.model, recorded) {
            (None, Some((name, config))) => {
                let base = resumed.and_then(Resumed::base_folder).transpose()?;
                (name, config, base)
            }
            (model, _) => {
                let name = model.as_deref().unwrap_or(DEFAULT_MODEL);
                let (config, folder) = find_model(name, notices)?;
                (name.to_owned(), config, folder)
            }
        };
        let config = match (args.dropout, resumed.and_then(Resumed::model)) {
            (Some(probability), _) => config.with_dropout(probability),
            (None, Some((_, recorded))) => config.with_dropout_of(&recorded),
            (None, None) => config,
        };
        let (config, adapters) = match (&args.lora, lora) {
            (Some(_), lora) if resumed.is_some() => {
                let has = if lora.is_some() { "its" } else { "no" };
                return Err(usage!(
                    "--lora with --resume: the run has {has} adapters, which a resumed run keeps; remove --lora"
                ));
            }
            (Some(choice), _) => choice.on(&config)?,
            (None, lora) => {
                let adapted = config.with_lora(lora);
                let adapted = adapted.map_err(|error| {
                    usage!("--model {name}: the checkpoint has adapters of another model ({error}); remove --model")
                })?;
                (adapted, None)
            }
        };
        let base_checksum = match (&folder, config.lora()) {
            (Some(folder), Some(_)) => {
                let checksum = folder.checksum(0, 1).map_err(CliError::usage)?;
                Some(format!("{checksum:016x}"))
            }
            _ => None,
        };
        let layout = Layout::new(&config.units(), ranks as u64, SHARD_ALIGN_ELEMS)
            .map_err(CliError::usage)?;
        if let Some(resumed) = resumed {
            resumed.check_model(&name, &config, &layout)?;
            resumed.check_base(&name, base_checksum.as_deref())?;
        }
        let layout = match tensor_ranks {
            1 => layout,
            _ => part_layout(&config, ranks, tensor_ranks)?,
        };
        Ok(Self {
            name,
            config,
            folder,
            adapters,
            base_checksum,
            layout,
        })
    }

    /// Lays the model out with these options.
    ///
    /// # Errors
    /// A size does not fit 64 bits.
    pub(crate) fn lay_out(&mut self, options: LayoutOptions) -> Result<(), CliError> {
        let units = self.layout.units().iter().map(|unit| {
            let params = unit.params.iter();
            let params = params.map(|param| ParamSpec::new(&param.name, param.shape.clone()));
            UnitSpec::new(&unit.name, params.collect::<Vec<_>>())
        });
        let units: Vec<_> = units.collect();
        let laid_out = Layout::with_options(&units, self.layout.world_size(), options);
        self.layout = laid_out.map_err(CliError::usage)?;
        Ok(())
    }

    pub(crate) fn shape(&self, run: &Conditions) -> RunShape {
        let units = self.layout.units().iter();
        RunShape {
            ranks: run.ranks,
            largest_unit: units.map(|unit| unit.padded_elems).max().unwrap_or(0),
            on_gpus: run.on_gpus,
            hidden: self.config.hidden() as u64,
            head_elems: self.config.head_elems(),
            adapters: self.config.lora().map(|_| self.config.adapter_units()),
        }
    }

    /// The record of the model whose weights, of step 0, are those of `recorded`, of the folder, or
    /// drawn with `seed`.
    pub(crate) fn record(&self, recorded: Option<&RunRecord>, seed: u64) -> ModelRecord {
        let path = Path::new(&self.name);
        let name = if path.is_dir() {
            absolute(path)
        } else {
            self.name.clone()
        };
        let weights = match (recorded, &self.folder) {
            (Some(recorded), _) if self.base_checksum.is_none() => recorded.model.weights.clone(),
            (_, Some(folder)) => absolute(folder.path()),
            (_, None) => format!("seed {seed}"),
        };
        ModelRecord {
            name,
            // Valid JSON by construction.
            config: serde_json::from_str(&self.config.to_hf_json("float32")).unwrap_or_default(),
            parameters: self.config.parameter_count(),
            weights,
            base_checksum: self.base_checksum.clone(),
        }
    }
}

/// The layout of a part of the parameters on one of `tensor_ranks` ranks, over those with the same.
///
/// # Errors
/// The parameters cannot be cut.
fn part_layout(
    config: &ModelConfig,
    ranks: usize,
    tensor_ranks: usize,
) -> Result<Layout, CliError> {
    let data_ranks = (ranks / tensor_ranks) as u64;
    let units = config
        .units_of_part(tensor_ranks)
        .map_err(CliError::usage)?;
    Layout::new(&units, data_ranks, SHARD_ALIGN_ELEMS).map_err(CliError::usage)
}

/// The data of a run.
pub(crate) struct ChosenData {
    source: DataSource,
    rows: RowOptions,
    pub(crate) training: TrainingData,
    /// The validation data.
    pub(crate) held_out: Option<Arc<TrainingData>>,
}

impl ChosenData {
    /// Opens the data.
    ///
    /// # Errors
    /// Flags that contradict each other, or data that cannot be read.
    pub(crate) fn open(
        from: &RunSources<'_>,
        model: &ChosenModel,
        kept: Option<&Path>,
        seq_len: usize,
        notices: &mut Vec<String>,
    ) -> Result<Self, CliError> {
        let args = &from.sources().all;
        let folder = model.folder.as_ref();
        let source = data_source(args, from.recorded, folder, kept)?;
        let tokenizer = source.tokenizer.clone();
        let companions = folder.map_or(kept, HfFolder::companions);
        if let Some(tokenizer) = &tokenizer {
            let found = check_tokenizer(tokenizer, companions, model.config.vocab_size());
            notices.extend(found.map_err(CliError::usage)?);
        }
        let rows = epochs::row_options(from, seq_len, tokenizer, companions);
        let (training, held_out) = validation::open(args, &source, &rows)?;
        notices.extend(validation::notices(&training, held_out.as_ref()));
        Ok(Self {
            source,
            rows,
            training,
            held_out,
        })
    }

    pub(crate) fn record(&self, epochs: Option<f64>, place: DataPosition) -> DataRecord {
        let source = &self.source;
        DataRecord {
            path: absolute(source.path.as_deref().unwrap_or(Path::new("."))),
            default: source.path.is_none() || source.files == FolderFiles::AsDefault,
            tokenizer: source.tokenizer.as_deref().map(absolute),
            fingerprint: format!("{:016x}", self.training.fingerprint()),
            tokens: self.training.len_tokens(),
            epochs,
            rows: epochs::record(&self.training, &self.rows),
            place,
        }
    }

    /// Whether rows are consecutive tokens, as those of a file of tokens.
    pub(crate) fn in_order(&self) -> bool {
        self.training.is_in_order()
    }

    /// The tokenizer of the run's text, or that of the model's folder.
    ///
    /// # Errors
    /// The model's folder cannot be searched.
    pub(crate) fn tokenizer(&self, folder: Option<&HfFolder>) -> Result<Option<PathBuf>, CliError> {
        match &self.source.tokenizer {
            Some(tokenizer) => Ok(Some(tokenizer.clone())),
            None => folder
                .map_or(Ok(None), HfFolder::tokenizer)
                .map_err(CliError::usage),
        }
    }

    /// The checksum of the tokenizer's files, if a tokenizer made the tokens.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn tokenizer_checksum(&self) -> Result<Option<u64>, CliError> {
        match &self.source.tokenizer {
            Some(tokenizer) if !self.in_order() => {
                let checksum = tokenizer_checksum(tokenizer).map_err(CliError::usage)?;
                Ok(Some(checksum))
            }
            _ => Ok(None),
        }
    }
}

/// Checks that `--data` and `--tokenizer` exist and go together.
fn check_paths(args: &TrainArgs) -> Result<(), CliError> {
    let has_tokens = |path: &Option<PathBuf>| match path {
        Some(path) => has_tokens(path).map(Some).map_err(CliError::usage),
        None => Ok(None),
    };
    let is_tokens =
        has_tokens(&args.data)? == Some(true) && has_tokens(&args.val_data)? != Some(false);
    if let Some(tokenizer) = args.tokenizer.as_ref().filter(|_| is_tokens) {
        return Err(usage!(
            "--tokenizer {}: --data is a file of tokens, which needs none; remove --tokenizer",
            tokenizer.display()
        ));
    }

    for (flag, path) in [("--data", &args.data), ("--tokenizer", &args.tokenizer)] {
        if let Some(path) = path.as_ref().filter(|path| !path.exists()) {
            return Err(usage!("{flag} {}: no such file or folder", path.display()));
        }
    }

    Ok(())
}

/// The data of the run: that of the flag, of the resumed run, or the text in the current folder.
/// `kept` is the folder with the files of the resumed model.
fn data_source(
    args: &TrainArgs,
    recorded: Option<&RunRecord>,
    folder: Option<&HfFolder>,
    kept: Option<&Path>,
) -> Result<DataSource, CliError> {
    check_paths(args)?;
    let own = folder.map_or(Ok(None), HfFolder::tokenizer);
    let own = own.map_err(CliError::usage)?;
    let tokenizer = args.tokenizer.clone().or(own);

    let source = |path, tokenizer, files| DataSource {
        path,
        tokenizer,
        files,
        token_cache: token_cache(args),
        threads: tokenizing_threads(args),
    };

    let Some(recorded) = recorded.map(|record| &record.data) else {
        return Ok(source(args.data.clone(), tokenizer, FolderFiles::All));
    };

    let path = match &args.data {
        Some(path) => Some(path.clone()),
        None if recorded.default && recorded.path == absolute(Path::new(".")) => None,
        None if Path::new(&recorded.path).exists() => Some(PathBuf::from(&recorded.path)),
        None => {
            return Err(usage!(
                "{}: the data of the resumed run does not exist; pass its new path with --data",
                recorded.path
            ));
        }
    };

    let of_kept = kept.map_or(Ok(None), tokenizer_of_kept);
    let of_kept = of_kept.map_err(CliError::usage)?;
    let needs_none = path.as_deref().map_or(Ok(false), has_tokens);
    let needs_none = needs_none.map_err(CliError::usage)?;
    let tokenizer = match (tokenizer.or(of_kept), &recorded.tokenizer) {
        (None, Some(recorded)) if !needs_none => {
            if !Path::new(recorded).exists() {
                return Err(usage!(
                    "{recorded}: the tokenizer of the resumed run does not exist; pass its new path with --tokenizer"
                ));
            }
            Some(PathBuf::from(recorded))
        }
        (tokenizer, _) => tokenizer,
    };

    let files = match recorded.default && args.data.is_none() {
        true => FolderFiles::AsDefault,
        false => FolderFiles::All,
    };
    Ok(source(path, tokenizer, files))
}

/// Where tokens are kept for later runs.
fn token_cache(args: &TrainArgs) -> Option<PathBuf> {
    if args.no_token_cache {
        return None;
    }
    default_token_cache()
}

/// Those of all ranks together, which do not compute yet; `None` for one for each core.
fn tokenizing_threads(args: &TrainArgs) -> Option<usize> {
    let threads = args.threads?.saturating_mul(args.ranks.unwrap_or(1));
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    Some(threads.min(cores))
}
