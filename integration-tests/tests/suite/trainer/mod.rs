//! The whole trainer: PyTorch's numbers, bit identity of the stages, memory and traffic by the
//! formulas, resume, overflow and failures.

mod documents;
mod dropout;
mod ends;
mod failures;
mod frozen_in_blocks;
mod gather_codec;
mod groups;
mod identical;
mod lora;
mod mesh;
mod mesh_time;
mod model;
mod moments_in_blocks;
mod muon;
mod offload;
mod offload_time;
mod on_ranks;
mod overflow;
mod overlap;
mod pytorch;
mod quantised;
mod replicas;
mod resume;
mod schedule;
mod support;
mod tensor;
mod timeline;
mod toy;
mod two_level;
mod ulysses;
mod validation;
mod volumes;
