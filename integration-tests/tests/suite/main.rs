//! Tests that cross crates and need neither a GPU nor NVRTC, in one program, because linking
//! several is slow.

#[path = "../common/arrays.rs"]
mod arrays;
mod bitsandbytes;
mod errors;
mod generate;
mod own_framework;
mod public_types;
#[path = "../common/steps.rs"]
mod steps;
mod trainer;
mod words;
