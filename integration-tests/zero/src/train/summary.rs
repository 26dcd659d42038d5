//! The text after a run: measured figures beside the formulas.

use std::fmt::Write;

use indicatif::{HumanBytes, HumanCount};
use zero_optim::LossScaling;
use zero_shard::StateBytes;

use super::setup::RunSetup;
use super::utilization::Utilization;
use crate::memory::limits::resident_peak_bytes;
use crate::output::counted;
use zero_trainer::{
    Breakdown, CommBytes, Home, MemoryBytes, MemoryTrace, NvmeBytes, RankSummary, StepMetrics,
    Validation,
};

/// The figures of the run.
pub(crate) fn closing(
    setup: &RunSetup,
    ranks: &[RankSummary],
    steps: &[StepMetrics],
    utilization: Option<&Utilization>,
) -> String {
    let mut out = String::new();
    let Some(first) = ranks.first() else {
        return out;
    };
    let Some(last) = &first.last else {
        let (steps, at) = (setup.options.steps, first.resumed_at);
        let _ = match setup.options.resume {
            Some(_) => {
                writeln!(
                    out,
                    "nothing to do: the checkpoint is at step {at}, --steps {steps} is the last step"
                )
            }
            None => writeln!(out, "nothing to do: --steps {steps} is the last step"),
        };
        if let Some(path) = &first.checkpoint {
            let _ = writeln!(out, "checkpoint: {}", path.display());
        }
        return out;
    };
    if first.cancelled {
        let dir = setup
            .options
            .checkpoint
            .as_ref()
            .filter(|_| first.checkpoint.is_some())
            .map(|(dir, _)| dir.display());
        let rest = dir
            .map(|dir| format!("; continue with --resume {dir}"))
            .unwrap_or_default();
        let _ = writeln!(out, "interrupted at step {}{rest}", first.step);
    }
    let newest = &steps[steps.len().saturating_sub(20)..];
    let _ = writeln!(
        out,
        "loss {:.4}, the mean of the last {} of {} (a model of token frequencies alone: {:.4})",
        newest.iter().map(|s| s.loss).sum::<f64>() / newest.len().max(1) as f64,
        newest.len(),
        counted(last.step, "step"),
        setup.workload.data.unigram_loss()
    );
    validation(&mut out, first, steps);
    if let Some(rate) = median(steps.iter().skip(2).map(|s| s.tokens_per_s)) {
        let _ = writeln!(
            out,
            "{} tokens/s, the median of the steps after the second",
            HumanCount(rate as u64)
        );
    }
    let exposed = median(
        steps
            .iter()
            .skip(2)
            .map(|s| s.overlap.exposed_comm_ms / s.step_ms),
    );
    if let Some(exposed) = exposed.filter(|_| setup.is_recorded()) {
        let _ = writeln!(
            out,
            "{:.0}% of a step is communication that compute does not hide",
            exposed * 100.0
        );
    }
    if let Some(utilization) = utilization {
        breakdown_table(&mut out, steps, utilization);
    }
    memory_table(&mut out, setup, ranks);
    // A skipped step gathers no new parameters.
    let applied = steps.iter().rfind(|s| !s.skipped).unwrap_or(last);
    traffic_table(&mut out, setup, &applied.comm_bytes);
    if let Some(path) = &first.checkpoint {
        let _ = writeln!(out, "checkpoint: {}", path.display());
    }
    out
}

/// A run that ends with this many skipped steps has diverged, if a lower loss scale could not help:
/// a skipped step changes no weight, so one batch may be an outlier, but not several in a row.
const DIVERGED_STEPS: usize = 3;

/// An error if the run ended with at least [`DIVERGED_STEPS`] skipped steps under the least loss
/// scale, or with one without a finite loss under a loss scale that does not change. Steps that are
/// skipped while the loss scale falls, as at the start of a run in fp16, do not count.
pub(crate) fn diverged(setup: &RunSetup, steps: &[StepMetrics]) -> Option<String> {
    let least_scale = match &setup.settings.optimizer.loss_scaling {
        LossScaling::Dynamic(dynamic) => Some(dynamic.min_scale),
        _ => None,
    };
    let saves = setup.options.checkpoint.is_some();
    divergence(steps, least_scale, saves)
}

/// As [`diverged`]; `least_scale` is that of a dynamic loss scale.
fn divergence(steps: &[StepMetrics], least_scale: Option<f64>, saves: bool) -> Option<String> {
    let is_hopeless = |step: &&StepMetrics| {
        step.skipped && least_scale.is_none_or(|least| step.loss_scale <= least)
    };
    let skipped = steps.iter().rev().take_while(is_hopeless).count();
    let last = steps.last().filter(|_| skipped > 0)?;
    if last.loss.is_finite() || least_scale.is_some() {
        let weights = match (saves, last.step - skipped as u64) {
            (false, _) => String::new(),
            (true, step) => format!("; the checkpoint has the weights of step {step}"),
        };
        return (skipped >= DIVERGED_STEPS).then(|| {
            format!(
                "step {}: the last {skipped} steps were skipped, because their gradients were not finite: training \
                 diverged{weights}; start again, or resume from an earlier checkpoint, with a lower --lr or with --clip",
                last.step
            )
        });
    }
    let saves = if saves {
        ", and its weights are not saved"
    } else {
        ""
    };
    Some(format!(
        "step {}: the loss is not finite, and the last {} skipped: training diverged{saves}; start again, or resume from \
         an earlier checkpoint, with a lower --lr or with --clip",
        last.step,
        if skipped == 1 {
            "step was".to_owned()
        } else {
            format!("{skipped} steps were")
        },
    ))
}

/// The last and the best evaluation.
fn validation(out: &mut String, rank: &RankSummary, steps: &[StepMetrics]) {
    if let Some((step, last)) = steps
        .iter()
        .rev()
        .find_map(|s| Some((s.step, s.validation?)))
    {
        let Validation {
            loss,
            perplexity,
            tokens,
        } = last;
        let tokens = HumanCount(tokens);
        let _ = writeln!(
            out,
            "validation loss {loss:.4}, perplexity {perplexity:.4}, after step {step} over {tokens} tokens"
        );
    }
    if let Some((best, path)) = &rank.best {
        let path = path
            .as_ref()
            .map(|path| format!(": {}", path.display()))
            .unwrap_or_default();
        let _ = writeln!(
            out,
            "best validation loss {:.4}, after step {}{path}",
            best.loss, best.step
        );
    }
}

/// Selects one figure of a rank's memory.
type Field<'a> = &'a dyn Fn(&MemoryBytes) -> u64;

fn memory_table(out: &mut String, setup: &RunSetup, ranks: &[RankSummary]) {
    let settings = &setup.settings;
    let formula = |stage| {
        settings.resolve_groups(&setup.layout).ok()?.state_bytes(
            &setup.layout,
            stage,
            &settings.widths(),
        )
    };
    let (Some(formula), stage0) = (
        formula(settings.stage),
        formula(zero_shard::ZeroStage::Zero),
    ) else {
        return;
    };
    let stage0 = stage0.map(|state| state.total_bytes());
    // The part in memory.
    let offload = &settings.offload;
    let kept = |home: &Home, bytes: u64| {
        if matches!(home, Home::Nvme(_)) {
            0
        } else {
            bytes
        }
    };
    let formula = StateBytes {
        params_bytes: kept(&offload.params, formula.params_bytes),
        grads_bytes: kept(&offload.params, formula.grads_bytes),
        optimizer_bytes: kept(&offload.optimizer, formula.optimizer_bytes),
    };
    let held: Vec<MemoryBytes> = ranks
        .iter()
        .filter_map(|r| r.last.as_ref())
        .map(|m| m.memory)
        .collect();
    let range = |of: Field<'_>| {
        let (least, most) = (
            held.iter().map(of).min().unwrap_or(0),
            held.iter().map(of).max().unwrap_or(0),
        );
        let (least, most) = (bytes(least), bytes(most));
        if least == most {
            most
        } else {
            format!("{least} to {most}")
        }
    };
    let n = setup.ranks;
    let who = if held.len() == n {
        format!("each of {}", counted(n as u64, "rank"))
    } else {
        "rank 0".to_owned()
    };
    // The trace has no offloaded state.
    let trace = ranks
        .first()
        .and_then(|rank| rank.memory.as_ref())
        .filter(|_| !offload.updates_on_host());
    let peak = trace.and_then(MemoryTrace::peak);
    let heading = if peak.is_some() {
        format!(" {:>12}", "at the peak")
    } else {
        String::new()
    };
    let held_by = format!("held by {who}");
    let total = |m: &MemoryBytes| m.params_bytes + m.grads_bytes + m.optimizer_bytes;
    let all = |m: &MemoryBytes| {
        total(m) + m.buckets_bytes + m.activations_bytes + m.workspace_bytes + m.staging_bytes
    };
    let rows: [(&str, Field<'_>, Option<u64>); 10] = [
        (
            "parameters",
            &|m| m.params_bytes,
            Some(formula.params_bytes),
        ),
        ("gradients", &|m| m.grads_bytes, Some(formula.grads_bytes)),
        (
            "optimizer state",
            &|m| m.optimizer_bytes,
            Some(formula.optimizer_bytes),
        ),
        ("model state", &total, Some(formula.total_bytes())),
        ("buckets, gathered units", &|m| m.buckets_bytes, None),
        ("activations", &|m| m.activations_bytes, None),
        ("workspace", &|m| m.workspace_bytes, None),
        ("copy for a checkpoint", &|m| m.staging_bytes, None),
        ("total", &all, None),
        ("peak at one moment", &|m| m.peak_bytes, None),
    ];
    // The bytes at the peak, in the same fields.
    let at_peak = peak.map(|peak| {
        let [
            params_bytes,
            grads_bytes,
            optimizer_bytes,
            buckets_bytes,
            activations_bytes,
            workspace_bytes,
        ] = peak.bytes;
        let staging_bytes = held.first().map_or(0, |m| m.staging_bytes);
        let in_peak = if setup.device.is_none() {
            staging_bytes
        } else {
            0
        };
        let (peak_bytes, reserved_bytes) = (peak.total_bytes() + in_peak, 0);
        MemoryBytes {
            params_bytes,
            grads_bytes,
            optimizer_bytes,
            buckets_bytes,
            activations_bytes,
            workspace_bytes,
            staging_bytes,
            peak_bytes,
            reserved_bytes,
            host_bytes: 0,
        }
    });
    // The ranks may differ; then the columns are wider.
    let width = rows
        .iter()
        .map(|(_, of, _)| range(*of).len())
        .max()
        .unwrap_or(0)
        .max(12);
    let _ = writeln!(
        out,
        "\n{held_by:<26} {:>width$} {:>12}{heading} (padding included)",
        "measured", "formula"
    );
    for (name, of, formula) in rows {
        let at_peak = at_peak
            .as_ref()
            .map(|peak| format!(" {:>12}", bytes(of(peak))))
            .unwrap_or_default();
        let formula = formula.map_or("-".to_owned(), bytes);
        let _ = writeln!(
            out,
            "  {name:<24} {:>width$} {formula:>12}{at_peak}",
            range(of)
        );
    }
    if let Some(moment) = trace.and_then(MemoryTrace::peak_moment) {
        let _ = writeln!(out, "  (the peak is rank 0's in its last step, {moment})");
    }
    if let (Some(process), None) = (resident_peak_bytes(), &setup.device) {
        let _ = writeln!(out, "  (this process held at most {})", bytes(process));
    }
    if let Some(host) = held
        .first()
        .filter(|m| m.host_bytes > 0 && setup.device.is_some())
    {
        let _ = writeln!(
            out,
            "  in host memory, at most  {:>width$}",
            bytes(host.host_bytes)
        );
    }
    let files = ranks
        .first()
        .and_then(|rank| rank.last.as_ref())
        .and_then(|last| last.nvme);
    if let Some(NvmeBytes {
        file_bytes,
        read_bytes,
        written_bytes,
    }) = files
    {
        let _ = writeln!(
            out,
            "  on NVMe                  {:>width$}   (the last step read {} and wrote {})",
            bytes(file_bytes),
            bytes(read_bytes),
            bytes(written_bytes)
        );
    }
    if let (Some(stage0), true) = (stage0, settings.stage.shards_optimizer()) {
        let ours = (formula.total_bytes() + files.map_or(0, |files| files.file_bytes)).max(1);
        let _ = writeln!(
            out,
            "  (stage 0 would hold {}: {:.2} x)",
            bytes(stage0),
            stage0 as f64 / ours as f64
        );
    }
}

/// A row of the breakdown.
type Row = (&'static str, fn(&Breakdown) -> f64);

/// The parts of the steps' wall time; parts that never occurred are left out, except the usual
/// ones.
const ROWS: [Row; 18] = [
    ("forward", |b| b.parts.forward_ms),
    ("  embedding", |b| b.units.embedding.forward_ms),
    ("  blocks", |b| b.units.block.forward_ms),
    ("  head", |b| b.units.head.forward_ms),
    ("backward", |b| b.parts.backward_ms),
    ("  embedding", |b| b.units.embedding.backward_ms),
    ("  blocks", |b| b.units.block.backward_ms),
    ("  head", |b| b.units.head.backward_ms),
    ("CUDA graph of both", |b| b.parts.graph_ms),
    ("packing gradients", |b| b.parts.pack_ms),
    ("optimizer", |b| b.parts.optimizer_ms),
    ("exposed reduction", |b| b.parts.exposed_reduce_ms),
    ("exposed gathering", |b| b.parts.exposed_gather_ms),
    ("exposed statistics", |b| b.parts.exposed_control_ms),
    ("data", |b| b.parts.data_ms),
    ("checkpoint", |b| b.parts.checkpoint_ms),
    ("validation", |b| b.parts.validation_ms),
    ("host wait", |b| b.parts.host_wait_ms),
];

fn breakdown_table(out: &mut String, steps: &[StepMetrics], utilization: &Utilization) {
    let all: Vec<&Breakdown> = steps
        .iter()
        .filter_map(|step| step.breakdown.as_ref())
        .collect();
    // The first two steps also load kernels and fill caches.
    let usual = if all.len() > 2 {
        &all[2..]
    } else {
        all.as_slice()
    };
    let Some(tflops) = median(usual.iter().map(|b| b.tflops)) else {
        return;
    };
    let _ = writeln!(
        out,
        "\n{:<26} {:>12} {:>12}",
        "a step of rank 0", "median ms", "of the run"
    );
    let wall: f64 = all.iter().map(|b| b.wall_ms).sum();
    let mut row = |name: &str, of: fn(&Breakdown) -> f64| {
        let sum: f64 = all.iter().map(|b| of(b)).sum();
        let ms = median(usual.iter().map(|b| of(b))).unwrap_or(0.0);
        if sum > 0.0 {
            let _ = writeln!(
                out,
                "  {name:<24} {ms:>12.3} {:>11.1}%",
                sum / wall.max(f64::MIN_POSITIVE) * 100.0
            );
        }
    };
    for (name, of) in ROWS {
        row(name, of);
    }
    row("all", |b| b.wall_ms);
    row("host's update, all of it", |b| b.update_ms);
    let _ = writeln!(out, "{}", utilization.describe(tflops));
}

fn traffic_table(out: &mut String, setup: &RunSetup, sent: &CommBytes) {
    let settings = &setup.settings;
    let reductions = settings.reductions();
    let Ok(formula) = setup
        .layout
        .step_traffic(settings.stage, &settings.widths(), reductions)
    else {
        return;
    };
    let most = if settings.stage.shards_params() {
        "formula (at most)"
    } else {
        "formula"
    };
    let _ = writeln!(
        out,
        "\n{:<26} {:>12} {most:>12}",
        "sent by a rank in a step", "measured"
    );
    let rows = [
        (
            "reduce-scatter",
            sent.reduce_scatter,
            formula.reduce_scatter_bytes,
        ),
        ("all-gather", sent.all_gather, formula.all_gather_bytes),
        ("all-reduce", sent.all_reduce, formula.all_reduce_bytes),
        ("all", sent.total(), formula.total_bytes()),
    ];
    for (name, measured, formula) in rows {
        let _ = writeln!(
            out,
            "  {name:<24} {:>12} {:>12}",
            bytes(measured),
            bytes(formula)
        );
    }
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn bytes(n: u64) -> String {
    HumanBytes(n).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps with these losses, loss scales and whether they were skipped.
    fn steps(all: &[(f64, f64, bool)]) -> Vec<StepMetrics> {
        let step = |(i, &(loss, loss_scale, skipped)): (usize, &(f64, f64, bool))| StepMetrics {
            step: i as u64 + 1,
            loss,
            loss_scale,
            skipped,
            ..StepMetrics::default()
        };
        all.iter().enumerate().map(step).collect()
    }

    #[test]
    fn skipped_end_is_divergence() {
        let applied = (2.0, 1.0, false);
        let skipped = (2e9, 1.0, true);
        let message = |all: &[(f64, f64, bool)], least| divergence(&steps(all), least, true);
        let error = message(&[applied, skipped, skipped, skipped], None).unwrap();
        assert!(
            error.starts_with("step 4: the last 3 steps were skipped"),
            "{error}"
        );
        assert!(
            error.contains("the checkpoint has the weights of step 1"),
            "{error}"
        );
        assert!(message(&[(2.0, 1.0, false), skipped, skipped, skipped], Some(1.0)).is_some());
        let error = message(&[applied, (f64::NAN, 1.0, true)], None).unwrap();
        assert!(
            error.contains("the loss is not finite") && error.contains("not saved"),
            "{error}"
        );

        // One or two outliers, and steps that were skipped earlier.
        assert_eq!(message(&[applied, skipped, skipped], None), None);
        assert_eq!(message(&[skipped, skipped, skipped, applied], None), None);
        // A loss scale that falls, as at the start of a run in fp16.
        let falling = [65536.0, 32768.0, 16384.0, 8192.0, 4096.0].map(|scale| (5.0, scale, true));
        assert_eq!(message(&falling, Some(1.0)), None);
        assert_eq!(message(&[], None), None);
    }
}
