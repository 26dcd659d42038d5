//! Progress bar, metrics file and report of a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, io};

use indicatif::{HumanBytes, HumanCount, HumanDuration, ProgressBar};

use super::csv_file::{self, CsvLines};
use super::event_files::EventFiles;
use super::figures::StepFigures;
use super::line_file::LineFile;
use super::memory_picture::Besides;
use super::metrics_file::{self, MetricsLines};
use super::report_folder::{self, SUMMARY, reported_steps};
use super::setup::RunSetup;
use super::utilization::Utilization;
use super::{loss_curve, memory_picture};
use crate::error::CliError;
use crate::memory::limits::resident_peak_bytes;
use crate::output::{print_note, print_text, progress_bar, show_progress};
use crate::paths::replace;
use crate::settings::outputs::Output;
use crate::settings::record::RUN_JSON;
use crate::settings::record::TimedRecord;
use crate::settings::samples::Samples;
use zero_trainer::{MemoryTrace, RankSummary, StepMetrics, Validation};

/// Shows and records the steps of a run, on the rank that prints.
pub(crate) struct Observer {
    bar: ProgressBar,
    outputs: Outputs,
    /// The failed write of an output. The run saves and ends.
    pub(crate) failure: Option<CliError>,
    /// Requests the end of the run.
    cancel: Arc<AtomicBool>,
    /// The last validation loss, for the bar.
    validation: String,
    /// Set if the run has a breakdown, a table or event files.
    rates: Option<Utilization>,
    has_breakdown: bool,
    /// The metrics of all steps so far.
    pub(crate) seen: Vec<StepMetrics>,
    /// For the report, the steps before those of this process, which the resumed run wrote.
    earlier: Vec<StepMetrics>,
}

impl Observer {
    pub(crate) fn new(setup: &RunSetup) -> Result<Self, CliError> {
        let outputs = Outputs::open(setup)?;

        if let Some(dir) = &setup.outputs.report {
            fs::create_dir_all(dir)
                .map_err(|e| usage!("failed to create {}: {e}", dir.display()))?;
        }

        let bar = progress_bar(setup.options.steps);
        let has_breakdown = setup.options.breakdown;
        let rates = (has_breakdown || outputs.show_utilization())
            .then(|| Utilization::new(setup))
            .transpose()?;
        let cancel = Arc::clone(&setup.options.cancel);

        Ok(Self {
            bar,
            outputs,
            failure: None,
            cancel,
            validation: String::new(),
            rates,
            has_breakdown,
            seen: Vec::new(),
            earlier: earlier_steps(setup)?,
        })
    }

    pub(crate) fn step(&mut self, metrics: &StepMetrics, samples: Option<&Samples>) {
        let mut metrics = metrics.clone();
        if let Some(rates) = &self.rates {
            rates.complete(&mut metrics);
        }
        let (step, loss, speed) = (
            metrics.step,
            metrics.loss,
            HumanCount(metrics.tokens_per_s as u64),
        );
        if let (Some(samples), Some(tokens)) = (samples, &metrics.sample) {
            let text = samples.text(tokens).unwrap_or_else(|e| e.to_string());
            let line = format!("sample after step {step}: {text}\n");
            // A terminal that is gone ends no run.
            let _ignored = self.bar.suspend(|| print_text(line));
        }
        if let Some(validation) = &metrics.validation {
            self.validation = format!("  validation {:.4}", validation.loss);
        }
        let seen = HumanCount(metrics.tokens_seen);
        let left = Duration::try_from_secs_f64(metrics.eta_s).unwrap_or(Duration::MAX);
        let text = format!(
            "loss {loss:.4}{}  {speed} tokens/s  {seen} tokens",
            self.validation
        );
        show_progress(&self.bar, step, &text, left);
        let tenth = (self.bar.length().unwrap_or(1) / 10).max(1);
        if self.bar.is_hidden()
            && (metrics.step.is_multiple_of(tenth) || metrics.validation.is_some())
        {
            let of_step = |v: Validation| {
                format!(
                    ", validation loss {:.4} (perplexity {:.4})",
                    v.loss, v.perplexity
                )
            };
            let validation = metrics.validation.map(of_step).unwrap_or_default();
            let left = HumanDuration(left);
            print_note(format_args!(
                "step {step}: loss {loss:.4}{validation}, {speed} tokens/s, {seen} tokens, {left:#} left"
            ));
        }

        let rates = self.rates.as_ref();
        let mfu = rates.and_then(|rates| rates.mfu(metrics.tokens_per_s));
        if self.failure.is_none()
            && let Err(error) = self.outputs.write(&metrics, mfu)
        {
            self.failure = Some(error);
            self.cancel.store(true, Ordering::Relaxed);
        }
        self.seen.push(metrics);
    }

    /// The utilization, if the run has a breakdown.
    pub(crate) fn utilization(&self) -> Option<&Utilization> {
        self.rates.as_ref().filter(|_| self.has_breakdown)
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Measures the machine again after the last step, and completes the steps with the better
    /// rate. A note says so if the files of steps have utilizations above 100%, which the first
    /// rate gave.
    pub(crate) fn measure_again(&mut self) {
        let Some(rates) = &mut self.rates else {
            return;
        };
        let Some(highest) = self
            .seen
            .iter()
            .filter_map(|step| rates.mfu(step.tokens_per_s))
            .max_by(f64::total_cmp)
        else {
            return;
        };

        rates.measure_again();
        for step in &mut self.seen {
            rates.complete(step);
        }

        let is_written = self.outputs.has_utilization(self.has_breakdown);
        if let Some(note) = rates.note(highest).filter(|_| is_written) {
            print_note(note);
        }
    }

    pub(crate) fn write_report(
        &self,
        setup: &RunSetup,
        ranks: &[RankSummary],
        table: &str,
    ) -> Result<(), CliError> {
        let Some(dir) = &setup.outputs.report else {
            return Ok(());
        };
        let trace = ranks.first().and_then(|rank| rank.memory.as_ref());
        let steps = [self.earlier.as_slice(), &self.seen].concat();

        let summary = serde_json::json!({
            "model": setup.model_name,
            "ranks": setup.ranks,
            "stage": setup.settings.stage.number(),
            "dtype": setup.settings.dtype.name(),
            "unigram_loss": setup.workload.data.unigram_loss(),
            "memory_by_rank": ranks.iter().filter_map(|r| r.last.as_ref()).map(|m| m.memory).collect::<Vec<_>>(),
            "peak": trace.and_then(peak),
            "utilization": self.utilization().map(Utilization::to_json),
            "process_peak_bytes": resident_peak_bytes(),
            "checkpoint": ranks.first().and_then(|r| r.checkpoint.clone()),
            "steps": steps,
        });

        let timeline = zero_comm::overlap::chrome_trace(
            ranks.first().map_or(&[], |r| r.last_spans.as_slice()),
        );
        let validation: Vec<(u64, f64)> = steps
            .iter()
            .filter_map(|step| Some((step.step, step.validation?.loss)))
            .collect();
        let curve = loss_curve::svg(&steps, &validation, setup.workload.data.unigram_loss())?;

        let failed =
            |path: &Path, e: io::Error| failure!("failed to write {}: {e}", path.display());
        report_folder::move_aside(dir, setup.first_step)?;
        let files = [
            ("summary.txt", table.to_owned()),
            (SUMMARY, format!("{summary:#}\n")),
            (RUN_JSON, format!("{:#}\n", setup.record.document())),
            ("loss.svg", curve),
            ("trace.json", timeline),
        ];

        let besides = besides(setup, ranks);
        let memory = trace
            .map(|trace| memory_picture::svg(trace, besides))
            .transpose()?
            .flatten();
        let memory = memory.map(|svg| ("memory.svg", svg));

        for (name, text) in files.into_iter().chain(memory) {
            let path = dir.join(name);
            // Whole: a run that resumes after a kill reads it.
            replace(&path, text.as_bytes()).map_err(|e| failed(&path, e))?;
        }

        Ok(())
    }
}

/// The files that a run adds to in each step.
struct Outputs {
    run: String,
    /// Until the first step has been written.
    settings: Option<Box<TimedRecord>>,
    metrics: Option<LineFile<MetricsLines>>,
    csv: Option<LineFile<CsvLines>>,
    tensorboard: Option<EventFiles>,
}

impl Outputs {
    /// Opens the files. A run without steps writes none.
    fn open(setup: &RunSetup) -> Result<Self, CliError> {
        let (options, first_step) = (&setup.options, setup.first_step);
        let has_steps = first_step < options.steps;
        let path = |path: &Option<PathBuf>| path.clone().filter(|_| has_steps);
        Ok(Self {
            run: options.run_id.clone(),
            settings: Some(Box::new(TimedRecord {
                record: setup.record.clone(),
                threads: setup.workload.threads,
                node_ranks: setup.settings.node_ranks,
            })),
            metrics: optional(
                Output::Metrics,
                path(&setup.outputs.metrics),
                setup,
                |path| LineFile::new(path, options),
            )?,
            csv: optional(Output::Csv, path(&setup.outputs.csv), setup, |path| {
                csv_file::create_folder(path)?;
                LineFile::new(path, options)
            })?,
            tensorboard: optional(
                Output::Tensorboard,
                path(&setup.outputs.tensorboard),
                setup,
                |dir| EventFiles::new(dir, options, first_step),
            )?,
        })
    }

    /// Whether a file has the utilization of each step, be there a breakdown or not.
    fn show_utilization(&self) -> bool {
        self.csv.is_some() || self.tensorboard.is_some()
    }

    /// Whether a file has the utilization of each step. The metrics have it in the breakdown.
    fn has_utilization(&self, has_breakdown: bool) -> bool {
        self.show_utilization() || (has_breakdown && self.metrics.is_some())
    }

    /// Writes a step to all files.
    fn write(&mut self, metrics: &StepMetrics, mfu: Option<f64>) -> Result<(), CliError> {
        let Self {
            run,
            settings,
            metrics: lines,
            csv,
            tensorboard,
        } = self;
        let settings = settings.take();
        let figures = StepFigures {
            metrics,
            mfu,
            run,
            settings: settings.as_deref(),
        };
        lines.as_mut().map_or(Ok(()), |file| file.write(&figures))?;
        csv.as_mut().map_or(Ok(()), |file| file.write(&figures))?;
        tensorboard
            .as_mut()
            .map_or(Ok(()), |files| files.write(&figures))
    }
}

/// Opens an output. One that no flag names is optional: another process may be writing to it.
fn optional<T>(
    output: Output,
    path: Option<PathBuf>,
    setup: &RunSetup,
    open: impl FnOnce(&Path) -> Result<T, CliError>,
) -> Result<Option<T>, CliError> {
    let opened = path.map(|path| open(&path)).transpose();
    match opened {
        Err(error) if setup.outputs.recorded.contains(&output) => {
            let (what, _) = output.name();
            print_note(format_args!("note: no {what}: {error}"));
            Ok(None)
        }
        opened => opened,
    }
}

/// The memory that the trace of rank 0 does not have.
fn besides(setup: &RunSetup, ranks: &[RankSummary]) -> Besides {
    let memory = ranks
        .first()
        .and_then(|rank| rank.last.as_ref())
        .map(|last| last.memory)
        .unwrap_or_default();

    let (copy_bytes, undrawn_bytes, what) = match &setup.device {
        None => (memory.staging_bytes, memory.host_bytes, "of offload"),
        Some(_) => (
            0,
            memory.host_bytes + memory.staging_bytes,
            "in host memory",
        ),
    };

    let undrawn = if undrawn_bytes == 0 {
        String::new()
    } else {
        format!("{} {what}", HumanBytes(undrawn_bytes))
    };

    Besides {
        copy_bytes,
        undrawn,
    }
}

/// For a report of the whole run, the steps before the first one: those in the metrics file or,
/// without one, those in the report that this run continues.
///
/// # Errors
/// They cannot be read.
fn earlier_steps(setup: &RunSetup) -> Result<Vec<StepMetrics>, CliError> {
    let Some(report) = setup
        .outputs
        .report
        .as_ref()
        .filter(|_| setup.first_step > 0)
    else {
        return Ok(Vec::new());
    };
    if let Some(path) = &setup.outputs.metrics {
        return metrics_file::steps_until(path, setup.first_step);
    }
    let mut steps = reported_steps(report)?;
    steps.retain(|step| step.step <= setup.first_step);
    Ok(steps)
}

/// The peak of rank 0's memory in its last step: its moment and its holders.
fn peak(trace: &MemoryTrace) -> Option<serde_json::Value> {
    let peak = trace.peak()?;
    let [params, grads, optimizer, buckets, activations, workspace] = peak.bytes;
    Some(serde_json::json!({
        "bytes": peak.total_bytes(),
        "moment": trace.peak_moment(),
        "at_ms": peak.at.as_secs_f64() * 1e3,
        "fraction_of_step": trace.fraction(peak),
        "operation": peak.operation,
        "holders": {
            "params_bytes": params,
            "grads_bytes": grads,
            "optimizer_bytes": optimizer,
            "buckets_bytes": buckets,
            "activations_bytes": activations,
            "workspace_bytes": workspace,
        },
    }))
}
