//! The text after a run: measured figures beside the formulas.

use indicatif::HumanCount;
use zero_optim::LossScaling;

use super::memory_table;
use super::setup::RunSetup;
use super::utilization::Utilization;
use crate::output::{bytes, counted};
use zero_trainer::{Breakdown, CommBytes, RankSummary, StepMetrics, Validation};

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
        nothing_to_do(&mut out, setup, first);
        return out;
    };

    if first.cancelled {
        interrupted(&mut out, setup, first);
    }
    loss(&mut out, setup, last, steps);
    validation(&mut out, first, steps);
    speed(&mut out, setup, steps);
    if let Some(utilization) = utilization {
        breakdown_table(&mut out, steps, utilization);
    }
    memory_table::write(&mut out, setup, ranks);
    // A skipped step gathers no new parameters.
    let applied = steps.iter().rfind(|s| !s.skipped).unwrap_or(last);
    traffic_table(&mut out, setup, &applied.comm_bytes);
    if let Some(path) = &first.checkpoint {
        out += &format!("checkpoint: {}\n", path.display());
    }

    out
}

fn nothing_to_do(out: &mut String, setup: &RunSetup, first: &RankSummary) {
    let steps = setup.options.steps;
    let at = first.resumed_at;
    let reason = match setup.options.resume {
        Some(_) => format!("the checkpoint is at step {at}, --steps {steps} is the last step"),
        None => format!("--steps {steps} is the last step"),
    };
    *out += &format!("nothing to do: {reason}\n");
    if let Some(path) = &first.checkpoint {
        *out += &format!("checkpoint: {}\n", path.display());
    }
}

fn interrupted(out: &mut String, setup: &RunSetup, first: &RankSummary) {
    let rest = match (&setup.options.checkpoint, &first.checkpoint) {
        (Some((dir, _)), Some(_)) => format!("; continue with --resume {}", dir.display()),
        _ => String::new(),
    };
    *out += &format!("interrupted at step {}{rest}\n", first.step);
}

fn loss(out: &mut String, setup: &RunSetup, last: &StepMetrics, steps: &[StepMetrics]) {
    let newest = &steps[steps.len().saturating_sub(20)..];
    *out += &format!(
        "loss {:.4}, the mean of the last {} of {} (a model of token frequencies alone: {:.4})\n",
        newest.iter().map(|s| s.loss).sum::<f64>() / newest.len().max(1) as f64,
        newest.len(),
        counted(last.step, "step"),
        setup.workload.data.unigram_loss()
    );
}

fn speed(out: &mut String, setup: &RunSetup, steps: &[StepMetrics]) {
    if let Some(rate) = median(steps.iter().skip(2).map(|s| s.tokens_per_s)) {
        *out += &format!(
            "{} tokens/s, the median of the steps after the second\n",
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
        *out += &format!(
            "{:.0}% of a step is communication that compute does not hide\n",
            exposed * 100.0
        );
    }
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
        *out += &format!(
            "validation loss {loss:.4}, perplexity {perplexity:.4}, after step {step} over {tokens} tokens\n"
        );
    }

    if let Some((best, path)) = &rank.best {
        let path = path
            .as_ref()
            .map(|path| format!(": {}", path.display()))
            .unwrap_or_default();
        *out += &format!(
            "best validation loss {:.4}, after step {}{path}\n",
            best.loss, best.step
        );
    }
}

/// A row of the breakdown.
type Row = (&'static str, fn(&Breakdown) -> f64);

/// The parts of the steps' wall time; parts that never occurred are left out, except the usual
/// ones.
const ROWS: [Row; 19] = [
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
    ("exposed activations", |b| b.parts.exposed_model_ms),
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
    *out += &format!(
        "\n{:<26} {:>12} {:>12}\n",
        "a step of rank 0", "median ms", "of the run"
    );
    let wall: f64 = all.iter().map(|b| b.wall_ms).sum();

    let mut row = |name: &str, of: fn(&Breakdown) -> f64| {
        let sum: f64 = all.iter().map(|b| of(b)).sum();
        let ms = median(usual.iter().map(|b| of(b))).unwrap_or(0.0);
        if sum > 0.0 {
            *out += &format!(
                "  {name:<24} {ms:>12.3} {:>11.1}%\n",
                sum / wall.max(f64::MIN_POSITIVE) * 100.0
            );
        }
    };

    for (name, of) in ROWS {
        row(name, of);
    }
    row("all", |b| b.wall_ms);
    row("host's update, all of it", |b| b.update_ms);
    *out += &format!("{}\n", utilization.describe(tflops));
}

fn traffic_table(out: &mut String, setup: &RunSetup, sent: &CommBytes) {
    let settings = &setup.settings;
    let Ok(formula) = settings
        .mesh
        .layouts(&setup.layout)
        .and_then(|layouts| settings.axis_traffic(&layouts)?.rank())
    else {
        return;
    };

    let config = &setup.workload.config;
    let options = &setup.workload.options;
    let of_activation = match setup.device {
        Some(_) => options.dtype.size_bytes() as u64,
        None => 4,
    };
    let micro_batches = settings.grad_accum_steps as u64;
    let all_to_all = config.sequence_elems(options) * of_activation * micro_batches;
    let of_parts = config.tensor_elems(options, setup.device.is_some());
    let of_parts = of_parts.bytes(of_activation);
    let of_model = of_parts.total() * micro_batches + all_to_all;

    let most = if settings.stage.shards_params() {
        "formula (at most)"
    } else {
        "formula"
    };

    *out += &format!(
        "\n{:<26} {:>12} {most:>12}\n",
        "sent by a rank in a step", "measured"
    );

    let rows = [
        (
            "reduce-scatter",
            sent.reduce_scatter,
            formula.reduce_scatter_bytes + of_parts.reduce_scatter * micro_batches,
        ),
        (
            "all-gather",
            sent.all_gather,
            formula.all_gather_bytes + of_parts.all_gather * micro_batches,
        ),
        (
            "all-reduce",
            sent.all_reduce,
            formula.all_reduce_bytes + of_parts.all_reduce * micro_batches,
        ),
        (
            "all-to-all",
            sent.all_to_all,
            formula.all_to_all_bytes + all_to_all,
        ),
        ("all", sent.total(), formula.total_bytes() + of_model),
    ];

    let exchanges = settings.mesh.sequence_ranks.is_some() || settings.quantised_grads.is_some();
    for (name, measured, formula) in rows {
        if name == "all-to-all" && !exchanges {
            continue;
        }
        *out += &format!(
            "  {name:<24} {:>12} {:>12}\n",
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

#[cfg(test)]
mod tests {
    use integration_tests::Printed;

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
        error.shows(&["the checkpoint has the weights of step 1"]);
        assert!(message(&[(2.0, 1.0, false), skipped, skipped, skipped], Some(1.0)).is_some());
        let error = message(&[applied, (f64::NAN, 1.0, true)], None).unwrap();
        error.shows(&["the loss is not finite", "not saved"]);

        // One or two outliers, and steps that were skipped earlier.
        assert_eq!(message(&[applied, skipped, skipped], None), None);
        assert_eq!(message(&[skipped, skipped, skipped, applied], None), None);
        // A loss scale that falls, as at the start of a run in fp16.
        let falling = [65536.0, 32768.0, 16384.0, 8192.0, 4096.0].map(|scale| (5.0, scale, true));
        assert_eq!(message(&falling, Some(1.0)), None);
        assert_eq!(message(&[], None), None);
    }
}
