//! Epochs and packing.

use std::path::{Path, PathBuf};

use zero_data::{DataPosition, EncoderSource, Pace, RowOptions, TrainingData};

use super::record::RowsRecord;
use super::sources::RunSources;
use crate::error::CliError;
use crate::paths::absolute;

/// The default of the Trainer of transformers.
const DEFAULT_EPOCHS: f64 = 3.0;

/// How data becomes rows of `seq_len` tokens, with the model's `folder`.
pub(crate) fn row_options(
    from: &RunSources<'_>,
    seq_len: usize,
    tokenizer: Option<PathBuf>,
    folder: Option<&Path>,
) -> RowOptions {
    let recorded = from.recorded.and_then(|run| run.data.rows.as_ref());
    let now = EncoderSource::now().now;
    let recorded_folder = recorded.and_then(|rows| rows.folder.as_ref());
    let pack = from.sources().all.pack.unwrap_or(false);
    let by_epochs = from.args.epochs.is_some() || recorded.is_some();
    RowOptions {
        seq_len,
        pack,
        by_epochs,
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

/// How a run goes through its data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Course {
    pub(crate) pace: Pace,
    /// Where its steps begin.
    pub(crate) from: DataPosition,
    /// The course of the run that is resumed, if it is another one.
    earlier: Option<(Pace, DataPosition)>,
}

impl Course {
    /// The course of a run with steps of `rows_of_step` rows of `seq_len` tokens: that of the run
    /// that it resumes if both have equal sizes, else one that begins at the resumed step.
    pub(crate) fn new(
        from: &RunSources<'_>,
        data: &TrainingData,
        rows_of_step: u64,
        seq_len: usize,
    ) -> Self {
        let pace = data.pace(rows_of_step);
        let course = |from, earlier| Self {
            pace,
            from,
            earlier,
        };
        let (Some(run), Some(saved)) = (from.recorded, from.saved) else {
            return course(DataPosition::default(), None);
        };

        let count = run.data.rows.as_ref().map(|rows| rows.count);
        let earlier = Pace::new(run.batch.rows_of_step(), count);
        let place = run.data.place;
        let has_same_rows = count.is_some() || run.batch.seq_len == seq_len;
        if earlier == pace && has_same_rows {
            return course(place, None);
        }
        let mut rows = earlier.rows_before(place, saved.step);
        if !has_same_rows {
            let tokens = u128::from(rows) * run.batch.seq_len as u128;
            rows = (tokens / seq_len.max(1) as u128) as u64;
        }
        let from = DataPosition {
            step: saved.step,
            rows: pace.as_far_as(earlier, rows),
        };
        course(from, Some((earlier, place)))
    }

    /// The last step of a run that ends where that of `steps` steps of the resumed run does.
    fn last_step(&self, steps: u64) -> u64 {
        match self.earlier {
            None => steps,
            Some((earlier, place)) => {
                let end = earlier.rows_before(place, steps);
                let end = self.pace.as_far_as(earlier, end);
                self.pace.step_behind(self.from, end)
            }
        }
    }

    /// A note about a course that changes, of a run that ends after `steps`.
    pub(crate) fn notice(&self, steps: u64) -> Option<String> {
        let (earlier, _) = self.earlier?;
        Some(format!(
            "a step has {} rows, the checkpoint's had {}: the data goes on behind the {} rows that were trained, and the run ends at \
             step {steps}; schedules, evaluations and saves go on counting steps",
            self.pace.rows_of_step(),
            earlier.rows_of_step(),
            self.from.rows,
        ))
    }
}

/// The epochs of the run, and its last step; `None` if the steps are set otherwise.
///
/// # Errors
/// A number of epochs that no run can have.
pub(crate) fn steps(
    from: &RunSources<'_>,
    data: &TrainingData,
    course: &Course,
) -> Result<Option<(f64, u64)>, CliError> {
    let usage = |text: String| Err(CliError::Usage(text));
    let epochs = match (from.args.steps, from.args.epochs) {
        (Some(_), Some(_)) => {
            return usage(
                "--steps and --epochs both set the end of the run: pass only one of them"
                    .to_owned(),
            );
        }
        (Some(_), None) => None,
        (None, None) if from.recorded.is_none() && data.example_rows().is_some() => {
            Some(DEFAULT_EPOCHS)
        }
        (None, _) => from.sources().all.epochs,
    };
    let Some((epochs, of_epoch)) = epochs.zip(course.pace.steps_of_epoch()) else {
        return Ok(None);
    };
    if let (None, Some(run)) = (from.args.epochs, from.recorded) {
        return Ok(Some((epochs, course.last_step(run.steps))));
    }
    let steps = (epochs * of_epoch as f64).ceil();
    if !(epochs > 0.0 && steps < 1e15) {
        return usage(format!(
            "--epochs {epochs}: expected a number above 0, such as 3 or 0.5"
        ));
    }
    let end = course
        .pace
        .rows_before(DataPosition::default(), steps as u64);
    Ok(Some((epochs, course.pace.step_behind(course.from, end))))
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
