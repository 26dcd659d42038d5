//! Tests that cross crates and need neither a GPU nor NVRTC, in one program, because linking
//! several is slow.

mod errors;
mod generate;
mod own_framework;
mod public_types;
mod trainer;
mod words;
