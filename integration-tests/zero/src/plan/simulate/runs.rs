//! Calibration on files of `zero train --metrics`, and predictions of their runs.

use std::path::{Path, PathBuf};

use zero_ckpt::files;
use zero_shard::{Sharding, ZeroStage};
use zero_simulator::{Cluster, Efficiencies, fit};

use super::cluster;
use super::prepared::Prepared;
use super::result::Calibration;
use crate::error::CliError;
use crate::output::{print_note, print_text};
use crate::plan::args::SimulateArgs;
use crate::plan::request::PlanRequest;
use crate::plan::stage::layout;
use crate::settings::record::TimedRecord;
use crate::train::metrics_file::measured_steps;

/// Steps of a run that do not count: the first ones allocate memory and fill caches.
const WARM_UP: usize = 3;

/// A run that was measured.
struct MeasuredRun {
    /// Its model, ranks, stage and batch.
    name: String,
    prepared: Prepared,
    /// The median of its steps.
    step_s: f64,
}

impl MeasuredRun {
    fn new(cluster: &Cluster, settings: &TimedRecord, step_s: f64) -> Result<Self, String> {
        let TimedRecord {
            record,
            threads,
            node_ranks,
        } = settings;
        let node_ranks = node_ranks.unwrap_or(cluster.gpus_per_node);
        let request =
            PlanRequest::of_record(record, node_ranks).map_err(|error| error.to_string())?;
        let stage = ZeroStage::from_number(record.stage).ok_or("no such stage")?;
        let layout = layout(&request, Sharding::Flat).map_err(|error| error.to_string())?;
        let largest = request.largest_trained(layout.parts());
        let prepared = Prepared::new(&cluster.machine, &request, stage, largest, Some(*threads))?;
        let batch = &record.batch;
        let mut name = format!(
            "{} ranks {} stage {} batch {}x{}x{}",
            short(&record.model.name),
            batch.ranks,
            record.stage,
            batch.grad_accum,
            batch.micro_batch,
            batch.seq_len
        );
        if record.activations.activation_checkpointing {
            name += " checkpointing";
        }
        if record.offload.is_any() {
            name += " offload";
        }
        Ok(Self {
            name,
            prepared,
            step_s,
        })
    }

    fn tokens_per_s_gpu(&self) -> f64 {
        self.prepared.tokens_per_s_gpu(self.step_s)
    }

    fn predicted(&self, efficiencies: &Efficiencies) -> f64 {
        let seconds = self.prepared.step(efficiencies).seconds;
        self.prepared.tokens_per_s_gpu(seconds)
    }
}

/// The last part of a path.
fn short(name: &str) -> &str {
    let end = Path::new(name).file_name().and_then(|name| name.to_str());
    end.unwrap_or(name)
}

/// The machine of `--hardware`.
fn hardware(args: &SimulateArgs) -> Result<Cluster, CliError> {
    match &args.hardware {
        Some(hardware) => cluster(hardware),
        None => Err(usage!(
            "--calibrate with metrics needs --hardware: the machine that they are of"
        )),
    }
}

/// Longest file of metrics or of a trace.
pub(super) const METRICS_BYTES: u64 = 1 << 30;

/// The runs of some files.
fn read(flag: &str, paths: &[PathBuf], cluster: &Cluster) -> Result<Vec<MeasuredRun>, CliError> {
    let mut runs = Vec::new();
    for path in paths {
        let error = |what: &dyn std::fmt::Display| usage!("{flag} {}: {what}", path.display());
        let text = files::read_text(path, METRICS_BYTES).map_err(|e| error(&e))?;
        let before = runs.len();
        for run in measured_steps(&text).map_err(|e| error(&e))? {
            let mut seconds = run.step_s;
            if seconds.len() <= WARM_UP {
                continue;
            }
            seconds.drain(..WARM_UP);
            seconds.sort_by(f64::total_cmp);
            let median = seconds[seconds.len() / 2];
            let run = MeasuredRun::new(cluster, &run.settings, median).map_err(|e| error(&e))?;
            runs.push(run);
        }
        if runs.len() == before {
            print_note(error(&format_args!(
                "skipped: no run with its settings and more than {WARM_UP} steps (a file of an older zero train has no settings)"
            )));
        }
    }
    match runs.is_empty() {
        false => Ok(runs),
        true => Err(usage!("{flag}: no file has a run that counts")),
    }
}

fn fitted(runs: &[MeasuredRun], cluster: &Cluster) -> Result<Calibration, CliError> {
    let measured: Vec<f64> = runs.iter().map(MeasuredRun::tokens_per_s_gpu).collect();
    let prior = Efficiencies::prior(&cluster.machine);
    let fit = fit(&prior, &measured, |efficiencies, run| {
        runs[run].predicted(efficiencies)
    })
    .map_err(CliError::usage)?;
    Ok(Calibration {
        source: format!("{} runs on {}", runs.len(), cluster.machine.name),
        residuals: fit.residuals,
        efficiencies: fit.efficiencies,
    })
}

fn calibrated(args: &SimulateArgs) -> Result<(Cluster, Vec<MeasuredRun>, Calibration), CliError> {
    let cluster = hardware(args)?;
    let runs = read("--calibrate", &args.calibrate, &cluster)?;
    let calibration = fitted(&runs, &cluster)?;
    if let Some(path) = &args.save_efficiencies {
        calibration.write(path)?;
    }
    Ok((cluster, runs, calibration))
}

/// The efficiencies of the runs of `--calibrate`.
pub(super) fn calibration(args: &SimulateArgs) -> Result<Calibration, CliError> {
    calibrated(args).map(|(.., calibration)| calibration)
}

/// Prints the runs of `--calibrate` and what is fitted to them.
pub(super) fn show(args: &SimulateArgs) -> Result<(), CliError> {
    let (_, runs, calibration) = calibrated(args)?;
    print_text(table(&runs, &calibration) + &summary(&calibration))
}

/// Prints the runs of `--predict` and their errors.
pub(super) fn predict(args: &SimulateArgs) -> Result<(), CliError> {
    let (cluster, _, calibration) = calibrated(args)?;
    let runs = read("--predict", &args.predict, &cluster)?;
    let mut errors: Vec<(f64, &str)> = runs
        .iter()
        .map(|run| {
            let ratio = run.predicted(&calibration.efficiencies) / run.tokens_per_s_gpu();
            (100.0 * (ratio - 1.0), run.name.as_str())
        })
        .collect();
    errors.sort_by(|a, b| a.0.abs().total_cmp(&b.0.abs()));
    let mean = errors.iter().map(|error| error.0.abs()).sum::<f64>() / errors.len() as f64;
    let mut text = table(&runs, &calibration) + &summary(&calibration);
    if let Some((worst, name)) = errors.last() {
        text += &format!(
            "{} runs: mean error {mean:.1}%, worst {worst:+.1}% ({name})\n",
            errors.len()
        );
    }
    print_text(text)
}

fn table(runs: &[MeasuredRun], calibration: &Calibration) -> String {
    let mut text = format!(
        "{:>12}  {:>12}  {:>6}  run\n",
        "measured ms", "predicted ms", "error"
    );
    for run in runs {
        let predicted = run.prepared.step(&calibration.efficiencies).seconds;
        text += &format!(
            "{:>12.1}  {:>12.1}  {:>+5.1}%  {}\n",
            1e3 * run.step_s,
            1e3 * predicted,
            100.0 * (predicted / run.step_s - 1.0),
            run.name
        );
    }
    text
}

fn summary(calibration: &Calibration) -> String {
    let Calibration {
        source,
        efficiencies,
        ..
    } = calibration;
    format!("calibrated on {source}: {efficiencies}\n")
}
