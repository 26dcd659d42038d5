//! Integration tests of zero-ckpt.
#![cfg(not(miri))]

mod background;
mod common;
mod corpus;
mod crash;
mod damage;
mod disk;
mod exchange;
mod properties;
mod reshard;
mod runs;
