//! Code shared by the benches and their tests.

pub mod replay;
