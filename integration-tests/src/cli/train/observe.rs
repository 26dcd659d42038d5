//! What happens while a run goes on: the progress bar, the metrics file, the loss curve.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};

use super::curve;
use super::plan::Plan;
use crate::cli::CliError;
use crate::cli::output::note;
use crate::error::TrainError;
use crate::trainer::{RankSummary, StepMetrics};

/// Follows a run on rank 0.
pub(super) struct Observer {
    bar: ProgressBar,
    metrics: Option<(BufWriter<File>, String)>,
    /// All steps so far.
    pub(super) seen: Vec<StepMetrics>,
}

fn create(path: &Path) -> Result<File, CliError> {
    File::create(path).map_err(|e| CliError::Usage(format!("cannot write {}: {e}", path.display())))
}

impl Observer {
    pub(super) fn new(plan: &Plan) -> Result<Self, CliError> {
        let metrics = match &plan.metrics {
            Some(path) => Some((BufWriter::new(create(path)?), path.display().to_string())),
            None => None,
        };
        if let Some(dir) = &plan.report {
            fs::create_dir_all(dir).map_err(|e| CliError::Usage(format!("cannot make {}: {e}", dir.display())))?;
        }
        let bar = ProgressBar::new(plan.options.steps);
        let style = ProgressStyle::with_template("{bar:30} step {pos}/{len}  {msg}  {elapsed} (eta {eta})");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Ok(Self { bar, metrics, seen: Vec::new() })
    }

    pub(super) fn step(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        self.bar.set_position(metrics.step);
        self.bar.set_message(format!("loss {:.4}  {:.0} tokens/s", metrics.loss, metrics.tokens_per_s));
        let tenth = (self.bar.length().unwrap_or(1) / 10).max(1);
        if self.bar.is_hidden() && metrics.step.is_multiple_of(tenth) {
            let (step, loss, speed) = (metrics.step, metrics.loss, metrics.tokens_per_s);
            note(format_args!("step {step}: loss {loss:.4}, {speed:.0} tokens/s"));
        }
        if let Some((file, path)) = &mut self.metrics {
            let error = |source| TrainError::File { what: "writing", path: path.clone(), source };
            serde_json::to_writer(&mut *file, metrics).map_err(|e| error(e.into()))?;
            // Whoever follows the file sees whole steps.
            file.write_all(b"\n").and_then(|()| file.flush()).map_err(error)?;
        }
        self.seen.push(metrics.clone());
        Ok(())
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    pub(super) fn write_report(&self, plan: &Plan, ranks: &[RankSummary], table: &str) -> Result<(), CliError> {
        let Some(dir) = &plan.report else { return Ok(()) };
        let summary = serde_json::json!({
            "model": plan.model_name,
            "ranks": plan.ranks,
            "stage": plan.settings.stage.number(),
            "dtype": plan.settings.dtype.name(),
            "unigram_loss": plan.workload.data.unigram_loss(),
            "memory_by_rank": ranks.iter().filter_map(|r| r.last.as_ref()).map(|m| m.memory).collect::<Vec<_>>(),
            "checkpoint": ranks.first().and_then(|r| r.checkpoint.clone()),
            "steps": self.seen,
        });
        let trace = zero_comm::overlap::chrome_trace(ranks.first().map_or(&[], |r| r.last_spans.as_slice()));
        let curve = curve::svg(&self.seen, plan.workload.data.unigram_loss())?;
        let files = [
            ("summary.txt", table.to_owned()),
            ("summary.json", format!("{summary:#}\n")),
            ("loss.svg", curve),
            ("trace.json", trace),
        ];
        for (name, text) in files {
            let path = dir.join(name);
            fs::write(&path, text).map_err(|e| CliError::Failure(format!("writing {}: {e}", path.display())))?;
        }
        Ok(())
    }
}
