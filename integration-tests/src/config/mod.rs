//! Configuration files: DeepSpeed's `ds_config.json`, read unchanged.
//!
//! Every key of a file has one of four fates, and none is silent where it matters:
//!
//! | fate | example | |
//! |---|---|---|
//! | honoured | `zero_optimization.stage` | a field of [`DsConfig`] |
//! | what happens anyway | `contiguous_gradients: true` | nothing to say |
//! | not honoured, results the same but for rounding and speed | `round_robin_gradients: true` | a warning |
//! | not honoured, other results | `zero_quantized_gradients: true` | an error |
//!
//! The rules for the rest are DeepSpeed's: unknown keys are errors in `zero_optimization`, its `offload_*`,
//! `fp16` and `bf16`, and warnings elsewhere; `"auto"` is the default; `stage3_X` is also `X`, `bfloat16` is
//! `bf16`; bucket sizes count elements; comments are allowed. Defaults are those of DeepSpeed 0.19.
//!
//! ```
//! use integration_tests::config::DsConfig;
//!
//! let config = DsConfig::parse(r#"{
//!     "train_batch_size": 64,
//!     "gradient_accumulation_steps": 2,     // rows of a micro-batch: derived
//!     "bf16": {"enabled": true},
//!     "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5e6},
//!     "steps_per_print": 10,
//! }"#).unwrap();
//! assert_eq!(config.zero.stage, 3);
//! assert_eq!(config.zero.prefetch_bucket_elems, 5_000_000);
//! assert_eq!(config.batch.resolve(4, None, None, 8).unwrap().micro_batch, 8);
//! ```

mod batch;
mod block;
mod deepspeed;
mod error;
mod json;
mod optimizer;
mod precision;
mod zero;

#[cfg(test)]
mod tests;

pub use batch::{Batch, BatchKeys};
pub use deepspeed::{ActivationCheckpointing, Aio, DsConfig};
pub use error::ConfigFileError;
pub use optimizer::DsOptimizer;
pub use zero::{OffloadDevice, OffloadOptimizer, OffloadParam, ZeroOptimization};
