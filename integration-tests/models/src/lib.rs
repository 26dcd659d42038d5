//! Models for [`zero_trainer`]: GPT-2, its operations on the host and on CUDA, Hugging Face folders
//! and initial weights.

pub mod cuda;
pub mod gpt2;
pub mod hf;
pub mod ops;
pub mod random;
