//! Tests that cross crates and need neither a GPU nor NVRTC, in one program, because linking
//! several is slow.

#[path = "../common/arrays.rs"]
mod arrays;
mod errors;
mod folders_in_4_bits;
mod generate;
mod own_framework;
mod public_types;
#[path = "../common/steps.rs"]
mod steps;
mod trainer;
mod words;
