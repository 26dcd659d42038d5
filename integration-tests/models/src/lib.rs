//! Models for [`zero_trainer`]: GPT-2 and the Llama family, their operations on the host and on
//! CUDA, Hugging Face folders and initial weights.

mod architecture;
mod config;
pub mod cuda;
mod decoder;
pub mod generate;
pub mod gpt2;
pub mod hf;
pub mod llama;
pub mod lora;
pub mod ops;
mod options;
pub mod random;
mod tensor;
mod tensor_names;
mod tensor_traffic;

pub use architecture::{ModelConfig, PRESETS};
pub use config::ConfigError;
pub use decoder::HostModel;
pub use decoder::gpu::{GpuModel, writes_grad};
pub use options::{GpuBytes, ModelOptions};
pub use tensor_names::{matrices_of, param_kind};
pub use tensor_traffic::{TensorBytes, TensorElems};
