//! DeepSpeed's configuration file, `ds_config.json`.
//!
//! A key is handled in one of four ways:
//!
//! | key | example | result |
//! |---|---|---|
//! | supported | `zero_optimization.stage` | a field of [`DsConfig`] |
//! | equal to this program's behavior | `contiguous_gradients: true` | nothing |
//! | unsupported, changes rounding or speed | `round_robin_gradients: true` | a warning |
//! | unsupported, changes results | `zero_quantized_gradients: true` | an error |
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
//! [`zero_trainer::param_groups`].
//!
//! tests/data/shipped_configurations.md lists the configurations of seven projects, and which of
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

pub(crate) use autotuning::Autotuning;
pub(crate) use batch::{Batch, BatchKeys};
pub(crate) use deepspeed::{DsConfig, canonical};
pub(crate) use error::ConfigFileError;
pub(crate) use monitors::MonitorFolder;
pub(crate) use zero::ZeroOptimization;
