//! Integration tests of zero-ckpt.
#![cfg(not(miri))]

mod assemble;
mod background;
mod common;
mod corpus;
mod crash;
mod damage;
mod disk;
mod encodings;
mod export;
mod faults;
mod leftovers;
mod model_files;
mod on_ranks;
mod properties;
mod reshard;
mod runs;
mod staged;
mod staged_model;
mod tensor_parallel;
