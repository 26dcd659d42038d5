//! The files and folders of figures that a run writes besides its checkpoints.

use std::path::PathBuf;

use super::args::TrainArgs;
use super::record::RunRecord;
use crate::config::{DsConfig, MonitorFolder};

/// The table that `csv_monitor` of a configuration writes in its folder.
const CSV_TABLE: &str = "steps.csv";

/// An output of a run besides checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// One JSON object a step.
    Metrics,
    /// One row a step.
    Csv,
    /// Event files.
    Tensorboard,
    /// Pictures and tables.
    Report,
}

impl Output {
    pub(crate) const ALL: [Self; 4] = [Self::Metrics, Self::Csv, Self::Tensorboard, Self::Report];

    /// The name and the flag.
    pub(crate) fn name(self) -> (&'static str, &'static str) {
        match self {
            Self::Metrics => ("metrics", "--metrics"),
            Self::Csv => ("csv", "--csv"),
            Self::Tensorboard => ("tensorboard", "--tensorboard"),
            Self::Report => ("report", "--report"),
        }
    }

    /// The path in a record.
    pub(crate) fn path(self, record: &RunRecord) -> Option<&str> {
        let path = match self {
            Self::Metrics => &record.metrics,
            Self::Csv => &record.csv,
            Self::Tensorboard => &record.tensorboard,
            Self::Report => &record.report,
        };
        path.as_deref()
    }

    /// The path in the flags.
    pub(crate) fn of_args(self, args: &mut TrainArgs) -> &mut Option<PathBuf> {
        match self {
            Self::Metrics => &mut args.metrics,
            Self::Csv => &mut args.csv,
            Self::Tensorboard => &mut args.tensorboard,
            Self::Report => &mut args.report,
        }
    }
}

/// The flags with the outputs of the configuration file, which a flag overrides, and which override
/// those of a resumed run.
pub(crate) fn with_file(args: &TrainArgs, file: Option<&DsConfig>) -> TrainArgs {
    let mut args = args.clone();
    let monitors = file.map(|file| file.monitors.clone()).unwrap_or_default();
    let folder = |folder: &MonitorFolder| folder.output_path.join(&folder.job_name);
    let requested = [
        (
            Output::Tensorboard,
            monitors.tensorboard.as_ref().map(folder),
        ),
        (
            Output::Csv,
            monitors.csv.as_ref().map(|csv| folder(csv).join(CSV_TABLE)),
        ),
    ];

    for (output, path) in requested {
        let Some(path) = path else { continue };
        let is_recorded = args.recorded_outputs.contains(&output);
        let of_args = output.of_args(&mut args);
        if of_args.is_none() || is_recorded {
            *of_args = Some(path);
            args.recorded_outputs.retain(|recorded| *recorded != output);
        }
    }

    args
}
