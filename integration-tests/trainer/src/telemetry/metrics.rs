//! The metrics of a step, as `--metrics` writes them: one JSON object a line.

use serde::{Deserialize, Serialize};
use zero_alloc::{Purpose, Report};
use zero_comm::overlap::Overlap;

use crate::mesh::Sent;
use crate::telemetry::breakdown::Breakdown;

/// One step on one rank; loss and norm are the same on all.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Completed steps, including this one.
    pub step: u64,
    /// Mean loss over all tokens of the step, in nats.
    pub loss: f64,
    /// Norm of the mean gradient before clipping; null if it was not finite.
    pub grad_norm: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// Loss scale of the backward.
    pub loss_scale: f64,
    /// Whether the step was skipped because a gradient was not finite.
    pub skipped: bool,
    /// Tokens of all ranks in this step.
    pub tokens: u64,
    /// Wall time of the step.
    pub step_ms: f64,
    /// `tokens` divided by `step_ms`, per second.
    pub tokens_per_s: f64,
    /// Bytes that this rank sent in this step.
    pub comm_bytes: CommBytes,
    /// Bytes that this rank held.
    pub memory: MemoryBytes,
    /// Time spent on this rank's streams.
    pub overlap: OverlapMs,
    /// Tokens of all ranks in all steps so far, those before a resume included.
    #[serde(default)]
    pub tokens_seen: u64,
    /// Seconds until the last step, at the speed of the last steps.
    #[serde(default)]
    pub eta_s: f64,
    /// The wall time by part, if it was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub breakdown: Option<Breakdown>,
    /// Scratch files, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvme: Option<NvmeBytes>,
    /// How far the values that ranks sent in blocks in this step are from those that arrived, over
    /// all ranks: the root of the sum of squares of the errors, by that of the values. Parameters
    /// that were gathered behind an update count in the step that reads them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quant_error: Option<QuantFigures>,
    /// The same of the greatest errors that the formats allow these values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quant_bound: Option<QuantFigures>,
    /// The evaluation after this step, which is not part of `step_ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<Validation>,
    /// The continuation of the sample's prompt after this step; not in the JSON.
    #[serde(skip)]
    pub sample: Option<Vec<u32>>,
}

/// A figure of values in blocks; `None` where none was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QuantFigures {
    /// Of parameters.
    pub params: Option<f64>,
    /// Of gradients.
    pub grads: Option<f64>,
}

/// The result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Mean loss, in nats a token.
    pub loss: f64,
    /// e to the power of `loss`.
    pub perplexity: f64,
    /// Evaluated tokens.
    pub tokens: u64,
}

/// The lowest validation loss of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Its step, whose checkpoint is kept.
    pub step: u64,
    /// The loss.
    pub loss: f64,
    /// Checksum of the evaluated tokens.
    pub fingerprint: u64,
    /// Whether its checkpoint was saved for this loss alone. It is removed when another one is
    /// better.
    pub only_best: bool,
}

/// Compute and communication of a step, in milliseconds, from the streams' timeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OverlapMs {
    /// Time during which compute ran.
    pub compute_ms: f64,
    /// Time during which a collective ran, including its wait for other ranks.
    pub comm_ms: f64,
    /// Time during which a collective ran and compute did not.
    pub exposed_comm_ms: f64,
    /// 1 - (step - compute) / communication, from 0 to 1.
    pub overlap_fraction: f64,
}

impl From<Overlap> for OverlapMs {
    fn from(overlap: Overlap) -> Self {
        let ms = |d: std::time::Duration| d.as_secs_f64() * 1e3;
        Self {
            compute_ms: ms(overlap.compute),
            comm_ms: ms(overlap.comm),
            exposed_comm_ms: ms(overlap.exposed),
            overlap_fraction: overlap.fraction(),
        }
    }
}

/// Bytes sent, by collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommBytes {
    /// By reduce-scatter.
    pub reduce_scatter: u64,
    /// By all-gather.
    pub all_gather: u64,
    /// By all-reduce.
    pub all_reduce: u64,
    /// By all-to-all: between ranks that share sequences, of quantised gradients, and of Muon's
    /// matrices.
    #[serde(default)]
    pub all_to_all: u64,
    /// By the all-gather of statistics and losses.
    pub control: u64,
    /// By all ranks of this rank's machine to other machines, without control traffic and Muon's
    /// matrices; 0 if the machines are not known. A ring enters and leaves a machine once.
    #[serde(default)]
    pub between: u64,
}

impl CommBytes {
    pub(crate) fn of(sent: Sent) -> Self {
        Self {
            reduce_scatter: sent.rank.reduce_scatter_bytes,
            all_gather: sent.rank.all_gather_bytes,
            all_reduce: sent.rank.all_reduce_bytes,
            all_to_all: sent.rank.all_to_all_bytes,
            control: sent.rank.control_bytes,
            between: sent.between_bytes,
        }
    }

    /// The sum without control traffic, which the formulas do not count.
    pub fn total(&self) -> u64 {
        self.reduce_scatter + self.all_gather + self.all_reduce + self.all_to_all
    }
}

/// Bytes of scratch files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmeBytes {
    /// Length of the files.
    pub file_bytes: u64,
    /// Bytes read in this step; transfers behind the update count in the step in which they end.
    pub read_bytes: u64,
    /// Bytes written in this step.
    pub written_bytes: u64,
}

impl NvmeBytes {
    /// The bytes read and written since `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            read_bytes: self.read_bytes - before.read_bytes,
            written_bytes: self.written_bytes - before.written_bytes,
            ..self
        }
    }
}

/// Bytes held, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryBytes {
    /// Parameters, or the shard of them.
    pub params_bytes: u64,
    /// Stored gradients, or the shard of them.
    pub grads_bytes: u64,
    /// Master weights and moments.
    pub optimizer_bytes: u64,
    /// Peak of buckets and gathered units in this step.
    pub buckets_bytes: u64,
    /// Peak of activations and their gradients in this step.
    pub activations_bytes: u64,
    /// Peak of a unit's fp32 gradient during its backward, and of small scratch, in this step.
    pub workspace_bytes: u64,
    /// Host memory for the copy of the state that is written to a checkpoint in the background.
    #[serde(default)]
    pub staging_bytes: u64,
    /// Peak of the total in this step; on the host with `staging_bytes`, on a GPU without.
    pub peak_bytes: u64,
    /// Bytes that the pool has allocated from the device.
    pub reserved_bytes: u64,
    /// Host memory of offloaded state and its transfers; on the host it is part of the figures
    /// above.
    #[serde(default)]
    pub host_bytes: u64,
}

impl From<&Report> for MemoryBytes {
    fn from(report: &Report) -> Self {
        let live = |purpose| report.of(purpose).live_bytes as u64;
        let peak = |purpose| report.of(purpose).peak_bytes as u64;
        Self {
            params_bytes: live(Purpose::Params),
            grads_bytes: live(Purpose::Grads),
            optimizer_bytes: live(Purpose::Optimizer),
            buckets_bytes: peak(Purpose::Buckets),
            activations_bytes: peak(Purpose::Activations),
            workspace_bytes: peak(Purpose::Workspace),
            staging_bytes: 0,
            peak_bytes: report.total.peak_bytes as u64,
            reserved_bytes: report.reserved_bytes as u64,
            host_bytes: 0,
        }
    }
}

impl MemoryBytes {
    /// Adds the pools of host memory; `on_host` if the rank's own memory is the host's.
    pub(crate) fn with_host(self, pools: &[Report], on_host: bool) -> Self {
        let host_bytes = pools
            .iter()
            .map(|report| report.total.peak_bytes as u64)
            .sum();
        let pools = if on_host { pools } else { &[] };
        let sum = pools.iter().map(Self::from).fold(self, |a, b| Self {
            params_bytes: a.params_bytes + b.params_bytes,
            grads_bytes: a.grads_bytes + b.grads_bytes,
            optimizer_bytes: a.optimizer_bytes + b.optimizer_bytes,
            buckets_bytes: a.buckets_bytes + b.buckets_bytes,
            activations_bytes: a.activations_bytes + b.activations_bytes,
            workspace_bytes: a.workspace_bytes + b.workspace_bytes,
            staging_bytes: a.staging_bytes,
            peak_bytes: a.peak_bytes + b.peak_bytes,
            reserved_bytes: a.reserved_bytes + b.reserved_bytes,
            host_bytes,
        });
        Self { host_bytes, ..sum }
    }

    /// Adds `staging_bytes` of host memory; `on_host` if that is the memory of the rank.
    pub(crate) fn with_staging(self, staging_bytes: u64, on_host: bool) -> Self {
        let peak_bytes = self.peak_bytes + if on_host { staging_bytes } else { 0 };
        Self {
            staging_bytes,
            peak_bytes,
            ..self
        }
    }
}
