#![doc = include_str!("../README.md")]

mod chain;
mod muon;
mod tensors;
mod train;

pub use chain::{Block, Chain};
pub use muon::with_muon;
pub use train::{TrainStep, ZeroBurn, unit_of_block};
