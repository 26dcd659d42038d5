//! ZeRO stages 0 to 3 over the crates of the workspace, for any [`Model`].
//!
//! A model is a list of units of parameters and of passes that read them. The stages decide what is
//! stored, gathered, reduced and freed; they know no architecture, no command line and no file of
//! tokens. [`run_on_threads`] trains on all ranks of this process, [`run_as_rank`] and
//! [`run_on_cuda`] as one rank of several processes.
//!
//! `stages::stages_0_to_2` and `stages::stage3` each begin with one algorithm. They share a `Rank`
//! (streams, pool, communicator, layout), flat storages, the reduction of gradients, and the end of
//! a step.
//!
//! A whole program with a model of bigrams:
//! ```
#![doc = include_str!("../examples/bigrams.rs")]
//! ```

mod batch;
mod error;
#[cfg(test)]
mod fixtures;
mod frozen_layout;
mod launch;
mod mesh;
mod mesh_settings;
mod model;
mod muon_settings;
mod offload;
mod options;
pub mod param_groups;
mod quantised;
mod rank;
mod rank_bytes;
mod rank_exchange;
mod run;
mod samples;
mod saving;
mod schedule;
mod settings;
mod stages;
mod state_ranks;
mod step;
mod telemetry;
mod units;
mod validation;
mod workload;

pub use {zero_alloc, zero_comm, zero_optim, zero_shard};

pub use batch::{Batch, BatchRows, IGNORED};
pub use error::TrainError;
pub use launch::{CudaOptions, run_as_rank, run_on_cuda, run_on_host_device, run_on_threads};
pub use mesh_settings::MeshSettings;
pub use model::{Grad, Model, ModelError, ModelRanks, Pass};
pub use muon_settings::{MatricesOf, MuonSettings};
pub use offload::settings::{Home, OffloadSettings};
pub use options::{
    NextToken, ReplicaChecks, RunOptions, SampleOptions, ValidationData, ValidationOptions,
};
pub use quantised::{ErrorFeedback, QuantisedGrads};
pub use rank_bytes::{
    RankBytes, encoded_bytes, gathers, held_matrix_bytes, matrix_bytes, piece_elems,
    planned_matrices, scratch_elems,
};
pub use rank_exchange::RankExchange;
pub use saving::state::TrainerState;
pub use schedule::{StepSchedule, record_on_device, record_on_host};
pub use settings::SHARD_ALIGN_ELEMS;
pub use settings::Settings;
pub use stages::grad_errors::SavedErrors;
pub use stages::optimizer::device_steps;
pub use step::recorder::AT_STAGE_3;
pub use telemetry::breakdown::{Breakdown, CommMs, PartsMs, PassMs, UnitsMs};
pub use telemetry::memory_trace::{MemoryPoint, MemoryTrace};
pub use telemetry::metrics::{
    Best, CommBytes, MemoryBytes, NvmeBytes, OverlapMs, QuantFigures, StepMetrics, Validation,
};
pub use workload::{BatchAt, InitialWeights, RankSummary, Workload};
