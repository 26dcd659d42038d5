//! The files and folders of figures that a run writes besides its checkpoints.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::paths::absolute;
use zero_config::{DsConfig, MonitorFolder};

/// The table that `csv_monitor` of a configuration writes in its folder.
const CSV_TABLE: &str = "steps.csv";

/// The paths of a run's outputs: flags, and `run.json`, which has absolute paths of one machine.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputPaths {
    /// Write one JSON object per step, with nested figures also under flat keys such as
    /// memory.peak_bytes; a resumed run appends to its file, without this flag as well unless the
    /// folder of checkpoints is a copy, and moves lines of later steps to FILE.jsonl.after-step-N
    #[arg(long, value_name = "FILE.jsonl")]
    pub metrics: Option<PathBuf>,
    /// Write event files for TensorBoard here: loss, validation loss, learning rate, gradient norm,
    /// loss scale, speed, memory. A resumed run goes on in the folder, as with --metrics
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensorboard: Option<PathBuf>,
    /// Write a table with one row per step; its columns have the names of --metrics. A resumed run
    /// goes on in the file, as with --metrics
    #[arg(long, value_name = "FILE.csv")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub csv: Option<PathBuf>,
    /// Write the final table, all figures as JSON, pictures of the loss and of rank 0's memory over
    /// its last step, and a timeline of that step here; a resumed run goes on, and draws the whole
    /// run from its metrics
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<PathBuf>,
    /// Those that the run that `--resume` continues has written, and no flag names; no flag.
    #[arg(skip)]
    #[serde(skip)]
    pub recorded: Vec<Output>,
}

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
}

impl OutputPaths {
    pub(crate) fn path(&self, output: Output) -> Option<&Path> {
        let path = match output {
            Output::Metrics => &self.metrics,
            Output::Csv => &self.csv,
            Output::Tensorboard => &self.tensorboard,
            Output::Report => &self.report,
        };
        path.as_deref()
    }

    fn set(&mut self, output: Output, path: PathBuf) {
        let own = match output {
            Output::Metrics => &mut self.metrics,
            Output::Csv => &mut self.csv,
            Output::Tensorboard => &mut self.tensorboard,
            Output::Report => &mut self.report,
        };
        *own = Some(path);
    }

    /// Sets an output that the resumed run has written, where no flag names it.
    pub(crate) fn continue_recorded(&mut self, output: Output, path: &Path) {
        self.set(output, path.to_owned());
        self.recorded.push(output);
    }

    /// These outputs for `run.json`.
    pub(crate) fn absolute(&self) -> Self {
        let mut paths = Self::default();
        for output in Output::ALL {
            if let Some(path) = self.path(output) {
                paths.set(output, absolute(path).into());
            }
        }
        paths
    }

    /// These outputs with those of the configuration file, which a flag overrides, and which
    /// override those of a resumed run.
    pub(crate) fn with_file(mut self, file: &DsConfig) -> Self {
        let folder = |folder: &MonitorFolder| folder.output_path.join(&folder.job_name);
        let csv = file.monitors.csv.as_ref().map(folder);
        let requested = [
            (
                Output::Tensorboard,
                file.monitors.tensorboard.as_ref().map(folder),
            ),
            (Output::Csv, csv.map(|folder| folder.join(CSV_TABLE))),
        ];

        for (output, path) in requested {
            let is_flag = self.path(output).is_some() && !self.recorded.contains(&output);
            if let Some(path) = path.filter(|_| !is_flag) {
                self.set(output, path);
                self.recorded.retain(|recorded| *recorded != output);
            }
        }
        self
    }
}
