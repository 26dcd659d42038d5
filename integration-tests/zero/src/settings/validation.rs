//! The validation data of a run, and when and on how much of it the run evaluates.

use std::path::PathBuf;
use std::sync::Arc;

use indicatif::HumanCount;
use serde::{Deserialize, Serialize};

use super::args::TrainArgs;
use crate::error::CliError;
use crate::paths::absolute;
use zero_data::{DataError, DataSource, FolderFiles, RowOptions, TrainingData};
use zero_trainer::{ValidationData, ValidationOptions};

/// The validation of a run, as `run.json` stores it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ValidationRecord {
    /// The absolute path of the data; `None` for a part of the training data.
    data: Option<String>,
    /// The fraction of the training data that is validation data instead.
    split: Option<f64>,
    /// The CRC-64 of all validation tokens, in hexadecimal.
    fingerprint: String,
    /// Steps from one evaluation to the next; 0 evaluates only at the end.
    eval_every: u64,
    /// Tokens of an evaluation.
    eval_tokens: u64,
}

impl ValidationRecord {
    /// Sets the settings to the recorded values.
    pub(crate) fn fill(&self, settings: &mut TrainArgs) {
        settings.val_data = self.data.as_ref().map(PathBuf::from);
        settings.val_split = self.split;
        settings.eval_every = Some(self.eval_every);
        settings.eval_tokens = Some(self.eval_tokens);
    }
}

/// The batch of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchRows {
    /// Of all ranks in a step.
    pub(crate) step: u64,
    /// Of all ranks in a micro-batch.
    pub(crate) micro_batch: u64,
    /// Tokens of a row.
    pub(crate) seq_len: usize,
}

/// Opens the training data and the validation data.
///
/// # Errors
/// Flags that contradict each other, or data that cannot be read.
pub(crate) fn open(
    args: &TrainArgs,
    source: &DataSource,
    rows: &RowOptions,
) -> Result<(TrainingData, Option<Arc<TrainingData>>), CliError> {
    let usage = |text: &str| Err(CliError::Usage(text.to_owned()));
    let (training, validation) = match (&args.val_data, args.val_split) {
        (Some(_), Some(_)) => return usage("--val-data and --val-split: pass only one of them"),
        (None, Some(split)) if !(split > 0.0 && split < 1.0) => {
            return usage(&format!(
                "--val-split {split}: expected a fraction between 0 and 1, such as 0.1"
            ));
        }
        (None, None) if args.eval_every.is_some() || args.eval_tokens.is_some() => {
            return usage(
                "--eval-every and --eval-tokens need validation data: pass --val-data FILE or --val-split 0.1",
            );
        }
        (None, None) => {
            return Ok((
                TrainingData::open(source, rows).map_err(CliError::usage)?,
                None,
            ));
        }
        (None, Some(split)) => {
            TrainingData::open_split(source, rows, split).map_err(CliError::usage)?
        }
        (Some(path), None) => {
            let other = DataSource {
                path: Some(path.clone()),
                files: FolderFiles::All,
                ..source.clone()
            };
            let training = TrainingData::open(source, rows).map_err(CliError::usage)?;
            let rows = rows.for_validation();
            let validation = TrainingData::open(&other, &rows)
                .map_err(|e| usage!("--val-data {}: {e}", path.display()))?;
            (training, validation)
        }
    };

    Ok((training, Some(Arc::new(validation))))
}

/// Checks that training and validation data fit a model of `vocab_size` tokens and rows of
/// `seq_len` tokens.
pub(crate) fn check_data(
    args: &TrainArgs,
    training: &TrainingData,
    validation: Option<&Arc<TrainingData>>,
    vocab_size: usize,
    seq_len: usize,
) -> Result<(), CliError> {
    let check = |data: &TrainingData, remedy: &str| match data.validate(vocab_size, seq_len) {
        Err(error @ DataError::TooShort { .. }) if validation.is_some() => {
            Err(usage!("{error}; pass {remedy}"))
        }
        other => other.map_err(CliError::usage),
    };
    let (less, more) = match args.val_split {
        Some(_) => (
            "a smaller --val-split",
            "a larger --val-split, or other data with --val-data",
        ),
        None => ("longer --data", "longer --val-data"),
    };
    check(training, less)?;
    validation.map_or(Ok(()), |data| check(data, more))
}

/// The settings of the evaluations of a run of `steps` steps.
///
/// # Errors
/// `--eval-tokens` is less than a row.
pub(crate) fn options(
    args: &TrainArgs,
    data: Option<Arc<TrainingData>>,
    rows: BatchRows,
    steps: u64,
) -> Result<Option<(ValidationOptions, ValidationRecord)>, CliError> {
    let Some(data) = data else { return Ok(None) };
    let every = args.eval_every.unwrap_or_else(|| steps.div_ceil(10).max(1));
    let seq_len = rows.seq_len as u64;
    let limit = match args.eval_tokens {
        Some(tokens) if tokens < seq_len => {
            return Err(usage!(
                "--eval-tokens {tokens}: expected at least one sequence of --seq-len {seq_len}"
            ));
        }
        Some(tokens) => tokens / seq_len,
        None => default_windows(if every == 0 { steps } else { every }, rows),
    };

    let windows = limit.min(data.windows(rows.seq_len));
    let record = ValidationRecord {
        data: args.val_data.as_deref().map(absolute),
        split: args.val_split,
        fingerprint: format!("{:016x}", data.fingerprint()),
        eval_every: every,
        eval_tokens: windows * seq_len,
    };

    Ok(Some((
        ValidationOptions {
            data,
            every,
            windows,
        },
        record,
    )))
}

/// As many windows as cost a tenth of `steps` steps: a forward is about a third of a step. Whole
/// micro-batches of all ranks, at least one.
fn default_windows(steps: u64, rows: BatchRows) -> u64 {
    let trained = u128::from(steps) * u128::from(rows.step);
    let micro_batches = (trained * 3 / 10 / u128::from(rows.micro_batch)).max(1);
    u64::try_from(micro_batches * u128::from(rows.micro_batch)).unwrap_or(u64::MAX)
}

/// The settings as text.
pub(crate) fn describe(options: &ValidationOptions, seq_len: usize) -> String {
    let when = match options.every {
        0 => "at the end".to_owned(),
        1 => "every step".to_owned(),
        every => format!("every {every} steps and at the end"),
    };
    format!(
        "{}; {} of them {when}",
        options.data.describe(),
        HumanCount(options.windows * seq_len as u64)
    )
}

/// Notes about files that are left out, and a note if the validation data is the training data.
pub(crate) fn notices(
    training: &TrainingData,
    validation: Option<&Arc<TrainingData>>,
) -> Vec<String> {
    let mut notices = training.notices().to_vec();
    let Some(validation) = validation else {
        return notices;
    };
    // Those of a part of the training data are the same.
    notices.extend(
        validation
            .notices()
            .iter()
            .filter(|notice| !training.notices().contains(notice))
            .cloned(),
    );
    if validation.fingerprint() == training.fingerprint() {
        notices.push(
            "the validation data is the training data: its loss does not show overfitting"
                .to_owned(),
        );
    }
    notices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_costs_a_tenth_of_the_steps() {
        let rows = BatchRows {
            step: 16,
            micro_batch: 8,
            seq_len: 32,
        };
        assert_eq!(default_windows(100, rows), 480);
        // Whole micro-batches, at least one.
        assert_eq!(default_windows(3, rows), 8);
        assert_eq!(default_windows(0, rows), 8);
        assert_eq!(default_windows(u64::MAX, rows), u64::MAX);
    }
}
