#![doc = include_str!("../README.md")]

mod chain;
mod tensors;
mod train;

pub use chain::{Block, Chain};
pub use train::{TrainStep, ZeroBurn, unit_of_block};
