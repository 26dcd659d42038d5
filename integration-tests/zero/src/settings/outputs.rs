//! The files and folders of figures that a run writes besides its checkpoints.

use super::args::{Output, TrainArgs};
use crate::config::{DsConfig, MonitorFolder};

/// The table that `csv_monitor` of a configuration writes in its folder.
const CSV_TABLE: &str = "steps.csv";

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
