//! ZeRO stages 0 to 3 over the crates of the workspace.
//!
//! `dense` (stage 0), `stages_1_and_2` and `stage3` each contain one algorithm. They share a `Rank`
//! (streams, pool, communicator, layout), flat storages, the reduction of gradients, and the end of
//! a step. `run_rank` is the loop of one rank; [`run_on_threads`] runs all ranks in this process.

mod batch_loader;
mod breakdown;
mod dense;
mod exchange;
mod flags;
mod gradients;
mod host_optimizer;
mod host_params;
mod launch;
mod memory_trace;
mod metrics;
mod offload;
mod phase;
mod rank;
mod rank_bytes;
mod recorder;
mod replicas;
mod run;
mod saver;
mod stage;
mod stage3;
mod stages_1_and_2;
mod state;
mod storage;
mod unit_file;
mod validation;
mod whole_params;
mod workload;

pub use breakdown::{Breakdown, CommMs, PartsMs, PassMs, UnitsMs};
pub use exchange::RankExchange;
pub use launch::{SHARD_ALIGN_ELEMS, run_as_rank, run_on_cuda, run_on_host_device, run_on_threads};
pub use memory_trace::{MemoryPoint, MemoryTrace};
pub use metrics::{CommBytes, MemoryBytes, NvmeBytes, OverlapMs, StepMetrics};
pub use offload::{Home, OffloadSettings, StateFormat};
pub use rank::Settings;
pub use rank_bytes::{RankBytes, piece_elems, scratch_elems, wide_moments};
pub use recorder::AT_STAGE_3;
pub use replicas::ReplicaChecks;
pub use stage::device_steps;
pub use state::TrainerState;
pub use validation::{Best, Validation, ValidationOptions};
pub use workload::{InitialWeights, RankSummary, RunOptions, Workload};
