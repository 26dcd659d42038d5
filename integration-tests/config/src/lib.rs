//! DeepSpeed's configuration file, `ds_config.json`: the rules and messages of `zero train --config`
//! and of the Python package zero_torch.
//!
//! ```
//! use zero_config::DsConfig;
//!
//! let file = DsConfig::parse(r#"{"train_batch_size": 32, "zero_optimization": {"stage": 3}}"#).unwrap();
//! assert_eq!(file.zero.stage, 3);
//! assert_eq!(file.batch.resolve(4, None, None, 1).unwrap().micro_batch, 8);
//!
//! let error = DsConfig::parse(r#"{"zero_optimization": {"stag": 3}}"#).unwrap_err();
//! assert!(error.to_string().starts_with("unknown key zero_optimization.stag"));
//! ```
//!
//! Reasons in messages are those of the program `zero`. It does not have the settings of a run, into
//! which the two programs make it, each with its own defaults.
//!
//! A key is handled in one of four ways:
//!
//! | key | example | result |
//! |---|---|---|
//! | supported | `zero_optimization.stage` | a field of [`DsConfig`] |
//! | equal to this program's behavior | `contiguous_gradients: true` | nothing |
//! | unsupported, changes rounding or speed | `round_robin_gradients: true` | a warning |
//! | unsupported, changes results | `zenflow: {..}` | an error |
//!
//! `"auto"` has the value that accelerate and the Hugging Face Trainer give it: a flag's or its
//! default, and
//!
//! | key | value |
//! |---|---|
//! | `reduce_bucket_size` | hidden^2 |
//! | `stage3_prefetch_bucket_size` | 0.9 hidden^2 |
//! | `stage3_param_persistence_threshold` | 10 hidden |
//! | `zero_optimization.stage` | that of `--stage auto` |
//! | `gradient_clipping` | `--clip`, or 1.0 |
//! | `total_num_steps` | `--steps` |
//! | `warmup_num_steps` | `--warmup-steps`, or 2, the least of DeepSpeed |
//! | `warmup_max_lr` | the learning rate |
//! | `fp16.enabled`, `bf16.enabled` | whether `--dtype` is that type |
//!
//! A resumed run has its recorded values instead. [`DsConfig::autos`] lists the keys. Flags
//! override keys. A flag that the configured schedule has no place for is an error.
//!
//! `param_groups` is an extension, which DeepSpeed ignores: a list of groups, of which a tensor
//! belongs to the first whose conditions (`names` with `*`, `kinds`, `min_dims`, `max_dims`) it
//! meets. Its rules are `lr_scale`, `weight_decay`, `betas` and `trainable`; see
//! [`ParamGroup`](zero_optim::ParamGroup).
//!
//! integration-tests/tests/data/shipped_configurations.md lists the configurations of seven projects, and which of
//! them are accepted.
//!
//! Other rules are DeepSpeed's: unknown keys are errors in `zero_optimization`, its `offload_*`
//! blocks, `fp16` and `bf16`, and warnings elsewhere; `stage3_X` and `X` are one key, and so are
//! `bfloat16` and `bf16`; bucket sizes count elements; comments are allowed. Defaults are those of
//! DeepSpeed 0.19.

mod autotuning;
mod batch;
mod block;
mod deepspeed;
mod error;
mod json;
mod monitors;
mod optimizer;
mod precision;
mod zero;

#[cfg(test)]
mod tests;

pub use autotuning::Autotuning;
pub use batch::{Batch, BatchKeys};
pub use deepspeed::{ActivationCheckpointing, Aio, DsConfig, canonical};
pub use error::ConfigFileError;
pub use monitors::{MonitorFolder, Monitors};
pub use optimizer::{DsMuon, DsOptimizer};
pub use zero::{LocoParams, ZeroOptimization};
