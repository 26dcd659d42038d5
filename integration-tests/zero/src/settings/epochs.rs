//! Epochs and packing.

use std::path::{Path, PathBuf};

use super::record::{DataRecord, RowsRecord};
use super::resolve::RunSources;
use super::row::{Row, Setting};
use crate::data::TrainingData;
use crate::data::examples::{EncoderSource, RowOptions};
use crate::error::CliError;
use crate::files::absolute;

/// By default [`DEFAULT_EPOCHS`] of examples if no flag sets the steps.
const EPOCHS: Setting<Option<f64>, DataRecord> = Setting {
    of_flags: |args| args.epochs.map(Some),
    of_run: |data| Some(data.epochs),
    ..Setting::new(Row::new("data.epochs", "--epochs"), || None)
};

const PACK: Setting<bool, DataRecord> = Setting {
    of_flags: |args| args.pack,
    of_run: |data| data.rows.as_ref().map(|rows| rows.packed),
    ..Setting::new(Row::new("data.rows.packed", "--pack"), || false)
};

pub(crate) const ROWS: &[Row] = &[
    EPOCHS.row,
    PACK.row,
    Row::new("data.rows.folder", "")
        .not_compared()
        .not_reported(),
    Row::new("data.rows.now", "").not_compared().not_reported(),
    Row::new("data.rows", "--data"),
];

/// The default of the Trainer of transformers.
const DEFAULT_EPOCHS: f64 = 3.0;

/// How data becomes rows of `seq_len` tokens, with the model's `folder`.
pub(crate) fn row_options(
    from: &RunSources<'_>,
    seq_len: usize,
    tokenizer: Option<PathBuf>,
    folder: Option<&Path>,
) -> RowOptions {
    let sources = from.without_sizes().part(|run| &run.data);
    let recorded = from.recorded.and_then(|run| run.data.rows.as_ref());
    let now = EncoderSource::now().now;
    let recorded_folder = recorded.and_then(|rows| rows.folder.as_ref());
    let pack = sources.value(&PACK);
    let by_epochs = from.args.epochs.is_some() || recorded.is_some();
    RowOptions {
        seq_len,
        pack,
        by_epochs,
        text: pack || by_epochs,
        encoder: EncoderSource {
            tokenizer,
            folder: folder
                .map(Path::to_owned)
                .or(recorded_folder.map(PathBuf::from)),
            end: recorded.and_then(|rows| rows.end_token),
            now: recorded.map_or(now, |rows| rows.now),
        },
    }
}

/// The epochs of the run, and its steps, of `rows_of_step` rows each; `None` if the steps are set
/// otherwise.
///
/// # Errors
/// A number of epochs that no run can have.
pub(crate) fn steps(
    from: &RunSources<'_>,
    data: &TrainingData,
    rows_of_step: u64,
) -> Result<Option<(f64, u64)>, CliError> {
    let usage = |text: String| Err(CliError::Usage(text));
    let sources = from.without_sizes().part(|run| &run.data);
    let epochs = match (from.args.steps, from.args.epochs) {
        (Some(_), Some(_)) => {
            return usage(
                "--steps and --epochs both set the end of the run: pass only one of them"
                    .to_owned(),
            );
        }
        (Some(_), None) => None,
        (None, None) if from.recorded.is_none() && data.is_examples() => Some(DEFAULT_EPOCHS),
        (None, _) => sources.value(&EPOCHS),
    };
    let Some((epochs, of_epoch)) = epochs.zip(data.epoch_steps(rows_of_step)) else {
        return Ok(None);
    };
    let steps = (epochs * of_epoch as f64).ceil();
    if !(epochs > 0.0 && steps < 1e15) {
        return usage(format!(
            "--epochs {epochs}: expected a number above 0, such as 3 or 0.5"
        ));
    }
    Ok(Some((epochs, steps as u64)))
}

/// The record of rows by epochs.
pub(crate) fn record(data: &TrainingData, options: &RowOptions) -> Option<RowsRecord> {
    let (count, trained) = data.epoch()?;
    Some(RowsRecord {
        packed: data.has_documents(),
        count,
        trained,
        end_token: data.end_token(),
        folder: options.encoder.folder.as_deref().map(absolute),
        now: options.encoder.now,
    })
}
