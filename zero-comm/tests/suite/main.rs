//! The tests that need neither a GPU nor processes: collectives, buckets, prefetch, overlap, seeded
//! orders.

mod buckets;
mod collective_order;
#[path = "../common/mod.rs"]
mod common;
mod conformance;
#[cfg(feature = "cuda")]
mod corpus;
mod faults;
mod other_devices;
mod overlap;
mod prefetch;
mod quantised;
mod seeded;
mod threads;
mod two_level;
mod unit_collectives;
mod wait_on_drop;
