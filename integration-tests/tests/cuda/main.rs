//! The transformer's operations and models on a CUDA device, or on its stand-in: each operation
//! against fp64, models against PyTorch and against the host.
//!
//! All tests need a device: run `cargo gpu-test cuda`, or, without a GPU,
//! `stand-ins/with-stand-ins cargo test -p integration-tests --test cuda -- --ignored`. The
//! stand-ins' README lists what a pass without a GPU proves.

#[path = "../common/arrays.rs"]
mod arrays;
mod cuda_adapters;
mod cuda_attention;
mod cuda_dropout;
mod cuda_errors;
mod cuda_llama;
mod cuda_llama_ops;
mod cuda_matmul;
mod cuda_model;
mod cuda_ops;
mod cuda_sequence;
mod cuda_trainer;
mod fp64;
mod gpu;
mod on_gpu;
#[path = "../common/steps.rs"]
mod steps;
