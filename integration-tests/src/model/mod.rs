//! The model: a GPT-2 transformer.

pub mod config;
