//! The figures of a step that `--csv` and `--tensorboard` show.

use zero_trainer::StepMetrics;

use crate::settings::record::TimedRecord;

/// A step of a run, for its outputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepFigures<'a> {
    pub(crate) metrics: &'a StepMetrics,
    /// The model FLOPs utilization, if the peak is known and a table or TensorBoard shows it.
    pub(crate) mfu: Option<f64>,
    /// The id of the run.
    pub(crate) run: &'a str,
    /// The settings of the run, in the first step that this process writes.
    pub(crate) settings: Option<&'a TimedRecord>,
}

/// The value of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Number {
    Real(f64),
    Whole(u64),
}

impl Number {
    /// The text that reads back to the same number.
    pub(crate) fn text(self) -> String {
        match self {
            // The shortest decimal that reads back to the bit, with an exponent if it is short.
            Self::Real(value) => format!("{value:?}"),
            Self::Whole(value) => value.to_string(),
        }
    }

    /// The nearest fp32, the type of TensorBoard's scalars.
    pub(crate) fn to_f32(self) -> f32 {
        match self {
            Self::Real(value) => value as f32,
            Self::Whole(value) => value as f32,
        }
    }
}

/// A figure of a step.
pub(crate) struct Figure {
    /// The column of the table; the flat key of `--metrics`, if that has the figure.
    pub(crate) column: &'static str,
    /// The tag in TensorBoard, with the names of Hugging Face's Trainer where it has the figure;
    /// `None`: only in the table.
    pub(crate) tag: Option<&'static str>,
    /// `None`: this step does not have it.
    pub(crate) value: fn(&StepFigures<'_>) -> Option<Number>,
}

/// A figure that TensorBoard shows.
const fn shown(
    column: &'static str,
    tag: &'static str,
    value: fn(&StepFigures<'_>) -> Option<Number>,
) -> Figure {
    Figure {
        column,
        tag: Some(tag),
        value,
    }
}

/// A figure of the table alone.
const fn listed(column: &'static str, value: fn(&StepFigures<'_>) -> Option<Number>) -> Figure {
    Figure {
        column,
        tag: None,
        value,
    }
}

/// A figure of the memory that a rank held.
macro_rules! memory {
    ($field:ident) => {
        shown(
            concat!("memory.", stringify!($field)),
            concat!("memory/", stringify!($field)),
            |step| Some(Number::Whole(step.metrics.memory.$field)),
        )
    };
}

/// A figure of quantised values.
macro_rules! quantised {
    ($column:literal, $figure:ident, $of:ident) => {
        shown(
            $column,
            concat!("train/", stringify!($figure), "_", stringify!($of)),
            |step| {
                step.metrics
                    .$figure
                    .and_then(|figure| figure.$of)
                    .map(Number::Real)
            },
        )
    };
}

/// All figures, in the order of the columns.
pub(crate) const FIGURES: [Figure; 26] = {
    use Number::{Real, Whole};
    [
        listed("step", |step| Some(Whole(step.metrics.step))),
        shown("loss", "train/loss", |step| Some(Real(step.metrics.loss))),
        shown("validation.loss", "eval/loss", |step| {
            step.metrics.validation.map(|result| Real(result.loss))
        }),
        shown("validation.perplexity", "eval/perplexity", |step| {
            step.metrics
                .validation
                .map(|result| Real(result.perplexity))
        }),
        shown("lr", "train/learning_rate", |step| {
            Some(Real(step.metrics.lr))
        }),
        shown("grad_norm", "train/grad_norm", |step| {
            step.metrics.grad_norm.map(Real)
        }),
        shown("loss_scale", "train/loss_scale", |step| {
            Some(Real(step.metrics.loss_scale))
        }),
        listed("skipped", |step| {
            Some(Whole(u64::from(step.metrics.skipped)))
        }),
        listed("tokens", |step| Some(Whole(step.metrics.tokens))),
        listed("tokens_seen", |step| Some(Whole(step.metrics.tokens_seen))),
        shown("step_ms", "speed/step_ms", |step| {
            Some(Real(step.metrics.step_ms))
        }),
        shown("tokens_per_s", "speed/tokens_per_s", |step| {
            Some(Real(step.metrics.tokens_per_s))
        }),
        shown("mfu", "speed/mfu", |step| step.mfu.map(Real)),
        quantised!("quant_error.params", quant_error, params),
        quantised!("quant_bound.params", quant_bound, params),
        quantised!("quant_error.grads", quant_error, grads),
        quantised!("quant_bound.grads", quant_bound, grads),
        memory!(params_bytes),
        memory!(grads_bytes),
        memory!(optimizer_bytes),
        memory!(buckets_bytes),
        memory!(activations_bytes),
        memory!(workspace_bytes),
        memory!(staging_bytes),
        memory!(host_bytes),
        memory!(peak_bytes),
    ]
};
