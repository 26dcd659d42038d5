//! Progress bar, metrics file and report of a run.

use std::fs;

use indicatif::{HumanCount, ProgressBar};

use super::loss_curve;
use super::metrics_file::MetricsFile;
use super::record::RUN_JSON;
use super::run_setup::RunSetup;
use crate::cli::CliError;
use crate::cli::output::{print_note, progress_bar, show_progress};
use crate::error::TrainError;
use crate::trainer::{RankSummary, StepMetrics, Validation};

/// Shows and records the steps of a run, on the rank that prints.
pub(super) struct Observer {
    bar: ProgressBar,
    metrics: Option<MetricsFile>,
    /// The last validation loss, for the bar.
    validation: String,
    /// The metrics of all steps so far.
    pub(super) seen: Vec<StepMetrics>,
}

impl Observer {
    pub(super) fn new(setup: &RunSetup) -> Result<Self, CliError> {
        let metrics = match &setup.metrics {
            Some(path) if setup.first_step < setup.options.steps => {
                Some(MetricsFile::new(path, &setup.options.run_id)?)
            }
            _ => None,
        };
        if let Some(dir) = &setup.report {
            fs::create_dir_all(dir)
                .map_err(|e| CliError::Usage(format!("failed to create {}: {e}", dir.display())))?;
        }
        let bar = progress_bar(setup.options.steps);
        Ok(Self { bar, metrics, validation: String::new(), seen: Vec::new() })
    }

    pub(super) fn step(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        let (step, loss, speed) = (metrics.step, metrics.loss, HumanCount(metrics.tokens_per_s as u64));
        if let Some(validation) = &metrics.validation {
            self.validation = format!("  validation {:.4}", validation.loss);
        }
        show_progress(&self.bar, step, &format!("loss {loss:.4}{}  {speed} tokens/s", self.validation));
        let tenth = (self.bar.length().unwrap_or(1) / 10).max(1);
        if self.bar.is_hidden() && (metrics.step.is_multiple_of(tenth) || metrics.validation.is_some()) {
            let of_step = |v: Validation| format!(", validation loss {:.4} (perplexity {:.4})", v.loss, v.perplexity);
            let validation = metrics.validation.map(of_step).unwrap_or_default();
            print_note(format_args!("step {step}: loss {loss:.4}{validation}, {speed} tokens/s"));
        }
        if let Some(file) = &mut self.metrics {
            file.write(metrics)?;
        }
        self.seen.push(metrics.clone());
        Ok(())
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    pub(super) fn write_report(&self, setup: &RunSetup, ranks: &[RankSummary], table: &str) -> Result<(), CliError> {
        let Some(dir) = &setup.report else { return Ok(()) };
        let summary = serde_json::json!({
            "model": setup.model_name,
            "ranks": setup.ranks,
            "stage": setup.settings.stage.number(),
            "dtype": setup.settings.dtype.name(),
            "unigram_loss": setup.workload.data.unigram_loss(),
            "memory_by_rank": ranks.iter().filter_map(|r| r.last.as_ref()).map(|m| m.memory).collect::<Vec<_>>(),
            "checkpoint": ranks.first().and_then(|r| r.checkpoint.clone()),
            "steps": self.seen,
        });
        let trace = zero_comm::overlap::chrome_trace(ranks.first().map_or(&[], |r| r.last_spans.as_slice()));
        let curve = loss_curve::svg(&self.seen, setup.workload.data.unigram_loss())?;
        let files = [
            ("summary.txt", table.to_owned()),
            ("summary.json", format!("{summary:#}\n")),
            (RUN_JSON, format!("{:#}\n", setup.record.document())),
            ("loss.svg", curve),
            ("trace.json", trace),
        ];
        for (name, text) in files {
            let path = dir.join(name);
            fs::write(&path, text)
                .map_err(|e| CliError::Failure(format!("failed to write {}: {e}", path.display())))?;
        }
        Ok(())
    }
}
