//! The results of simulations and calibrations.

use std::path::Path;

use serde::{Deserialize, Serialize};
use zero_simulator::{Efficiencies, to_text};

use crate::error::CliError;

/// Efficiencies in a file, and where they are from.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Calibration {
    pub(crate) source: String,
    pub(crate) efficiencies: Efficiencies,
    /// ln(predicted / measured) of the rows that were fitted.
    pub(crate) residuals: Vec<f64>,
}

/// The simulated step of a stage.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Simulated {
    /// Of a step, and its likely range.
    pub(crate) step_ms: f64,
    pub(crate) step_ms_range: [f64; 2],
    pub(crate) tokens_per_s: f64,
    pub(crate) tokens_per_s_gpu: f64,
    /// Of the peak, with the operations of the model: recomputation does not count.
    pub(crate) mfu: f64,
    pub(crate) tflops_gpu: f64,
    /// The compute stream waits.
    pub(crate) exposed_ms: f64,
    /// Collectives between nodes, and within them.
    pub(crate) network_ms: f64,
    pub(crate) links_ms: f64,
    /// The bottleneck of the step.
    pub(crate) bound: &'static str,
    /// Savings by twice the rate of a part of the machine; empty in a search.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) gains: Vec<Gain>,
    /// Days and GPU hours of `--tokens`.
    pub(crate) days: Option<f64>,
    pub(crate) gpu_hours: Option<f64>,
    /// Whether the number of GPUs is beyond those of published runs.
    pub(crate) extrapolated: bool,
}

/// The saving by a faster part of the machine.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Gain {
    /// The part that would have twice its rate.
    pub(crate) what: &'static str,
    /// The part of the step's time that this saves.
    pub(crate) part: f64,
}

/// The speed of one stage on a number of GPUs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Point {
    pub(super) gpus: u64,
    pub(super) stage: u8,
    pub(super) step_ms: f64,
    pub(super) tokens_per_s: f64,
    pub(super) mfu: f64,
    pub(super) fits: Option<bool>,
    pub(super) extrapolated: bool,
}

impl Calibration {
    /// Writes it to `path`.
    pub(super) fn write(&self, path: &Path) -> Result<(), CliError> {
        let file = path.display().to_string();
        let text = to_text(self, &file).map_err(CliError::failure)?;
        std::fs::write(path, text).map_err(|error| failure!("{file}: {error}"))
    }
}
