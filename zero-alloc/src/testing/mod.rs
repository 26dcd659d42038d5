//! Back ends for tests: one that only pretends to have memory, one that fails when told to.

mod faulty;
mod simulated;

pub use faulty::{Call, Faulty, FaultyStream};
pub use simulated::{Simulated, SimulatedUse};
