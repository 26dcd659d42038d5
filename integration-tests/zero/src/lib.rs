//! The commands of the binary `zero`: training, planning and checkpoint tools.
//!
//! ```text
//! train  plan  tune  ckpt  generate  inspect   the commands; train and tune ask plan, tune starts train
//!  |      |
//!  memory |               what a rank needs, and what this machine has
//!    settings             the settings of a run: flags, configuration, run.json
//!            workload     a model and its data for the trainer; DeepSpeed's file is of the crate zero-config
//!            codec        a prompt's text to tokens and back; data is of the crate zero-data
//! launcher                one process a rank
//! flags  output  error    shared by all
//! ```

#[macro_use]
mod error;

pub mod ckpt;
mod codec;
mod flags;
pub mod generate;
pub mod inspect;
pub mod launcher;
pub mod measure;
mod memory;
mod model_files;
mod output;
mod paths;
pub mod plan;
mod settings;
pub mod train;
pub mod tune;
pub mod workload;

pub use error::CliError;
