//! The Llama family: RMS norm, rotary positions, grouped queries, SwiGLU, in the versions of Llama,
//! Mistral and Qwen.

pub mod config;
mod hf_json;

pub use crate::config::rope;
