//! `zero tune --data`: the best simulated configurations, measured on this machine.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::args::WARM_UP;
use super::child::ChildRun;
use super::measured_tune::{MeasuredChoice, MeasuredTune};
use super::merge::merged;
use super::outcome::{Outcome, TrialSteps};
use super::place::TrialMachine;
use super::trials::{ResultsFolder, Trial, TrialSetup};
use super::{BatchTokens, Choice, TuneArgs, Tuned, measured_table, search_most};
use crate::error::CliError;
use crate::flags::DTypeFlag;
use crate::output::{counted, print_note, print_text, progress_bar};
use crate::paths::absolute;
use crate::settings::args::DeviceChoice;
use crate::train::signals;

pub(super) const TRIALS: usize = 5;
const STEPS: u64 = 10;
pub(super) const MINUTES: u64 = 10;
const OUT: &str = "tune-results";

/// The order of configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Metric {
    /// The most tokens per second.
    Throughput,
    /// The shortest step.
    Latency,
}

/// The rows of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepRows {
    OfAll(u64),
    OfRank(u64),
}

/// The trials to run.
pub(super) struct Measurement {
    /// The search; without hardware it is this machine.
    pub(super) search: TuneArgs,
    /// In place of the tokens of the search.
    pub(super) rows: Option<StepRows>,
    pub(super) data: PathBuf,
    pub(super) device: DeviceChoice,
    pub(super) ranks: Option<usize>,
    pub(super) trials: usize,
    pub(super) steps: TrialSteps,
    pub(super) minutes: u64,
    pub(super) out: PathBuf,
    pub(super) metric: Metric,
    /// More flags of `zero train`.
    pub(super) flags: Vec<String>,
    /// The user's DeepSpeed configuration, if trials have one and not the flags of their choice.
    pub(super) config: Option<Value>,
}

/// Runs `zero tune --data`.
///
/// # Errors
/// As [`measure`].
pub(super) fn run(args: &TuneArgs, data: &Path) -> Result<(), CliError> {
    let flags = &args.measured;
    let tokenizer = flags.tokenizer.as_deref().map(absolute);
    let measurement = Measurement {
        search: args.clone(),
        rows: None,
        data: data.to_owned(),
        device: flags.device.unwrap_or_default(),
        ranks: flags.ranks,
        trials: flags.trials.unwrap_or(TRIALS),
        steps: TrialSteps {
            warm_up: WARM_UP,
            total: flags.trial_steps.unwrap_or(STEPS),
        },
        minutes: flags.trial_minutes.unwrap_or(MINUTES),
        out: flags.out.clone().unwrap_or_else(|| OUT.into()),
        metric: Metric::Throughput,
        flags: tokenizer.map_or(Vec::new(), |path| vec!["--tokenizer".to_owned(), path]),
        config: None,
    };
    let tune = measure(&measurement)?;
    match args.json {
        true => print_text(serde_json::to_string_pretty(&tune).map_err(CliError::failure)? + "\n"),
        false => print_text(measured_table::text(&tune)),
    }
}

/// Searches, and measures the best.
///
/// # Errors
/// A model, data, a machine or a folder that cannot be used, a signal, or all trials failed.
pub(super) fn measure(of: &Measurement) -> Result<MeasuredTune, CliError> {
    if !of.data.exists() {
        return Err(usage!(
            "--data {}: no such file or folder",
            of.data.display()
        ));
    }
    let mut folder = ResultsFolder::open(&of.out)?;
    let hardware = of.search.hardware.as_deref();
    let place = TrialMachine::choose(of.device, of.ranks, hardware, &folder)?;
    let tuned = search(of, &place)?;
    let planned: Vec<Planned> = tuned
        .best
        .iter()
        .map(|choice| Planned::new(of, &place, &tuned, choice))
        .collect();
    let trials = run_all(of, &planned, &mut folder)?;

    let results = planned.iter().zip(trials);
    let results = results.map(|(plan, (trial, earlier))| result(&folder, plan, trial, earlier));
    let mut choices: Vec<_> = results.collect();
    rank(&mut choices, of.metric);
    if choices.iter().all(|choice| choice.rank.is_none()) {
        return Err(CliError::Failure(all_failed(&choices, &of.out)));
    }
    let errors = choices.iter().filter_map(|choice| choice.error_percent);
    let worst = errors.clone().max_by(|a, b| a.abs().total_cmp(&b.abs()));
    let mean = errors.clone().map(f64::abs).sum::<f64>() / errors.count() as f64;

    Ok(MeasuredTune {
        model: of.search.model.clone(),
        data: of.data.display().to_string(),
        machine: place.machine,
        ranks: place.ranks,
        steps: of.steps.total,
        counted_steps: of.steps.total - of.steps.warm_up,
        out: of.out.clone(),
        trials: choices,
        mean_error_percent: mean,
        worst_error_percent: worst.unwrap_or(0.0),
        search: tuned,
    })
}

/// The configurations to measure.
fn search(of: &Measurement, place: &TrialMachine) -> Result<Tuned, CliError> {
    if !place.on_host && of.search.dtype == Some(DTypeFlag::Fp32) {
        return Err(usage!(
            "steps in fp32 on GPUs cannot be simulated: tune with --dtype bf16 or fp16 (in a DeepSpeed configuration, \
             enable bf16 or fp16)"
        ));
    }
    let rows = of.rows.map(|rows| match rows {
        StepRows::OfAll(rows) => rows,
        StepRows::OfRank(rows) => rows.saturating_mul(place.ranks as u64),
    });
    let seq_len = of.search.seq_len.unwrap_or(1);
    let batch_tokens = rows.map(|rows| rows.saturating_mul(seq_len));
    let args = TuneArgs {
        hardware: Some(place.hardware.clone()),
        batch_tokens: batch_tokens
            .map(BatchTokens::exactly)
            .or(of.search.batch_tokens),
        ..of.search.clone()
    };
    search_most(&args, of.trials).map_err(|error| match rows {
        Some(rows) => usage!("a batch of {rows} sequences: {error}"),
        None => error,
    })
}

/// A trial to run.
struct Planned<'a> {
    choice: &'a Choice,
    /// Without those of the trial.
    train_flags: Vec<String>,
    /// Whether the choice itself needs a configuration file, for what has no flag.
    needs_config: bool,
    setup: TrialSetup,
}

impl<'a> Planned<'a> {
    fn new(of: &Measurement, place: &TrialMachine, tuned: &Tuned, choice: &'a Choice) -> Self {
        let words = |flags: &[String]| -> Vec<String> {
            let words = flags.iter().flat_map(|flag| flag.split_whitespace());
            words.map(str::to_owned).collect()
        };
        let device = match place.on_host {
            true => "cpu",
            false => "cuda",
        };
        let fixed = [
            format!("--device {device}"),
            format!("--ranks {}", place.ranks),
            format!("--seq-len {}", tuned.seq_len),
            format!("--dtype {}", tuned.dtype),
        ];
        let mut train_flags = words(&fixed);
        let of_user = of.config.as_ref().map(|user| merged(user, choice));
        let needs_config = of_user.is_none() && choice.candidate.prefetch_elems.is_some();
        let config = match needs_config {
            true => Some(choice.deepspeed.clone()),
            false => of_user,
        };
        if of.config.is_none() {
            let flags = choice.flags.iter();
            // The file of the trial is in the folder of results.
            let flags = flags.filter(|flag| !flag.starts_with("--config "));
            train_flags.extend(words(&flags.cloned().collect::<Vec<_>>()));
        }
        train_flags.extend(of.flags.iter().cloned());

        let mut flags = train_flags.clone();
        flags.extend(words(&[
            "--no-checkpoint".to_owned(),
            format!("--steps {}", of.steps.total),
        ]));
        let model = Path::new(&of.search.model);
        Self {
            choice,
            train_flags,
            needs_config,
            setup: TrialSetup {
                model: match model.is_dir() {
                    true => absolute(model),
                    false => of.search.model.clone(),
                },
                data: absolute(&of.data),
                machine: place.processors.clone(),
                flags,
                warm_up: of.steps.warm_up,
                config,
            },
        }
    }

    /// The arguments of `zero`, with these flags.
    fn args(&self, config: Option<&Path>, flags: &[String]) -> Vec<String> {
        let mut args = Vec::new();
        if let Some(config) = config {
            args.extend(["--config".to_owned(), config.display().to_string()]);
        }
        let TrialSetup { model, data, .. } = &self.setup;
        let pairs = [("--model", model), ("--data", data)];
        pairs
            .into_iter()
            .for_each(|(flag, value)| args.extend([flag.to_owned(), value.clone()]));
        args.extend(flags.iter().cloned());
        args
    }
}

/// The finished trials of `planned`, of which some are from an earlier tune.
fn run_all(
    of: &Measurement,
    planned: &[Planned<'_>],
    folder: &mut ResultsFolder,
) -> Result<Vec<(Trial, bool)>, CliError> {
    let mut received = signals::received()?;
    let bar = progress_bar(planned.len() as u64 * of.steps.total);
    let mut trials: Vec<(Trial, bool)> = Vec::new();
    for (index, plan) in planned.iter().enumerate() {
        let before = index as u64 * of.steps.total;
        let name = format!("trial {}/{}", index + 1, planned.len());
        let flags = plan.choice.flags.join(" ");
        if let Some(found) = folder.find(&plan.setup, of.minutes) {
            trials.push((found.clone(), true));
            continue;
        }
        if bar.is_hidden() {
            print_note(format_args!("{name}: {flags}"));
        }
        let mut seen = |step: u64| {
            bar.set_position(before + step);
            bar.set_message(format!("{name}  step {step}/{}  {flags}", of.steps.total));
            received.pending().next()
        };
        let outcome = run_one(of, plan, folder, &mut seen).inspect_err(|error| {
            bar.finish_and_clear();
            if matches!(error, CliError::Interrupted { .. }) {
                print_note(format_args!(
                    "interrupted: the finished trials are in {}, and the same command continues after them",
                    of.out.display()
                ));
            }
        })?;
        let trial = Trial {
            number: folder.next_number(),
            setup: plan.setup.clone(),
            outcome,
        };
        folder.add(trial.clone())?;
        trials.push((trial, false));
    }
    bar.finish_and_clear();
    Ok(trials)
}

fn run_one(
    of: &Measurement,
    plan: &Planned<'_>,
    folder: &ResultsFolder,
    seen: &mut dyn FnMut(u64) -> Option<i32>,
) -> Result<Outcome, CliError> {
    let number = folder.next_number();
    let config = plan.setup.config.as_ref().map(|config| {
        let path = folder.file(&format!("{number}.json"));
        write_config(&path, config).map(|()| path)
    });
    let config = config.transpose()?;
    let child = ChildRun {
        args: &plan.args(config.as_deref(), &plan.setup.flags),
        steps: of.steps,
        minutes: of.minutes,
        log: folder.file(&format!("{number}.log")),
        metrics: folder.file(&format!("{number}.jsonl")),
    };
    child.run(seen)
}

/// The text of a DeepSpeed configuration.
pub(super) fn document_text(config: &Value) -> Result<String, CliError> {
    Ok(serde_json::to_string_pretty(config).map_err(CliError::failure)? + "\n")
}

fn write_config(path: &Path, config: &Value) -> Result<(), CliError> {
    std::fs::write(path, document_text(config)?)
        .map_err(|error| failure!("failed to write {}: {error}", path.display()))
}

fn result(
    folder: &ResultsFolder,
    plan: &Planned<'_>,
    trial: Trial,
    earlier: bool,
) -> MeasuredChoice {
    let choice = plan.choice;
    let (measured_ms, peak_bytes) = match trial.outcome {
        Outcome::Measured {
            step_ms,
            peak_bytes,
        } => (Some(step_ms), peak_bytes),
        _ => (None, None),
    };
    let step_tokens = choice.tokens_per_s * choice.step_ms / 1e3;
    let mut command = vec!["train".to_owned()];
    let config = folder.file(&format!("{}.json", trial.number));
    let config = plan.needs_config.then_some(config.as_path());
    command.extend(plan.args(config, &plan.train_flags));
    MeasuredChoice {
        rank: None,
        simulated_ms: choice.step_ms,
        measured_ms,
        error_percent: measured_ms.map(|ms| 100.0 * (choice.step_ms / ms - 1.0)),
        tokens_per_s: measured_ms.map(|ms| step_tokens / ms * 1e3),
        peak_bytes,
        failure: trial.outcome.failure(),
        flags: choice.flags.clone(),
        command,
        trial: trial.number,
        earlier,
        choice: choice.clone(),
    }
}

/// Sorts the choices, the best first, and numbers those that were measured.
fn rank(choices: &mut [MeasuredChoice], metric: Metric) {
    let cost = |choice: &MeasuredChoice| match metric {
        Metric::Throughput => choice.tokens_per_s.map_or(f64::INFINITY, |speed| -speed),
        Metric::Latency => choice.measured_ms.unwrap_or(f64::INFINITY),
    };
    choices.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
    let measured = choices.iter_mut().filter(|c| c.measured_ms.is_some());
    for (number, choice) in measured.enumerate() {
        choice.rank = Some(number + 1);
    }
}

fn all_failed(choices: &[MeasuredChoice], out: &Path) -> String {
    let first = choices.iter().min_by_key(|choice| choice.trial);
    let first = first.and_then(|choice| choice.failure.clone());
    format!(
        "no configuration could be measured: {} failed, the first: {}; the output is in {out}/N.log; to try again, remove {out}",
        counted(choices.len() as u64, "trial"),
        first.unwrap_or_default(),
        out = out.display(),
    )
}
