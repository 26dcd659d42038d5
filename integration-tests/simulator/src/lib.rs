//! Step times of training runs before there are machines.
//!
//! A [`Machine`] has the figures of a data sheet: peaks of the GPU, its memory and its links. A
//! program reaches a part of each, which six [`Efficiencies`] describe. From them and a [`Shape`] of a
//! transformer, [`Costs`] computes the seconds of the passes of one micro-batch, and [`ring`] the
//! seconds of a gather or a reduce-scatter.
//!
//! The efficiencies have priors. Up to eight measured steps of a machine and a software replace
//! them: [`Table`] reads the measurements, [`calibration_rows`] picks the eight, or
//! [`row_weights`] weighs all, [`fit`] fits, and
//! [`Errors`] compares predictions with the rows that were not used.
//!
//! ```
//! use zero_simulator::{Attention, Cluster, Costs, Efficiencies, Shape, Software};
//!
//! let cluster: Cluster = "h100-80g:8x64".parse()?;
//! let shape = Shape {
//!     layers: 32,
//!     width: 4096,
//!     heads: 32,
//!     kv_heads: 32,
//!     ffn: 16384,
//!     gated: false,
//!     vocab: 50368,
//!     seq: 2048,
//!     sequence_ranks: 1,
//!     params: 6_658_859_008,
//!     adapters: None,
//! };
//! let software = Software {
//!     attention: Attention::Flash,
//!     wide_reduce: true,
//!     fp8: false,
//!     recompute: false,
//! };
//! let costs = Costs {
//!     machine: &cluster.machine,
//!     shape: &shape,
//!     software: &software,
//!     efficiencies: &Efficiencies::PRIOR,
//! };
//! let [forward, backward] = costs.passes(4, true).block;
//! assert!(0.0 < forward && forward < backward);
//! # Ok::<(), zero_simulator::MachineError>(())
//! ```
//!
//! [`Run`] orders them in time: our trainer itself enqueues the step, on streams that record
//! ([`zero_trainer::record_on_device`]), and [`StepSchedules::step`] gives the recorded operations
//! these costs. So stages, prefetching, buckets and groups of ranks are those of a run. It knows no
//! pipeline parallelism, and it does not check whether a run fits the memory.

mod efficiencies;
mod errors;
mod fit;
mod formulas;
mod machine;
mod presets;
mod rows;
mod rule;
mod step;
mod text;
mod workload;

pub use efficiencies::Efficiencies;
pub use errors::{Errors, PairCount, Worst, errors_table};
pub use fit::{Fit, FitError, fit, fit_weighted};
pub use formulas::{Adapters, Attention, Costs, PassSeconds, Shape, Software, ring};
pub use machine::{Cluster, Machine, MachineError};
pub use rows::{PREDICTED, Row, RowsError, Table, groups};
pub use rule::{CALIBRATION_ROWS, calibration_rows, is_memory_tight, likely_range, row_weights};
pub use step::{Run, SimulatedRow, SimulatedStep, StepSchedules, Units};
pub use text::{from_text, to_text};
